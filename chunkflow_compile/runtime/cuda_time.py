"""Time on a GPU: marks between the work on its streams, read after the GPU has passed them.

A mark is a timed event.  Events are created in the first passes and reused: each call takes a frame of events from a ring,
and a later call, once issued, reads the frame.  Whether a pass over the calls of a cycle is marked is chosen once, where
it begins.  The host never waits: if no frame is free, a call is not measured, and so its pass is not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import torch

from .device_base import StepEnd, Waited, Watch

# Of a model that is one call, the host is seldom more than a call ahead, because the queue of a GPU holds about a thousand
# kernels.
FRAMES = 4
# Of one whose blocks are compiled one by one it is many calls ahead: more frames are made, until all have so many events,
# as four passes over 60 blocks do.
MOST_EVENTS = 8192


class Frame:
    """The marks of a call.  ``whole``: whether the call of its program before it was measured too."""

    def __init__(self, event: Callable[[], torch.cuda.Event]) -> None:
        self._event = event
        self._events: list[torch.cuda.Event] = []
        self._numbers = count()
        self._reports: list[Callable[[Callable[[int], float]], None]] = []
        self._lock = threading.Lock()  # a second thread marks copies from pageable memory
        self._ends: tuple[int, ...] = ()
        self.whole = True

    def open(self, stream: torch.cuda.Stream | None, whole: bool) -> None:
        """Begin a call on ``stream``."""
        self._numbers, self._ends, self.whole = count(), (), whole
        self._reports.clear()
        self.mark(stream)

    def mark(self, stream: torch.cuda.Stream | None) -> int:
        """Record a mark at this point of ``stream``; return its number."""
        number = next(self._numbers)  # without the lock: one call into C
        if number >= len(self._events):
            self._grow(number)
        self._events[number].record(stream)
        return number

    def _grow(self, number: int) -> None:
        """Make events up to this one."""
        with self._lock:
            while len(self._events) <= number:
                self._events.append(self._event())

    @property
    def events(self) -> int:
        """How many it has, those of earlier calls included."""
        return len(self._events)

    def between(self, begin: int, end: int, watch: Watch) -> None:
        def report(at: Callable[[int], float]) -> None:
            watch.begins(at(begin))
            watch.ends(at(end))

        self._reports.append(report)

    def stalled(self, begin: int, end: int, waited: Waited) -> None:
        self._reports.append(lambda at: waited(at(end) - at(begin)))

    def close(self, compute: torch.cuda.Stream | None, lanes: Sequence[torch.cuda.Stream], over: StepEnd) -> None:
        end, whole = self.mark(compute), self.whole
        self._ends = end, *map(self.mark, lanes)
        self._reports.append(lambda at: over(at(0), at(end), whole))

    def passed(self) -> bool:
        return all(self._events[i].query() for i in self._ends)

    def wait(self) -> None:
        for i in self._ends:
            self._events[i].synchronize()

    def since(self, before: Frame) -> float:
        """Seconds from the first mark of the frame ``before`` to the first mark of this one."""
        return float(before._events[0].elapsed_time(self._events[0])) / 1e3

    def report(self, start: float) -> None:
        """Report the times of all marks.  ``start``: the time of the first one, seconds."""

        def at(mark: int) -> float:
            return start + float(self._events[0].elapsed_time(self._events[mark])) / 1e3

        for report in self._reports:
            report(at)
        self._reports.clear()


class Clock:
    """Time on the GPU, in seconds since the first frame.

    ``event``: creates a timed event.  ``most``: events of all frames, beyond which no more frames are made.
    """

    def __init__(self, event: Callable[[], torch.cuda.Event], most: int = MOST_EVENTS) -> None:
        self._event = event
        self._most = most
        # A queue: the first calls use the frames in turn and create the events of all, so later ones create none, unless
        # the host is further ahead then.
        self._free = deque(Frame(event) for _ in range(FRAMES))
        self._frames = FRAMES
        self._pending: deque[Frame] = deque()
        self.open: Frame | None = None  # of the call that runs, if it is measured
        self._newest: tuple[Frame, float] | None = None  # the frame read last, and the time of its first mark
        self.zero = 0.0  # when the host began the first frame, by time.monotonic()
        self._lock = threading.RLock()

    def begin(self, stream: torch.cuda.Stream, marked: bool, consecutive: bool) -> Frame | None:
        """The frame of a call that begins; None if it is not ``marked``, or if no frame is free.

        ``consecutive``: whether the program's call before it was measured.
        """
        with self._lock:
            if self.open is not None:  # its call failed
                self._free.append(self.open)
                self.open = None
            if marked:
                self.open = self._free.popleft() if self._free else self._another()
            if self.open is not None:
                self.zero = self.zero or time.monotonic()
                self.open.open(stream, consecutive)
            return self.open

    def end(
        self, frame: Frame, compute: torch.cuda.Stream | None, lanes: Sequence[torch.cuda.Stream], over: StepEnd
    ) -> None:
        """End a call.  ``over`` is called by :meth:`collect` after the GPU has passed it."""
        with self._lock:
            frame.close(compute, lanes, over)
            self.open = None
            self._pending.append(frame)

    def _another(self) -> Frame | None:
        """A new frame, if those in use are so small that one more is allowed."""
        events = sum(frame.events for frame in self._pending)
        if not self._pending or events / len(self._pending) * (self._frames + 1) > self._most:
            return None
        self._frames += 1
        return Frame(self._event)

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
        frame.report(start)
