"""The protocol between the executor and a device: streams in order, and events between them.

Three devices: ``cpu``, the embedded default, computes on the calling thread and copies on one thread that stands for the
copy engine; ``threads`` has a thread for every stream, compute included, so that the host runs ahead as on a GPU;
``cuda`` is not there yet.  What the executor does on one of them it does on all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .streams import CallingStream, Choose, Engine, HostEvent, ThreadStream, end_with


class Stream(Protocol):
    """Work in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueues ``work``."""

    def record(self, event: Any) -> None:
        """Marks this point of the stream."""

    def wait(self, event: Any) -> float:
        """Work enqueued from here on starts after the event's newest mark.  Returns seconds that the host waited."""

    def synchronize(self) -> None:
        """The host waits until the stream is empty.  Raises what the stream's work raised."""


class Device(Protocol):
    """A device: where the arena lies and which streams there are.

    ``collective``: the stream that collectives run on; the same object as ``compute`` where they run in its order.
    """

    name: str
    compute: Any
    copy: Any
    collective: Any

    def event(self) -> Any:
        """A new event, with no mark."""

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies ``source`` over ``target`` (uint8, equal sizes) on the copy stream's engine."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Lets the copy engine read a host tensor by itself; returns what undoes it.  Raises OSError if it cannot."""

    def deliver(self) -> None:
        """Returns when the values of all work enqueued are objects that the caller can take; raises if there are none.

        What they hold may still be under way, as on a GPU.
        """

    def close(self) -> None:
        """Ends the streams."""


class _HostDevice:
    """What devices of host threads have in common."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        end_with(self, engine)

    def event(self) -> HostEvent:
        return HostEvent(self.engine.changed)

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy_host_bytes(target, source)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Threads read any memory."""
        return lambda: None

    def close(self) -> None:
        self.engine.close()


class CpuDevice(_HostDevice):
    """Compute and collectives on the calling thread, copies on one thread of their own."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__(Engine(("copy",)))
        self.compute = self.collective = CallingStream()
        self.copy = ThreadStream(self.engine, "copy")

    def deliver(self) -> None:
        return None


class ThreadsDevice(_HostDevice):
    """Every stream a thread: the host enqueues a whole step, or several, before any of it has run.

    ``choose`` and ``before`` as in :class:`Engine`: they make the schedules that a GPU could come upon.
    """

    name = "threads"

    def __init__(self, choose: Choose | None = None, before: Callable[[str], None] | None = None) -> None:
        super().__init__(Engine(("compute", "collective", "copy"), choose, before))
        self.compute = ThreadStream(self.engine, "compute")
        self.collective = ThreadStream(self.engine, "collective")
        self.copy = ThreadStream(self.engine, "copy")

    def deliver(self) -> None:
        self.engine.resume()
        self.compute.synchronize()


def copy_host_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between host tensors (uint8, equal sizes) by one thread, as a copy engine does.

    Tensor.copy_ would spread over the compute's threads.  ctypes releases the GIL.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def check_device(device: torch.device) -> None:
    """Raises ChunkflowError for a device that programs cannot run on."""
    if device.type != "cpu":
        raise ChunkflowError(f"ChunkFlow does not run on {device.type} yet: place the model on the cpu.")


def make_device(device: torch.device, *, threads: bool = False) -> Device:
    """The device that runs programs whose weights are on ``device``; ``threads``: every stream a thread."""
    check_device(device)
    return ThreadsDevice() if threads else CpuDevice()
