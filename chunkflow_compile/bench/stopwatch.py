"""The time of steps in a row."""

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
        self._begin = self._mark()

    def stop(self) -> float:
        """Seconds until the device has done what it was given since; waits for that."""
        end = self._mark()
        if self._stream is None:
            return float(end - self._begin)
        end.synchronize()
        return float(self._begin.elapsed_time(end)) / 1e3

    def _mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
