"""Times on a GPU: the host records marks between pieces of work on the streams, and reads the time of each mark after the
GPU has reached this mark.

A mark is a record of a timed event.  The host creates the events in the first passes, and reuses them in later passes.  The
events are kept in *frames*: a frame is the set of all events for one measured call.  The host reads the times of a frame
during one of the next calls, once the GPU has reached all marks of the frame.  When a pass over the calls of a cycle begins,
:meth:`Device.choose` decides whether all calls of the pass are to be measured, or none of these calls.  The host never waits
for a free frame.  If a call finds no free frame, and the events of one more frame would exceed MOST_EVENTS, the call is not
measured, and the measurements of its pass are dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import torch

from .device_base import StepEnd, Waited, Watch

# The initial number of frames (sets of timed events, one per measured call in flight).  If a whole model is one call, the
# host is rarely more than one call ahead of the GPU, because the launch queue of a GPU holds about a thousand kernels.
FRAMES = 4
# The maximum number of events in all frames together.  This number is enough for four passes over 60 blocks.  If the blocks
# of a model are compiled separately, the host may be many calls ahead of the GPU, so more than FRAMES frames are created.
MOST_EVENTS = 8192


class Frame:
    """The marks of one measured call, and the timed events for these marks.  The events are reused for other calls.
    ``consecutive``: whether the previous call of the same program was also measured."""

    def __init__(self, event: Callable[[], torch.cuda.Event]) -> None:
        self._event = event
        self._events: list[torch.cuda.Event] = []
        self._numbers = count()
        self._reports: list[Callable[[Callable[[int], float]], None]] = []
        # two threads record marks: the main thread, and the thread that issues copies from unpinned memory
        self._lock = threading.Lock()
        self._ends: tuple[int, ...] = ()
        self.consecutive = True

    def open(self, stream: torch.cuda.Stream | None, consecutive: bool) -> None:
        """Begin a call, and record its first mark on ``stream``."""
        self._numbers, self._ends, self.consecutive = count(), (), consecutive
        self._reports.clear()
        self.mark(stream)

    def mark(self, stream: torch.cuda.Stream | None) -> int:
        """Record a mark at this point of ``stream``; return its number."""
        number = next(self._numbers)  # No lock is needed, because next() is one call into C.
        if number >= len(self._events):
            self._grow(number)
        self._events[number].record(stream)
        return number

    def _grow(self, number: int) -> None:
        """Create events until the frame has an event with this ``number``."""
        with self._lock:
            while len(self._events) <= number:
                self._events.append(self._event())

    @property
    def events(self) -> int:
        """The number of events in the frame.  The present call may need fewer events."""
        return len(self._events)

    def between(self, begin: int, end: int, watch: Watch) -> None:
        def report(at: Callable[[int], float]) -> None:
            watch.begins(at(begin))
            watch.ends(at(end))

        self._reports.append(report)

    def stalled(self, begin: int, end: int, waited: Waited) -> None:
        self._reports.append(lambda at: waited(at(end) - at(begin)))

    def close(self, compute: torch.cuda.Stream | None, lanes: Sequence[torch.cuda.Stream], over: StepEnd) -> None:
        end, consecutive = self.mark(compute), self.consecutive
        self._ends = end, *map(self.mark, lanes)
        self._reports.append(lambda at: over(at(0), at(end), consecutive))

    def passed(self) -> bool:
        return all(self._events[i].query() for i in self._ends)

    def wait(self) -> None:
        for i in self._ends:
            self._events[i].synchronize()

    def since(self, before: Frame) -> float:
        """Return the seconds from the first mark of the frame ``before`` to the first mark of this frame."""
        return float(before._events[0].elapsed_time(self._events[0])) / 1e3

    def report(self, start: float) -> None:
        """Pass the times of the marks to the callbacks of the call.  ``start``: the time of the first mark, in seconds since
        the first measured call began."""

        def at(mark: int) -> float:
            return start + float(self._events[0].elapsed_time(self._events[mark])) / 1e3

        for report in self._reports:
            report(at)
        self._reports.clear()


class Clock:
    """Time on the GPU, in seconds since the first measured call began.

    ``event``: a function that creates a timed event.  ``most``: the maximum number of events in all frames together.
    """

    def __init__(self, event: Callable[[], torch.cuda.Event], most: int = MOST_EVENTS) -> None:
        self._event = event
        self._most = most
        # The free frames form a queue, so each of the first FRAMES calls takes a different frame, and creates the events of
        # this frame.  After these calls, a call creates events only if the host is more than FRAMES calls ahead of the GPU,
        # or if the call needs more marks than its frame has events.
        self._free = deque(Frame(event) for _ in range(FRAMES))
        self._frames = FRAMES
        self._pending: deque[Frame] = deque()
        self.open: Frame | None = None  # the frame of the running call, if it is measured
        self._newest: tuple[Frame, float] | None = None  # the frame that was read last, and the time of its first mark
        self.zero = 0.0  # the value of time.monotonic() when the host began the first measured call
        self._lock = threading.RLock()

    def begin(self, stream: torch.cuda.Stream, marked: bool, consecutive: bool) -> Frame | None:
        """Begin a call; return the frame for its marks.  Return None if the call is not to be measured, or if no frame is
        free and no frame can be created.

        ``marked``: whether to measure the call.  ``consecutive``: whether the previous call of the program was measured.
        """
        with self._lock:
            if self.open is not None:  # a call that failed has left its frame open
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
        """End a call.  ``over``: a function that :meth:`collect` calls with the times of the call, after the GPU has reached
        the end of the call."""
        with self._lock:
            frame.close(compute, lanes, over)
            self.open = None
            self._pending.append(frame)

    def _another(self) -> Frame | None:
        """Return a new frame; None if all frames together would then have more than the maximum number of events."""
        events = sum(frame.events for frame in self._pending)
        if not self._pending or events / len(self._pending) * (self._frames + 1) > self._most:
            return None
        self._frames += 1
        return Frame(self._event)

    def collect(self, wait: bool = False) -> None:
        """Read the times of each frame whose marks the GPU has reached, and pass these times to the callbacks of the frame's
        call.  ``wait``: whether to wait first until the GPU has reached the marks of all frames."""
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
            self._free.append(before)  # this frame was kept until now, because since() needs its first mark
        self._newest = frame, start
        frame.report(start)
