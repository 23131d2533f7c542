"""The time of work on a device."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Starts when the device has done what it was given so far.

    On a GPU, events are its clock: the host may issue the steps long before, and the device has no pause between what came
    before the first step, the steps, and the copies that each issues for the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begin: Any = time.perf_counter() if self._stream is None else mark(self._stream)

    def stop(self) -> float:
        """Seconds until the device has done what it was given since; waits for that."""
        if self._stream is None:
            return float(time.perf_counter() - self._begin)
        end = mark(self._stream)
        end.synchronize()
        return float(self._begin.elapsed_time(end)) / 1e3


def mark(stream: torch.cuda.Stream) -> Any:
    """A timed event on a stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
