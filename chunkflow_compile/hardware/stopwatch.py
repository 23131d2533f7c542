"""The time of work on a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

# Share by which the same work may differ.  On two idle cores it differs by four hundredths at most; more is a sign of other
# processes that use them.
SPREAD = 0.10
# Share of their time in which threads have a processor on an idle machine, at least.  Below it, they share it with others.
_OWN = 0.90


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


def why_shared(threads: int, seconds: float = 0.3) -> str:
    """A clause that says that other work takes processors away from so many ``threads``; empty if it does not.

    Lets them compute for so many ``seconds``, and compares the time for which each had a processor.
    """
    share = min(_owned_shares(threads, seconds))
    return f"a thread had a processor for {100 * share:.0f} % of the time" if share < _OWN else ""


def _owned_shares(threads: int, seconds: float) -> list[float]:
    """The share of the time in which each of some threads that compute has a processor."""
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
