"""The interface through which the executor uses a device: memory, in-order streams, events that order the streams, and
measured times.

There are three devices.  ``cpu`` computes on the calling thread.  Other threads take the role of the copy engines.
``threads`` runs every stream on a separate thread, including compute, so the host runs ahead of compute as with a GPU.
``cuda`` is a GPU.  The executor issues the same operations to all devices.  ``cpu`` and ``threads`` can emulate a PCIe link.
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

# Measuring a call costs 0.1 ms of host time.  On a GPU, a measured pass over the calls of a program or a cycle records about
# two thousand events.  Recording an event takes 1 to 2 us, and reading its time takes 3 to 5 us.  So after the first
# FIRST_STEPS passes, only two consecutive passes in every EVERY passes are measured.  On a GPU, only the times of the second
# of these two passes are used.  The first pass is measured as well, because its last copies may still run during the second
# pass: their times show which collectives of the second pass they overlapped.
# EVERY is prime, so that each step of a repeating pattern, such as generations of 28 steps, is measured at some time.
FIRST_STEPS = 16
EVERY = 17

# A copy to the device: its target, its source (both uint8, with equal sizes), and the name that profilers show for the copy.
NamedCopy = tuple[torch.Tensor, Bytes | InRing, str]

# A callback whose argument is the time in seconds for which a stream stalled.
Waited = Callable[[float], None]
# A callback with three arguments: the times when a step began and ended, in seconds of the device's clock, and whether the
# previous step was also measured.  If the previous step was not measured, it is not known which copies of the previous step
# overlapped the collectives of this step.
StepEnd = Callable[[float, float, bool], None]


class Watch(Protocol):
    """An object that gets the times when a piece of work begins and ends, in seconds of the device's clock.

    On the device ``cuda``, both methods are called only after the step has ended.
    """

    def begins(self, at: float) -> None: ...

    def ends(self, at: float) -> None: ...


class Stream(Protocol):
    """A queue of work that runs in order.  The class of the events depends on the device."""

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        """Enqueue ``work``.  ``watch``: an object that gets the times when the work begins and ends, or None.  ``name``: the
        name that profilers of the device show for the work."""

    def record(self, event: Any) -> None:
        """Enqueue a record of ``event``: a mark that the stream reaches after it has run all work that was enqueued before
        this call."""

    def wait(self, event: Any, waited: Waited | None = None) -> None:
        """Make all work that is enqueued after this call wait for the latest record of ``event``.

        ``waited``: a callback that gets the seconds for which the stream stalled, or None.
        """

    def synchronize(self) -> None:
        """Block the host until all work of the stream has finished.  If this work raised an error, this method raises the
        same error."""


class ReadStream(Stream, Protocol):
    """The stream of reads from the SSD."""

    def recover(self) -> None:
        """Make the stream run all work that is enqueued after this call, even if earlier work fails.  An error of the
        earlier work is then raised only where the host or a stream waits for an event that was recorded before this call."""


class Device:
    """A device with the memory and the streams of an arena.  The methods that do nothing in this class are needed only on
    some devices, whose classes override them.

    ``copy``: the stream of copies from the host.  ``pull``: the stream of pulls from other ranks.  ``reads``: the stream of
    reads from the SSD.  ``pull`` and ``reads`` are None until they are first used.
    ``collective``: the stream of collectives; on some devices, this is the same object as ``compute``.  ``completion``: the
    stream that runs the completions of collectives; None if ``collective`` runs them.  With a separate stream, a collective
    can start before the completion of the previous collective.  ``clock``: the clock of the host threads.  ``closed``:
    whether the streams are closed.  ``records``: whether the device records issued work as a CUDA graph instead of running
    it.
    """

    name: str
    compute: Stream
    copy: Stream
    collective: Stream
    completion: Stream | None = None
    clock: HostClock = MONOTONIC
    closed = False
    records = False
    pull: Stream | None = None
    reads: ReadStream | None = None
    _left: int | None = None  # the number of requested passes that are still to be measured; None if choose() decides

    @property
    def zero(self) -> float:
        """The time on ``clock``, in seconds, that corresponds to 0 in measured times."""
        return 0.0

    def event(self) -> Any:
        """Return a new event."""
        raise NotImplementedError

    def read_event(self) -> Any:
        """Return a new event that the stream of reads can record."""
        return self.event()

    def lane(self, name: Lane) -> Stream:
        """Return the stream of the lane ``name``.  The stream for pulls is created at its first use."""
        if name == "copy":
            return self.copy
        if self.pull is None:
            self.pull = self._make_pull()
        return self.pull

    def recover(self) -> None:
        """Make the lanes run all copies that are enqueued after this call, even if earlier copies have failed."""

    def _make_pull(self) -> Stream:
        """Create the stream for pulls."""
        raise NotImplementedError

    def _make_reads(self) -> ReadStream:
        """Create the stream for reads from the SSD."""
        raise NotImplementedError

    def stream(self, name: StreamName) -> Stream:
        """Return the stream with this ``name``."""
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
        """All streams that exist so far."""
        others = (stream for stream in (self.completion, self.reads) if stream is not None)
        return (self.compute, self.collective, *self.lanes, *others)

    @property
    def lane_names(self) -> tuple[Lane, ...]:
        """The names of the lanes whose streams exist so far."""
        return LANES[:1] if self.pull is None else LANES

    @property
    def lanes(self) -> tuple[Stream, ...]:
        """The streams of the lanes that exist so far."""
        return (self.copy,) if self.pull is None else (self.copy, self.pull)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` for an arena, as a uint8 tensor.  Raises RuntimeError if there is not enough memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self) -> None:
        """Drop the reference to the arena's memory.  The caller makes sure that no work in flight uses this memory."""

    def record_stream(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register ``tensors``, which steps read, but which are not in the arena's memory.  The device then makes sure that
        the memory of these tensors is not reused while a step is in flight."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pin a host tensor, so that the copy engine can read it directly; return a function that unpins it.  Raises OSError
        on failure."""
        return lambda: None

    def stage(self) -> None:
        """Prepare for copies from host memory that could not be pinned."""

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, lane: Lane = "copy") -> None:
        """Copy ``source`` to ``target`` (uint8, equal sizes).  The stream of ``lane`` runs this method as work."""
        raise NotImplementedError

    def copy_all(self, copies: Sequence[NamedCopy], lane: Lane = "copy") -> None:
        """Enqueue ``copies`` on the stream of a lane.  The times of these copies are not measured."""
        for target, source, name in copies:
            self.lane(lane).run(partial(self.copy_bytes, target, source, lane), None, name)

    def received(self, nbytes: int) -> None:
        """Record that a collective has received ``nbytes`` on this rank.  The collective stream runs this method as work."""

    def deliver(self) -> None:
        """Block until the Python code of all enqueued work has returned, so that the output tensors exist.  If this work
        raised an error, this method raises the same error.

        On a GPU, kernels may still be computing the values of these tensors after this method has returned.
        """

    def sync_copies(self) -> None:
        """Block until the copies of all steps that :meth:`deliver` has waited for are done.  Afterwards, the host may
        overwrite the weights that these copies read."""

    def why_not_recorded(self) -> str:
        """Return the reason why no call can be recorded as a CUDA graph on this device; empty if calls can be recorded."""
        return f"only a GPU has them, and this is device {self.name}"

    def recording(self, pool: Any) -> contextlib.AbstractContextManager[tuple[Any, Device]]:
        """Return a context that records a call as a CUDA graph.  The context yields the graph, and the device to which the
        call is to be issued.

        ``pool``: a graph whose memory pool the new graph shares, or None to create a pool.  Raises RuntimeError if part of
        the call cannot be recorded.
        """
        raise NotImplementedError

    def launch(self, graph: Any) -> None:
        """Enqueue a graph on the compute stream.  The graph waits for all copies that were issued outside of graphs."""
        raise NotImplementedError

    def reset(self, graph: Any) -> None:
        """Free the memory of a graph.  No launch of the graph may be in flight."""
        raise NotImplementedError

    def free(self) -> int:
        """Wait for work in flight; then return the free memory of the device in bytes."""
        return 0

    @property
    def measuring(self) -> bool:
        """Whether :meth:`measure` has requested a measurement of the next pass."""
        return bool(self._left)

    def measure(self, passes: int | None) -> None:
        """Measure the next ``passes`` passes, and none after them.  If ``passes`` is None, :meth:`choose` decides again
        which passes to measure.

        To get the measurements, call :meth:`collect` with ``wait=True``.
        """
        self._left = passes

    def choose(self, step: int, wanted: bool = False) -> bool:
        """Return whether to measure the calls of the pass that begins now.

        ``step``: the number of steps that the program has run so far.  ``wanted``: whether times are needed for re-planning.
        """
        if self._left is None:
            return wanted or step < FIRST_STEPS or (step - FIRST_STEPS + 1) % EVERY < 2
        self._left = max(0, (before := self._left) - 1)
        return before > 0

    def start(self, marked: bool, consecutive: bool) -> Any:
        """Begin a call of a program; return the value to pass to :meth:`finish` as ``begun``.  This value is None if the
        call is not measured.

        ``marked``: whether to measure the call (see :meth:`choose`).  ``consecutive``: whether the previous call of the
        program was measured.
        """
        raise NotImplementedError

    def finish(self, begun: Any, over: StepEnd) -> None:
        """End a call.  ``over``: a function that the device calls once it knows the times of the call.  If the call is not
        measured, ``over`` is never called."""
        raise NotImplementedError

    def collect(self, wait: bool = False) -> None:
        """Call the function ``over`` (see :meth:`finish`) for each step whose times are known.  ``wait``: whether to wait
        first until the times of all issued steps are known."""

    def close(self) -> None:
        """Close the streams."""
        raise NotImplementedError
