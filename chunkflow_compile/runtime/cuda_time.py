"""Time on a GPU: marks between the work on its streams, read after the GPU has passed them.

A mark is a timed event.  Events are created in the first passes and reused: each pass over the calls of a course takes a
frame of events from a small ring, and a later pass, once issued, reads the frame.  The host never waits: if no frame is
free, a pass is not measured.  A jump ends a pass: its calls are not measured.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from .streams import Over, Waited, Watch

# A mark costs the host 1 to 2 us to record and 3 to 5 us to read, and a pass over 60 blocks has two thousand.  So after the
# first FIRST_STEPS passes, only two consecutive passes in every EVERY are marked.  The second one
# counts; the first tells which copies run into it.
FIRST_STEPS = 16
EVERY = 16
# The host is seldom more than a pass ahead, because the queue of a GPU holds about a thousand kernels.
FRAMES = 4
# Of programs that run in turns and are no course, each call is a pass, and the host is many ahead: more frames are made
# for them, until all have so many events, as four passes over 60 blocks do.
MOST_EVENTS = 8192


class Frame:
    """The marks of a pass.  ``whole``: whether the pass before it was measured too, and no jump has ended it."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._events: list[Any] = []
        self._used = 0
        self._told: list[Callable[[Callable[[int], float]], None]] = []
        self._lock = threading.Lock()  # a second thread marks copies from pageable memory
        self._begin = 0
        self._ends: tuple[int, ...] = ()
        self.whole = True

    def open(self, stream: Any, whole: bool) -> None:
        """Begin a pass, and its first call, on ``stream``."""
        self._used, self._ends, self.whole = 0, (), whole
        self._told.clear()
        self.begin(stream)

    def begin(self, stream: Any) -> None:
        """Begin a call on ``stream``."""
        self._begin = self.mark(stream)

    def mark(self, stream: Any) -> int:
        """Record a mark at this point of ``stream``; return its number."""
        with self._lock:
            number, self._used = self._used, self._used + 1
            if number == len(self._events):
                self._events.append(self._event())
            event = self._events[number]
        event.record(stream)
        return number

    @property
    def events(self) -> int:
        """How many it has, those of earlier passes included."""
        return len(self._events)

    def between(self, begin: int, end: int, watch: Watch) -> None:
        def tell(at: Callable[[int], float]) -> None:
            watch.begins(at(begin))
            watch.ends(at(end))

        self._told.append(tell)

    def stood(self, begin: int, end: int, waited: Waited) -> None:
        self._told.append(lambda at: waited(at(end) - at(begin)))

    def end(self, compute: Any, copy: Any, over: Over) -> None:
        """End a call."""
        begin, end = self._begin, self.mark(compute)
        self._ends = end, self.mark(copy)
        self._told.append(lambda at: over(at(begin), at(end), self.whole))

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
    """Time on the GPU, in seconds since the first frame.

    ``event``: creates a timed event.  ``most``: events of all frames, beyond which no more frames are made.
    """

    def __init__(self, event: Callable[[], Any], most: int = MOST_EVENTS) -> None:
        self._event = event
        self._most = most
        # A queue: the first passes use the frames in turn and create the events of all, so later passes create none.
        self._free = deque(Frame(event) for _ in range(FRAMES))
        self._made = FRAMES
        self._pending: deque[Frame] = deque()
        self._open: Frame | None = None
        self._inside = False  # a call of the open frame
        self._left: int | None = None  # passes that are still to be marked; None to choose them
        self._newest: tuple[Frame, float] | None = None  # the frame read last, and the time of its first mark
        self._before = True
        self._lock = threading.RLock()

    def only(self, passes: int | None) -> None:
        """Mark the next ``passes`` passes, and none after them, in which no mark is read either; None to choose them."""
        with self._lock:
            self._left = passes

    def frame(self, step: int, follows: bool, stream: Any) -> Frame | None:
        """The frame for a call; None if it is not measured.

        ``step``: of its program, counted from 0.  ``follows``: whether it goes on with the pass of the call before it.
        """
        with self._lock:
            frame, failed = self._open, self._inside
            if frame is not None and follows and not failed:
                self._inside = True
                frame.begin(stream)
                return frame
            self._open, self._inside = None, False
            if frame is not None and failed:
                self._free.append(frame)
            elif frame is not None:  # a jump
                frame.whole = False
                self._pending.append(frame)
            before, self._before = self._before or step == 0, False
            if follows or not self._wanted(step):
                return None
            free = self._free.popleft() if self._free else self._another()
            if free is None:
                return None
            self._before = self._inside = True
            self._open = free
            free.open(stream, before)
            return free

    def close(self, frame: Frame, compute: Any, copy: Any, over: Over, last: bool) -> None:
        """End a call, and with the ``last`` one the pass.

        ``over`` is called by :meth:`collect` after the GPU has passed the end of the pass.
        """
        with self._lock:
            frame.end(compute, copy, over)
            self._inside = False
            if last:
                self._open = None
                self._pending.append(frame)

    def _wanted(self, step: int) -> bool:
        if self._left is None:
            return step < FIRST_STEPS or (step + 1) % EVERY < 2
        self._left = max(0, (before := self._left) - 1)
        return before > 0

    def _another(self) -> Frame | None:
        """A new frame, if those in use are so small that one more is allowed."""
        events = sum(frame.events for frame in self._pending)
        if not self._pending or events / len(self._pending) * (self._made + 1) > self._most:
            return None
        self._made += 1
        return Frame(self._event)

    def collect(self, wait: bool = False) -> None:
        """Read the frames that the GPU has passed; with ``wait``, wait for all of them."""
        with self._lock:
            while self._pending and (wait or self._left != 0):
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
