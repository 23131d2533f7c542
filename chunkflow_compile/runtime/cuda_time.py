"""Time on a GPU: marks between the work on its streams, read after the GPU has passed them.

A mark is a timed event.  Events are created in the first steps and reused: each step takes a frame of events from a
small ring, and a later step, once issued, reads the frame.  The host never waits: if no frame is free, a step is not
measured.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from .streams import Over, Waited, Watch

# A mark costs the host 1 to 2 us to record and 3 to 5 us to read, and a step of 60 blocks has two thousand.  So after the
# first FIRST_STEPS steps, only two consecutive steps in every EVERY are marked.  The second one
# counts; the first tells which copies run into it.
FIRST_STEPS = 16
EVERY = 16
# The host is seldom more than a step ahead, because the queue of a GPU holds about a thousand kernels.
FRAMES = 4


class Frame:
    """The marks of one step."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._events: list[Any] = []
        self._used = 0
        self._told: list[Callable[[Callable[[int], float]], None]] = []
        self._lock = threading.Lock()  # a second thread marks copies from pageable memory
        self._ends: tuple[int, ...] = ()
        self.whole = True

    def open(self, stream: Any, whole: bool) -> None:
        """Begin a step on ``stream``.  ``whole``: whether the previous step was measured too."""
        self._used, self._ends, self.whole = 0, (), whole
        self._told.clear()
        self.mark(stream)

    def mark(self, stream: Any) -> int:
        """Record a mark at this point of ``stream``; return its number."""
        with self._lock:
            number, self._used = self._used, self._used + 1
            if number == len(self._events):
                self._events.append(self._event())
            event = self._events[number]
        event.record(stream)
        return number

    def between(self, begin: int, end: int, watch: Watch) -> None:
        def tell(at: Callable[[int], float]) -> None:
            watch.begins(at(begin))
            watch.ends(at(end))

        self._told.append(tell)

    def stood(self, begin: int, end: int, waited: Waited) -> None:
        self._told.append(lambda at: waited(at(end) - at(begin)))

    def close(self, compute: Any, copy: Any, over: Over) -> None:
        end, whole = self.mark(compute), self.whole
        self._ends = end, self.mark(copy)
        self._told.append(lambda at: over(at(0), at(end), whole))

    def passed(self) -> bool:
        return all(self._events[i].query() for i in self._ends)

    def wait(self) -> None:
        for i in self._ends:
            self._events[i].synchronize()

    def since(self, before: Frame) -> float:
        """Seconds from the first mark of the frame ``before`` to the first mark of this one."""
        return float(before._events[0].elapsed_time(self._events[0])) / 1e3

    def tell(self, start: float) -> None:
        """Report the times of all marks.  ``start``: the time of the first one, seconds."""

        @cache
        def at(mark: int) -> float:
            return start + float(self._events[0].elapsed_time(self._events[mark])) / 1e3

        for told in self._told:
            told(at)
        self._told.clear()


class Clock:
    """Time on the GPU, in seconds since the first frame.  ``event``: creates a timed event."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        # A queue: the first steps use the frames in turn and create the events of all, so later steps create none.
        self._free = deque(Frame(event) for _ in range(FRAMES))
        self._pending: deque[Frame] = deque()
        self._open: Frame | None = None
        self._newest: tuple[Frame, float] | None = None  # the frame read last, and the time of its first mark
        self._before = True
        self._lock = threading.RLock()

    def frame(self, step: int, stream: Any) -> Frame | None:
        """A frame for a step, counted from 0; None if the step is not measured."""
        with self._lock:
            if self._open is not None:  # its step failed
                self._free.append(self._open)
                self._open = None
            before, self._before = self._before or step == 0, False
            if not self._free or not (step < FIRST_STEPS or (step + 1) % EVERY < 2):
                return None
            self._before = True
            self._open = self._free.popleft()
            self._open.open(stream, before)
            return self._open

    def close(self, frame: Frame, compute: Any, copy: Any, over: Over) -> None:
        """End a step.  ``over`` is called by :meth:`collect` after the GPU has passed the step."""
        with self._lock:
            frame.close(compute, copy, over)
            self._open = None
            self._pending.append(frame)

    def collect(self, wait: bool = False) -> None:
        """Read the frames that the GPU has passed; with ``wait``, wait for all of them."""
        with self._lock:
            while self._pending:
                if wait:
                    self._pending[0].wait()
                elif not self._pending[0].passed():
                    return
                self._read(self._pending.popleft())

    def _read(self, frame: Frame) -> None:
        start = 0.0
        if self._newest is not None:
            before, begun = self._newest
            start = begun + frame.since(before)
            self._free.append(before)  # not sooner: the time of the new frame counts from it
        self._newest = frame, start
        frame.tell(start)
