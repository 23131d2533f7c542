"""The protocol between the executor and a device: streams in order, and events between them.

Three devices: ``cpu``, the embedded default, computes on the calling thread and copies on one thread that stands for the
copy engine; ``threads`` has a thread for every stream, compute included, so that the host runs ahead as on a GPU;
``cuda`` is one.  What the executor does on one of them it does on all.  On the first two a link can be emulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.weights.bytes import copy_host_bytes
from chunkflow_compile.weights.reader import HostReader

from .cuda import CudaDevice, TorchCuda
from .link import Port
from .streams import CallingStream, Choose, Engine, HostEvent, Over, ThreadStream, Watch, end_with


class Stream(Protocol):
    """Work in order."""

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        """Enqueues ``work``; profilers of the device are told its ``name``."""

    def record(self, event: Any) -> None:
        """Marks this point of the stream."""

    def wait(self, event: Any, waited: Callable[[float], None] | None = None) -> None:
        """Work enqueued from here on starts after the event's newest mark.  ``waited`` is told for how many seconds the
        stream stood still."""

    def synchronize(self) -> None:
        """The host waits until the stream is empty.  Raises what the stream's work raised."""


class Device(HostReader, Protocol):
    """A device: where the arena lies and which streams there are.

    ``collective``: the stream that collectives run on; the same object as ``compute`` where they run in its order.
    """

    compute: Any
    copy: Any
    collective: Any

    def event(self) -> Any:
        """A new event, with no mark."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory for an arena, uint8.  Raises RuntimeError if there is not so much."""

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies ``source`` over ``target`` (uint8, equal sizes) on the copy stream's engine."""

    def received(self, nbytes: int) -> None:
        """Called on the stream of collectives where one has brought ``nbytes`` into this rank."""

    def deliver(self) -> None:
        """Returns when the values of all work enqueued are objects that the caller can take; raises if there are none.

        What they hold may still be under way, as on a GPU.
        """

    def start(self, step: int) -> Any:
        """In front of a program's step, counted from 0; what :meth:`finish` is given."""

    def finish(self, begun: Any, over: Over) -> None:
        """Behind a step.  ``over`` is told, once that is known; or never, if the step is not measured."""

    def collect(self, wait: bool = False) -> None:
        """Tells what is known by now of the steps issued; of all of them, with ``wait``."""

    def close(self) -> None:
        """Ends the streams."""


class _HostDevice:
    """What devices of host threads have in common.  ``port``: the emulated link that bytes pass; None for none."""

    compute: Any

    def __init__(self, engine: Engine, port: Port | None) -> None:
        self.engine = engine
        self.closed = False
        self.copy = ThreadStream(engine, "copy")
        self.port = port
        end_with(self, engine)

    def event(self) -> HostEvent:
        return HostEvent(self.engine.bell)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_host_bytes(target, source)
        if self.port is not None:
            self.copy.ended(self.port.send("copy", source.numel(), self.copy.since))

    def received(self, nbytes: int) -> None:
        if self.port is not None:
            self.port.send("collective", nbytes)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Threads read any memory."""
        return lambda: None

    def start(self, step: int) -> float:
        return time.perf_counter()

    def finish(self, begun: float, over: Over) -> None:
        self.compute.run(lambda: over(begun, time.perf_counter(), True))

    def collect(self, wait: bool = False) -> None:
        """Threads tell at once."""

    def settle(self) -> None:
        """A step that is delivered has read its weights."""

    def close(self) -> None:
        self.closed = True
        self.engine.close()


class CpuDevice(_HostDevice):
    """Compute and collectives on the calling thread, copies on one thread of their own."""

    name = "cpu"

    def __init__(self, port: Port | None = None) -> None:
        super().__init__(Engine(("copy",)), port)
        self.compute = self.collective = CallingStream()

    def deliver(self) -> None:
        return None


class ThreadsDevice(_HostDevice):
    """Every stream a thread: the host enqueues a whole step, or several, before any of it has run.

    ``choose`` and ``before`` as in :class:`Engine`: they make the schedules that a GPU could come upon.
    """

    name = "threads"

    def __init__(
        self,
        choose: Choose | None = None,
        before: Callable[[str], None] | None = None,
        port: Port | None = None,
    ) -> None:
        super().__init__(Engine(("compute", "collective", "copy"), choose, before), port)
        self.compute = ThreadStream(self.engine, "compute")
        self.collective = ThreadStream(self.engine, "collective")

    def deliver(self) -> None:
        self.engine.resume()
        self.compute.synchronize()


def check_device(device: torch.device) -> torch.device:
    """The device, a GPU with its number.  Raises ChunkflowError for one that programs cannot run on."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ChunkflowError(f"ChunkFlow does not run on {device.type}: place the model on cuda, or on the cpu.")
    if not torch.cuda.is_available():
        build = "is built for the CPU only" if torch.version.cuda is None else "finds no GPU or no driver"
        raise ChunkflowError(
            f"There is no {device}: this torch ({torch.__version__}) {build}. Run chunkflow doctor, or stay on the cpu."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ChunkflowError(f"There is no cuda:{index}: this process sees {torch.cuda.device_count()} GPUs.")
    return torch.device("cuda", index)


@dataclass(frozen=True)
class DeviceKind:
    """Which of the devices: ``threads``, every stream a thread; ``link``, to be emulated on it."""

    threads: bool = False
    link: LinkEmulation | None = None


def check_kind(device: torch.device, kind: DeviceKind, policy: str) -> None:
    """Raises ChunkflowError for what a GPU does not do."""
    if device.type != "cuda":
        return
    if kind.threads:
        raise ChunkflowError('debug="threads" stands for a GPU where there is none: leave it out on cuda.')
    if kind.link is not None:
        raise ChunkflowError(
            "The hardware profile emulates a link, and cuda has one: give a profile without link_emulation."
        )
    if policy == "host-yield":
        raise ChunkflowError(
            "Policy host-yield holds copies back on a thread that copies, and on cuda none does: use policy chunkflow, which "
            "yields by events of the device, or compare the two on the cpu."
        )


def make_device(device: torch.device, kind: DeviceKind) -> Device:
    """The device that runs programs whose weights are on ``device``.  Raises ChunkflowError if there is none."""
    device = check_device(device)
    if device.type == "cuda":
        return CudaDevice(TorchCuda(device))
    port = None if kind.link is None else make_port(kind.link)
    return ThreadsDevice(port=port) if kind.threads else CpuDevice(port)


def make_port(link: LinkEmulation) -> Port:
    """The port of this rank, by the process group if there is one."""
    rank = dist.get_rank() if dist.is_initialized() and link.shared else 0
    return Port(link, Path(link.shared) if link.shared else None, rank)
