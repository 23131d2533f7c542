"""What the executor asks of a device: memory, in-order streams, events between them, and times.

There are three devices.  ``cpu``, the default, computes on the calling thread and copies on one thread that stands for
the copy engine.  ``threads`` has a thread for every stream, compute included, so the host runs ahead as on a GPU.
``cuda`` is a GPU.  The executor issues the same operations on all of them.  The first two can emulate a link.
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

# A pass over the calls of a program or a cycle takes time to measure: the host needs 0.1 ms a call, and on a GPU 1 to 2 us
# to record each of two thousand marks and 3 to 5 us to read it.  So after the first FIRST_STEPS passes, only two
# consecutive ones in every EVERY are measured.  On a GPU the second one counts; the first tells which copies run into it.
# EVERY is prime: of a pattern that repeats, such as the steps of a generation, each has its turn.
FIRST_STEPS = 16
EVERY = 17

# A copy to the device: target and source (uint8, equal sizes), and its name for profilers.
NamedCopy = tuple[torch.Tensor, Bytes | InRing, str]

# Called with the seconds that a stream stalled.
Waited = Callable[[float], None]
# Called with the times when a step began and ended, seconds of the device's clock, and whether the previous step was
# measured too.  If it was not, its copies that ran beside the collectives of this step are unknown.
StepEnd = Callable[[float, float, bool], None]


class Watch(Protocol):
    """Called with the times when a piece of work begins and ends, seconds of the device's clock.

    ``cuda`` calls it only after the step.
    """

    def begins(self, at: float) -> None: ...

    def ends(self, at: float) -> None: ...


class Stream(Protocol):
    """A queue of work that runs in order.  Events are of the device's own class."""

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        """Enqueue ``work``.  ``watch``: receives its times.  ``name``: shown by profilers of the device."""

    def record(self, event: Any) -> None:
        """Mark this point of the stream."""

    def wait(self, event: Any, waited: Waited | None = None) -> None:
        """Make the work enqueued from here on start after the event's newest mark.

        ``waited`` is called with the seconds that the stream stalled.
        """

    def synchronize(self) -> None:
        """Block the host until the stream is empty.  Raises what the stream's work raised."""


class ReadStream(Stream, Protocol):
    """The stream of reads of the drive."""

    def recover(self) -> None:
        """Do the work that is enqueued from here on also if earlier work fails, whose events have the error."""


class Device:
    """A device: the memory of the arena, and the streams.  Methods that do nothing here do nothing on host threads.

    ``copy``: the lane of copies from the host.  That of pulls, and the stream of reads, are made when first asked for.
    ``collective``: the stream that collectives run on; the same object as ``compute`` if they run in its order.
    ``clock``: of its host threads.  ``closed``: whether its streams are closed.  ``records``: whether it records what is
    issued, as a CUDA graph.
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
    _left: int | None = None  # passes that are still to be measured; None to choose them

    @property
    def zero(self) -> float:
        """The time by ``clock`` at which the clock of the measurements stood at 0."""
        return 0.0

    def event(self) -> Any:
        """A new event, with no mark."""
        raise NotImplementedError

    def read_event(self) -> Any:
        """A new event that the stream of reads records."""
        return self.event()

    def lane(self, moves: Lane) -> Stream:
        """The stream of a lane."""
        if moves == "copy":
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
        """The stream for reads of the drive."""
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
        """All streams that there are so far."""
        reads = () if self.reads is None else (self.reads,)
        return (self.compute, self.collective, *self.lanes, *reads)

    @property
    def moves(self) -> tuple[Lane, ...]:
        """The names of the lanes that there are so far."""
        return LANES[:1] if self.pull is None else LANES

    @property
    def lanes(self) -> tuple[Stream, ...]:
        """Their streams."""
        return (self.copy,) if self.pull is None else (self.copy, self.pull)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for an arena, uint8.  Raises RuntimeError if there is not enough."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self) -> None:
        """Keep the memory of the arena no longer: nothing in flight uses it."""

    def record_stream(self, tensors: Iterable[torch.Tensor]) -> None:
        """Name memory outside the arena that steps read: it must not be reused under a step in flight."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Let the copy engine read a host tensor directly; return a function to undo it.  Raises OSError on failure."""
        return lambda: None

    def stage(self) -> None:
        """From now on, some copies come from memory that could not be pinned."""

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, moves: Lane = "copy") -> None:
        """Copy ``source`` to ``target`` (uint8, equal sizes); called as work of a lane."""
        raise NotImplementedError

    def copy_all(self, copies: Sequence[NamedCopy], moves: Lane = "copy") -> None:
        """Enqueue copies that nobody times in a lane."""
        for target, source, name in copies:
            self.lane(moves).run(partial(self.copy_bytes, target, source, moves), None, name)

    def received(self, nbytes: int) -> None:
        """Called as work of the collective stream, after a collective has brought ``nbytes`` into this rank."""

    def deliver(self) -> None:
        """Return when all enqueued work has produced its Python objects; raise what the work raised.

        The contents of the tensors among them may still be in flight, as on a GPU.
        """

    def sync_copies(self) -> None:
        """Wait for the copies that delivered steps read: after that the host may write to their source."""

    def why_not_recorded(self) -> str:
        """Why calls cannot be recorded as CUDA graphs here; empty if they can."""
        return f"only a GPU has them, and this is device {self.name}"

    def recording(self, pool: Any) -> contextlib.AbstractContextManager[tuple[Any, Device]]:
        """Record a call as a CUDA graph: the graph, and the device to which the context issues the call.

        ``pool``: a graph whose pool of memory it shares, None for a pool of its own.  Raises RuntimeError if something in the
        call cannot be recorded.
        """
        raise NotImplementedError

    def launch(self, graph: Any) -> None:
        """Enqueue a graph on the compute stream, after all copies issued outside of graphs."""
        raise NotImplementedError

    def reset(self, graph: Any) -> None:
        """Free what a graph holds, with no launch of it in flight."""
        raise NotImplementedError

    def free(self) -> int:
        """Bytes of the device that nothing holds; waits for what is in flight."""
        return 0

    @property
    def measuring(self) -> bool:
        """Whether the next pass is measured because :meth:`measure` asks for it."""
        return bool(self._left)

    def measure(self, passes: int | None) -> None:
        """Measure the next ``passes`` passes, and none after them; None to choose them.

        What was measured is known when :meth:`collect` waits for it.
        """
        self._left = passes

    def choose(self, step: int, wanted: bool = False) -> bool:
        """Whether to measure the calls of the pass that begins.

        ``step``: of its program, counted from 0.  ``wanted``: whether a plan is to be made from its times.
        """
        if self._left is None:
            return wanted or step < FIRST_STEPS or (step - FIRST_STEPS + 1) % EVERY < 2
        self._left = max(0, (before := self._left) - 1)
        return before > 0

    def start(self, marked: bool, consecutive: bool) -> Any:
        """Begin a call of a program; return what :meth:`finish` needs as ``begun``, None if the call is not measured.

        ``marked``: as chosen for its pass.  ``consecutive``: whether the program's call before it was
        measured.
        """
        raise NotImplementedError

    def finish(self, begun: Any, over: StepEnd) -> None:
        """End a call.  ``over`` is called once its times are known, or never if it is not measured."""
        raise NotImplementedError

    def collect(self, wait: bool = False) -> None:
        """Report the times known by now of the steps issued; with ``wait``, wait for those of all steps."""

    def close(self) -> None:
        """Close the streams."""
        raise NotImplementedError
