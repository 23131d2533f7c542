"""The interface of a device for the executor: memory, in-order streams, events between them, and times.

There are three devices.  ``cpu``, the default, computes on the calling thread and copies on one thread that stands for
the copy engine.  ``threads`` has a thread for every stream, including compute, so the host runs ahead as on a GPU.
``cuda`` is a GPU.  The executor issues the same operations on all of them.  The first two can emulate a PCIe link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.step import Stream as StreamName
from chunkflow_compile.weights.source import Bytes

from .host_clock import MONOTONIC, HostClock
from .read_ahead import InRing

# Measuring a pass over the calls of a program or a cycle takes time: the host needs 0.1 ms per call, and on a GPU 1 to 2 us
# to record each of two thousand events and 3 to 5 us to read it.  So after the first FIRST_STEPS passes, only two consecutive
# passes in every EVERY are measured.  On a GPU the second pass counts; the first one shows which copies run into it.
# EVERY is prime, so that in a pattern that repeats, such as the steps of a generation, each step is measured at some time.
FIRST_STEPS = 16
EVERY = 17

# A copy to the device: target and source (uint8, equal sizes), and its name for profilers.
NamedCopy = tuple[torch.Tensor, Bytes | InRing, str]

# Called with the seconds that a stream stalled.
Waited = Callable[[float], None]
# Called with the times when a step began and ended, in seconds of the device's clock, and whether the previous step was also
# measured.  If it was not, it is unknown which of its copies overlapped the collectives of this step.
StepEnd = Callable[[float, float, bool], None]


class Watch(Protocol):
    """Gets the times when a piece of work begins and ends, in seconds of the device's clock.

    ``cuda`` calls it only after the step.
    """

    def begins(self, at: float) -> None: ...

    def ends(self, at: float) -> None: ...


class Stream(Protocol):
    """A queue of work that runs in order.  Events are of the device's own class."""

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        """Enqueue ``work``.  ``watch``: receives its times.  ``name``: shown by profilers of the device."""

    def record(self, event: Any) -> None:
        """Record the event at this point of the stream."""

    def wait(self, event: Any, waited: Waited | None = None) -> None:
        """Make the work that is enqueued from here on start after the latest record of the event.

        ``waited``: called with the seconds that the stream stalled.
        """

    def synchronize(self) -> None:
        """Block the host until the stream is empty.  Raises the error that the stream's work raised, if any."""


class ReadStream(Stream, Protocol):
    """The stream of reads from the SSD."""

    def recover(self) -> None:
        """Run the work that is enqueued from here on even if earlier work fails.  Only the events of the earlier work carry
        its error."""


class Device:
    """A device: the memory of an arena, and its streams.  Methods that do nothing here do nothing on host threads either.

    ``copy``: the lane of copies from the host.  ``pull``, ``reads``: the lane of pulls and the stream of reads from the SSD;
    both are created at their first use.
    ``collective``: the stream that collectives run on; the same object as ``compute`` if they run in its order.
    ``clock``: the clock of its host threads.  ``closed``: whether its streams are closed.  ``records``: whether it records
    the issued work as a CUDA graph instead of running it.
    """

    name: str
    compute: Stream
    copy: Stream
    collective: Stream
    clock: HostClock = MONOTONIC
    closed = False
    records = False
    pull: Stream | None = None
    reads: ReadStream | None = None
    _left: int | None = None  # passes left to measure on request; None to choose them

    @property
    def zero(self) -> float:
        """The time of ``clock`` at which the clock of the measurements was 0."""
        return 0.0

    def event(self) -> Any:
        """A new event, not recorded yet."""
        raise NotImplementedError

    def read_event(self) -> Any:
        """A new event for the stream of reads to record."""
        return self.event()

    def lane(self, name: Lane) -> Stream:
        """The stream of a lane."""
        if name == "copy":
            return self.copy
        if self.pull is None:
            self.pull = self._make_pull()
        return self.pull

    def recover(self) -> None:
        """Do the copies that are enqueued from here on also if earlier ones fail."""

    def _make_pull(self) -> Stream:
        """The stream for pulls."""
        raise NotImplementedError

    def _make_reads(self) -> ReadStream:
        """The stream for reads from the SSD."""
        raise NotImplementedError

    def stream(self, name: StreamName) -> Stream:
        """A stream by its name."""
        if name == "compute":
            return self.compute
        if name == "copy":
            return self.copy
        if name == "collective":
            return self.collective
        if name != "read":
            return self.lane(name)
        if self.reads is None:
            self.reads = self._make_reads()
        return self.reads

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams that were created so far."""
        reads = () if self.reads is None else (self.reads,)
        return (self.compute, self.collective, *self.lanes, *reads)

    @property
    def lane_names(self) -> tuple[Lane, ...]:
        """The names of the lanes that were created so far."""
        return LANES[:1] if self.pull is None else LANES

    @property
    def lanes(self) -> tuple[Stream, ...]:
        """The streams of the lanes that were created so far."""
        return (self.copy,) if self.pull is None else (self.copy, self.pull)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate memory for an arena, uint8.  Raises RuntimeError if there is not enough."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self) -> None:
        """Drop the reference to the arena's memory, which no work in flight uses."""

    def record_stream(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register memory outside the arena that steps read, so that it is not reused while a step is in flight."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Let the copy engine read a host tensor directly; return a function to undo it.  Raises OSError on failure."""
        return lambda: None

    def stage(self) -> None:
        """Prepare for copies from memory that could not be pinned."""

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, lane: Lane = "copy") -> None:
        """Copy ``source`` to ``target`` (uint8, equal sizes).  It is called as work on the stream of a lane."""
        raise NotImplementedError

    def copy_all(self, copies: Sequence[NamedCopy], lane: Lane = "copy") -> None:
        """Enqueue copies in a lane, without timing them."""
        for target, source, name in copies:
            self.lane(lane).run(partial(self.copy_bytes, target, source, lane), None, name)

    def received(self, nbytes: int) -> None:
        """Note that a collective has received ``nbytes`` on this rank.  It is called as work of the collective stream."""

    def deliver(self) -> None:
        """Wait until all enqueued work has produced its Python objects.  Raises the error that the work raised, if any.

        The contents of tensors may still be in flight, as on a GPU.
        """

    def sync_copies(self) -> None:
        """Wait for the copies of all delivered steps.  After that, the host may write to their sources."""

    def why_not_recorded(self) -> str:
        """The reason why calls cannot be recorded as CUDA graphs on this device; empty if they can."""
        return f"only a GPU has them, and this is device {self.name}"

    def recording(self, pool: Any) -> contextlib.AbstractContextManager[tuple[Any, Device]]:
        """A context that records a call as a CUDA graph.  It yields the graph, and the device to issue the call to.

        ``pool``: a graph whose memory pool the new graph shares, or None to create a pool.  Raises RuntimeError if part of
        the call cannot be recorded.
        """
        raise NotImplementedError

    def launch(self, graph: Any) -> None:
        """Enqueue a graph on the compute stream, after all copies that were issued outside of graphs."""
        raise NotImplementedError

    def reset(self, graph: Any) -> None:
        """Free the memory of a graph.  No launch of it may be in flight."""
        raise NotImplementedError

    def free(self) -> int:
        """Free memory of the device in bytes, after work in flight has ended."""
        return 0

    @property
    def measuring(self) -> bool:
        """Whether the next pass is measured because :meth:`measure` asks for it."""
        return bool(self._left)

    def measure(self, passes: int | None) -> None:
        """Measure the next ``passes`` passes, and no later ones.  With None, :meth:`choose` decides which passes to measure.

        Call :meth:`collect` with ``wait`` to get the measurements.
        """
        self._left = passes

    def choose(self, step: int, wanted: bool = False) -> bool:
        """Whether to measure the calls of the pass that begins.

        ``step``: number of the step of its program, from 0.  ``wanted``: whether its times are needed for re-planning.
        """
        if self._left is None:
            return wanted or step < FIRST_STEPS or (step - FIRST_STEPS + 1) % EVERY < 2
        self._left = max(0, (before := self._left) - 1)
        return before > 0

    def start(self, marked: bool, consecutive: bool) -> Any:
        """Begin a call of a program; return the value that :meth:`finish` takes as ``begun``, None if it is not measured.

        ``marked``: whether the call is measured, see :meth:`choose`.  ``consecutive``: whether the previous call of the
        program was measured.
        """
        raise NotImplementedError

    def finish(self, begun: Any, over: StepEnd) -> None:
        """End a call.  ``over``: called once the times of the call are known; never called if it is not measured."""
        raise NotImplementedError

    def collect(self, wait: bool = False) -> None:
        """Report the times of steps that are known by now.  ``wait``: whether to wait for the times of all issued steps."""

    def close(self) -> None:
        """Close the streams."""
        raise NotImplementedError
