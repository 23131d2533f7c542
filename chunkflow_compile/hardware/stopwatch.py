"""Measurement of the time that work takes on a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

# Fraction by which times of the same work may differ.  On two idle cores they differ by 4 % at most; a larger difference
# is a sign of other processes that use the cores.
SPREAD = 0.10
# Minimum fraction of the time for which a thread has a CPU core on an idle machine.  Below this, the thread shares the
# core with other processes.
_OWN = 0.90


class Stopwatch:
    """Measures the time from the moment when the device has finished all work that was issued before.

    On a GPU the times come from events.  The host may issue the steps long in advance, and the device does not pause
    between the earlier work, the steps, and the copies that each step issues for the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begin: Any = time.perf_counter() if self._stream is None else mark(self._stream)

    def stop(self) -> float:
        """Wait until the device has finished the work issued since the start, and return the elapsed seconds."""
        if self._stream is None:
            return float(time.perf_counter() - self._begin)
        end = mark(self._stream)
        end.synchronize()
        return float(self._begin.elapsed_time(end)) / 1e3


def mark(stream: torch.cuda.Stream) -> Any:
    """Record a timed event on a stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def why_uneven(what: str, seconds: Sequence[float]) -> str:
    """Return a clause that states how much times of the same work differ, as they do if the machine is busy with other
    work; empty if the times are about equal.

    ``what``: the subject of the clause, in the plural.  ``seconds``: the times of the same work.
    """
    if not seconds or max(seconds) <= (1 + SPREAD) * min(seconds):
        return ""
    return f"{what} took from {min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"


def why_shared(threads: int, seconds: float = 0.3) -> str:
    """Return a clause that states that other work takes CPU cores away from ``threads`` threads; empty if that is not the
    case.

    Lets the threads compute for ``seconds``, and measures the fraction of the time for which each thread had a core.
    """
    share = min(_owned_shares(threads, seconds))
    return f"a thread had a processor for {100 * share:.0f} % of the time" if share < _OWN else ""


def _owned_shares(threads: int, seconds: float) -> list[float]:
    """Return, for each of ``threads`` computing threads, the fraction of the time for which it had a CPU core."""
    shares = list[float]()

    def compute() -> None:
        matrix, begun, own = torch.ones(64, 64), time.perf_counter(), time.thread_time()
        while time.perf_counter() - begun < seconds:
            torch.mm(matrix, matrix)
        shares.append((time.thread_time() - own) / (time.perf_counter() - begun))

    running = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return shares
