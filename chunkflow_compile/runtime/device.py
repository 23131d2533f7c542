"""The protocol between the executor and a device: in-order streams, and events between them.

There are three devices.  ``cpu``, the default, computes on the calling thread and copies on one thread that stands for
the copy engine.  ``threads`` has a thread for every stream, compute included, so the host runs ahead as on a GPU.
``cuda`` is a GPU.  The executor issues the same operations on all of them.  The first two can emulate a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.weights.bytes import copy_host_bytes
from chunkflow_compile.weights.reader import HostReader
from chunkflow_compile.weights.source import Source, take

from .cuda import CudaDevice, TorchCuda
from .host_clock import MONOTONIC, HostClock
from .link import Port
from .read_ahead import Reading
from .streams import CallingStream, Choose, Engine, HostEvent, Over, ThreadStream, Watch, end_with


class Stream(Protocol):
    """A queue of work that runs in order."""

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        """Enqueue ``work``.  ``watch``: receives its times.  ``name``: shown by profilers of the device."""

    def record(self, event: Any) -> None:
        """Mark this point of the stream."""

    def wait(self, event: Any, waited: Callable[[float], None] | None = None) -> None:
        """Make the work enqueued from here on start after the event's newest mark.

        ``waited`` is called with the seconds that the stream stalled.
        """

    def synchronize(self) -> None:
        """Block the host until the stream is empty.  Raises what the stream's work raised."""


class Device(HostReader, Protocol):
    """A device: the memory of the arena, and the streams.

    ``collective``: the stream that collectives run on; the same object as ``compute`` if they run in its order.
    ``clock``: of its host threads.
    """

    compute: Any
    copy: Any
    collective: Any
    clock: HostClock

    def event(self) -> Any:
        """A new event, with no mark."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for an arena, uint8.  Raises RuntimeError if there is not enough."""

    def release(self) -> None:
        """Keep the memory of the arena no longer: nothing in flight uses it."""

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Name memory outside the arena that steps read: it must not be reused under a step in flight."""

    def stage(self) -> None:
        """From now on, some copies come from memory that could not be pinned."""

    def copy_bytes(self, target: torch.Tensor, source: Source | Reading) -> None:
        """Copy ``source`` to ``target`` (uint8, equal sizes); called as work of the copy stream."""

    def received(self, nbytes: int) -> None:
        """Called as work of the collective stream, after a collective has brought ``nbytes`` into this rank."""

    def deliver(self) -> None:
        """Return when all enqueued work has produced its Python objects; raise what the work raised.

        The contents of the tensors among them may still be in flight, as on a GPU.
        """

    def measure(self, passes: int | None) -> None:
        """Where it takes time, measure the next ``passes`` passes, and none after them; None to choose them.

        What was measured is known when :meth:`collect` waits for it.
        """

    def choose(self, step: int) -> bool:
        """Whether to measure the calls of the pass that begins.  ``step``: of its program, counted from 0."""

    def start(self, marked: bool, known: bool) -> Any:
        """Begin a call of a program; return what :meth:`finish` needs as ``begun``, None if the call is not measured.

        ``marked``: as chosen for its pass.  ``known``: whether the program's call before it was measured.
        """

    def finish(self, begun: Any, over: Over) -> None:
        """End a call.  ``over`` is called once its times are known, or never if it is not measured."""

    def collect(self, wait: bool = False) -> None:
        """Report the times known by now of the steps issued; with ``wait``, wait for those of all steps."""

    def close(self) -> None:
        """Close the streams."""


class _HostDevice:
    """The common part of devices made of host threads.  ``port``: the emulated link, or None."""

    compute: Any

    def __init__(self, engine: Engine, port: Port | None) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.closed = False
        self.copy = ThreadStream(engine, "copy")
        self.port = port
        end_with(self, engine)

    def event(self) -> HostEvent:
        return HostEvent(self.engine.bell)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self) -> None:
        """Nothing to do: host memory lives as long as work refers to it."""

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: host memory lives as long as work refers to it."""

    def stage(self) -> None:
        """Nothing to do: threads read any host memory."""

    def copy_bytes(self, target: torch.Tensor, source: Source | Reading) -> None:
        since = self.copy.since
        if isinstance(source, Reading):
            values, came = source.acquire()
            copy_host_bytes(target, values)
            source.release()
            since = max(since, came)
        else:
            take(target, source)
        if self.port is not None:
            self.copy.ended(self.port.send("copy", source.numel(), since))

    def received(self, nbytes: int) -> None:
        if self.port is not None:
            self.port.send("collective", nbytes)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Nothing to pin: threads read any host memory."""
        return lambda: None

    def measure(self, passes: int | None) -> None:
        """Nothing to choose: to read a clock of the host takes no time."""

    def choose(self, step: int) -> bool:
        return True

    def start(self, marked: bool, known: bool) -> float:
        return self.clock.now()

    def finish(self, begun: float, over: Over) -> None:
        self.compute.run(lambda: over(begun, self.clock.now(), True))

    def collect(self, wait: bool = False) -> None:
        """Nothing to collect: threads report times at once."""

    def settle(self) -> None:
        """Nothing to wait for: a delivered step has read its weights."""

    def close(self) -> None:
        self.closed = True
        self.engine.close()


class CpuDevice(_HostDevice):
    """Compute and collectives on the calling thread, copies on one thread of their own."""

    name = "cpu"

    def __init__(self, port: Port | None = None, clock: HostClock = MONOTONIC) -> None:
        super().__init__(Engine(("copy",), clock=clock), port)
        self.compute = self.collective = CallingStream(clock)

    def deliver(self) -> None:
        return None


class ThreadsDevice(_HostDevice):
    """A thread for every stream: the host may enqueue whole steps before any of their work has run.

    ``choose`` and ``before``: see :class:`Engine`; they force schedules that could occur on a GPU.
    """

    name = "threads"

    def __init__(
        self,
        choose: Choose | None = None,
        before: Callable[[str], None] | None = None,
        port: Port | None = None,
        clock: HostClock = MONOTONIC,
    ) -> None:
        super().__init__(Engine(("compute", "collective", "copy"), choose, before, clock), port)
        self.compute = ThreadStream(self.engine, "compute")
        self.collective = ThreadStream(self.engine, "collective")

    def deliver(self) -> None:
        self.engine.resume()
        self.compute.synchronize()


def check_device(device: torch.device) -> torch.device:
    """The device, for a GPU with its index.  Raises ChunkflowError for a device that programs cannot run on."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ChunkflowError(f"ChunkFlow does not run on {device.type}: place the model on cuda, or on the cpu.")
    if not torch.cuda.is_available():
        raise ChunkflowError(
            f"There is no {device}: this torch ({torch.__version__}) {_why_none()}. Run chunkflow doctor, or stay on the cpu."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ChunkflowError(f"There is no cuda:{index}: this process sees {torch.cuda.device_count()} GPUs.")
    return torch.device("cuda", index)


def _why_none() -> str:
    """Why torch has no GPU to run on."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "is built for the CPU only"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # it names a driver that is too old, with its version
        return f"finds no GPU or no driver ({str(error).partition('. ')[0].strip()})"
    return "finds no GPU or no driver"


def refuse_capture(device: torch.device) -> None:
    """Raise ChunkflowError while the caller records a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ChunkflowError(
            "The caller records a CUDA graph, and a step cannot be part of one: its copies run on a stream of their own, "
            "ordered by events from before the capture. Call the compiled model outside torch.cuda.graph, and compile "
            'what is around it without mode="reduce-overhead".'
        )


@dataclass(frozen=True)
class DeviceKind:
    """The kind of device.  ``threads``: a thread for every stream.  ``link``: the link to emulate, or None."""

    threads: bool = False
    link: LinkEmulation | None = None


def check_kind(device: torch.device, kind: DeviceKind, policy: str) -> None:
    """Raise ChunkflowError if ``device`` is a GPU and ``kind`` or ``policy`` needs devices made of host threads."""
    if device.type != "cuda":
        return
    if kind.threads:
        raise ChunkflowError('debug="threads" imitates a GPU with host threads: leave it out on cuda.')
    if kind.link is not None:
        raise ChunkflowError(
            "The hardware profile emulates a link, but cuda has a real one: use a profile without link_emulation."
        )
    if policy == "host-yield":
        raise ChunkflowError(
            "Policy host-yield pauses the thread that copies, and on cuda no thread copies: use policy chunkflow, "
            "which yields through events of the device, or compare the two on the cpu."
        )


def make_device(device: torch.device, kind: DeviceKind) -> Device:
    """Create the device for programs whose weights are on ``device``.  Raises ChunkflowError if there is none."""
    device = check_device(device)
    if device.type == "cuda":
        return CudaDevice(TorchCuda(device))
    port = None if kind.link is None else make_port(kind.link)
    return ThreadsDevice(port=port) if kind.threads else CpuDevice(port)


def make_port(link: LinkEmulation) -> Port:
    """Create the port of this rank; the rank comes from the process group if there is one."""
    rank = dist.get_rank() if dist.is_initialized() and link.shared else 0
    return Port(link, Path(link.shared) if link.shared else None, rank)
