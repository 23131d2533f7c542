"""The time of steps in a row: of the device, and of the host."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Starts when the device has done what it was given so far.

    On a GPU, events are its clock: the host may issue the steps long before, and the device has no pause between what came
    before the first step, the steps, and the copies that each issues for the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        if self._events:
            self._events[0].record(torch.cuda.current_stream(device))
        self._stream = torch.cuda.current_stream(device) if self._events else None
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds until the device has done what it was given since, and those until the host had given it."""
        host = time.perf_counter() - self._start
        if not self._events:
            return host, host
        begin, end = self._events
        end.record(self._stream)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, host
