"""Pace: points in long computations at which planning beside steps gives way to them.

Python runs one thread at a time, and hands over every 5 ms at most.  Steps give up their turn at every op, so planning on
another thread would delay each op by that.  A thread that sets a pace instead works for short slices and sleeps between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

# A thread starts without one, so nothing is shared between threads.
_PACE: ContextVar[Callable[[], None] | None] = ContextVar("chunkflow_pace", default=None)

# A step is delayed by at most SLICE_S at once, and by a tenth in all.
SLICE_S = 5e-4
_REST = 10


def pace() -> None:
    """Give way, if this thread has set a pace and has worked for a slice."""
    if (rest := _PACE.get()) is not None:
        rest()


def give_way(hurried: Callable[[], bool]) -> None:
    """Set the pace of this thread, until ``hurried`` returns True."""
    begun = time.perf_counter()

    def rest() -> None:
        nonlocal begun
        worked = time.perf_counter() - begun
        if worked > SLICE_S and not hurried():
            time.sleep(_REST * worked)
            begun = time.perf_counter()

    _PACE.set(rest)
