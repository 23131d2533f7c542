"""The time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

# Share by which the same work may differ.  On two idle cores it differs by four hundredths at most; more is a sign of other
# processes that use them.
SPREAD = 0.10


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


def why_uneven(what: str, seconds: Sequence[float]) -> str:
    """That the same work took unequally long, in a clause, as on a machine that is busy with other work; empty if it did not.

    ``what``: the subject of the clause, in the plural.
    """
    if not seconds or max(seconds) <= (1 + SPREAD) * min(seconds):
        return ""
    return f"{what} took from {min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"
