"""Measurement of the time that work takes on a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

# Fraction by which times of the same work may differ on an idle machine.  On two idle cores, the times differed by at
# most 4 %.
SPREAD = 0.10
# A computing thread has a CPU core for at least this fraction of the time if no other process uses the core.
_OWN = 0.90


class Stopwatch:
    """Measures the time that a device takes for the work that is issued between construction and :meth:`stop`.

    On a GPU, the time is measured between two events on the current stream.  Work that was issued on the stream before
    construction does not count, even if it is still running at construction.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._begin: Any = time.perf_counter() if self._stream is None else mark(self._stream)

    def stop(self) -> float:
        """Wait until the device has finished the work, and return its seconds."""
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
    """Return a clause that states how much the times of equal work differ.  The clause is empty if the times are about
    equal.  Large differences are a sign that the machine is busy with other work.

    ``what``: the subject of the clause, in the plural.  ``seconds``: the times of equal work.
    """
    if not seconds or max(seconds) <= (1 + SPREAD) * min(seconds):
        return ""
    return f"{what} took from {min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"


def why_shared(threads: int, seconds: float = 0.3) -> str:
    """Detect whether other work takes CPU cores away from ``threads`` computing threads.  If so, return a clause that
    states for which fraction of the time a thread had a core; otherwise return an empty string.

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
