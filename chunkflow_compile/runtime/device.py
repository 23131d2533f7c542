"""The devices whose streams are host threads, and the functions that check and create a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.units import is_size
from chunkflow_compile.weights.bytes import copy_host_bytes
from chunkflow_compile.weights.host_weight import with_index
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.source import Bytes, take

from .cuda import CudaDevice
from .device_base import Device, StepEnd
from .host_clock import MONOTONIC, HostClock
from .link import Port
from .read_ahead import InRing
from .streams import CallingStream, Choose, Engine, HostEvent, ThreadStream
from .torch_cuda import TorchCuda


class _HostDevice(Device):
    """The base class of the devices whose streams are host threads.

    ``port``: the emulated link to the host, or None if no link is emulated.  ``peers``: the emulated link to the other
    ranks; None if the traffic between ranks also uses ``port``.
    """

    def __init__(self, engine: Engine, port: Port | None, peers: Port | None) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.copy = engine.streams["copy"]
        self.port = port
        self.peers = peers
        weakref.finalize(self, engine.end)

    def event(self) -> HostEvent:
        return HostEvent(self.engine.bell)

    def recover(self) -> None:
        for lane in self.lane_names:
            self.engine.streams[lane].recover()

    def _make_pull(self) -> ThreadStream:
        return self.engine.streams["pull"]

    def _make_reads(self) -> ThreadStream:
        return self.engine.streams["read"]

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, lane: Lane = "copy") -> None:
        stream = self.engine.streams[lane]
        since = stream.since
        if isinstance(source, InRing):
            copy_host_bytes(target, source.values())
        else:
            take(target, source)
        port, nbytes = self.port, source.numel()
        if isinstance(source, Pieces):
            port, nbytes = self.peers or port, source.from_others
        if port is not None:
            stream.end_work(port.send(lane, nbytes, since))

    def received(self, nbytes: int) -> None:
        if (port := self.peers or self.port) is not None:
            port.send("collective", nbytes)

    def start(self, marked: bool, consecutive: bool) -> float | None:
        return self.clock.now() if marked else None

    def finish(self, begun: float | None, over: StepEnd) -> None:
        # The third argument of ``over`` is always True, so the executor uses the measurement even if the previous step was
        # not measured.  On these devices, at most a few copies of the previous step are still in flight when this step
        # begins.
        if begun is not None:
            self.compute.run(lambda: over(begun, self.clock.now(), True))

    def close(self) -> None:
        self.closed = True
        self.engine.close()


class CpuDevice(_HostDevice):
    """Runs compute and collectives on the calling thread, and copies and reads on separate threads."""

    name = "cpu"

    def __init__(self, port: Port | None = None, clock: HostClock = MONOTONIC, peers: Port | None = None) -> None:
        super().__init__(Engine((*LANES, "read"), clock=clock), port, peers)
        self.compute = self.collective = CallingStream(clock)


class ThreadsDevice(_HostDevice):
    """Runs every stream on a separate thread, so the host may enqueue several steps before any work of these steps has run.

    ``choose``, ``before``: see :class:`Engine`; tests use both arguments to force schedules that could occur on a GPU.
    """

    name = "threads"

    def __init__(
        self,
        choose: Choose | None = None,
        before: Callable[[str], None] | None = None,
        port: Port | None = None,
        clock: HostClock = MONOTONIC,
        peers: Port | None = None,
    ) -> None:
        super().__init__(
            Engine(("compute", "collective", "completion", *LANES, "read"), choose, before, clock), port, peers
        )
        self.compute = self.engine.streams["compute"]
        self.collective = self.engine.streams["collective"]
        self.completion = self.engine.streams["completion"]

    def deliver(self) -> None:
        self.engine.resume()
        self.compute.synchronize()


def check_device(given: torch.device | str) -> torch.device:
    """Return the device as a torch.device, with an index if it is a GPU.  Raises ChunkflowError for an unsupported
    device."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        said, fix = f"device={given!r} is no device of torch", "give 'cpu', 'cuda' or 'cuda:0'"
        if isinstance(given, str) and is_size(given):
            said, fix = f"device={given!r} is a size, not a device", f"a budget is memory={given!r}; as device {fix}"
        raise ChunkflowError(f"{said}: {fix}.") from error
    if device.type == "cpu":
        return with_index(device)
    if device.type != "cuda":
        raise ChunkflowError(f"ChunkFlow does not run on {device.type}: place the model on cuda, or on the cpu.")
    if not torch.cuda.is_available():
        raise ChunkflowError(
            f"There is no {device}: this torch ({torch.__version__}) {_why_none()}. Run chunkflow doctor, or stay on the cpu."
        )
    device = with_index(device)
    if device.index >= torch.cuda.device_count():
        raise ChunkflowError(f"There is no {device}: this process sees {torch.cuda.device_count()} GPUs.")
    return device


def _why_none() -> str:
    """Return the reason why torch cannot use a GPU on this machine."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "is built for the CPU only"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        # if the driver is too old, the error contains the version of the driver
        return f"finds no GPU or no driver ({str(error).partition('. ')[0].strip()})"
    return "finds no GPU or no driver"


def check_no_capture(device: torch.device) -> None:
    """Raise ChunkflowError if the caller is recording a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ChunkflowError(
            "The caller records a CUDA graph, and a step cannot be part of one: its copies run on a stream of their own, "
            "ordered by events from before the capture. Call the compiled model outside torch.cuda.graph, and compile "
            'what is around it without mode="reduce-overhead". cudagraphs=True makes the step a graph of its own.'
        )


@dataclass(frozen=True)
class DeviceKind:
    """The properties of a device that must be the same for all programs of an arena.  ``threads``: whether every stream runs
    on its own thread.  ``link``: the PCIe link to emulate, or None."""

    threads: bool = False
    link: LinkEmulation | None = None


def check_kind(device: torch.device, kind: DeviceKind) -> None:
    """Raise ChunkflowError if ``device`` is a GPU and ``kind`` needs a device whose streams are host threads."""
    if device.type != "cuda":
        return
    if kind.threads:
        raise ChunkflowError('debug="threads" imitates a GPU with host threads: leave it out on cuda.')
    if kind.link is not None:
        raise ChunkflowError(
            "The hardware profile emulates a link, but cuda has a real one: use a profile without link_emulation."
        )


def make_device(device: torch.device, kind: DeviceKind) -> Device:
    """Create the :class:`Device` object for programs that compute on ``device``.  Raises ChunkflowError if ``device`` does
    not exist."""
    device = check_device(device)
    if device.type == "cuda":
        return CudaDevice(TorchCuda(device))
    port = None if kind.link is None else make_port(kind.link)
    peers = Port(replace(kind.link, bandwidth=kind.link.peers)) if kind.link is not None and kind.link.peers else None
    return ThreadsDevice(port=port, peers=peers) if kind.threads else CpuDevice(port, peers=peers)


def make_port(link: LinkEmulation) -> Port:
    """Create the port through which this rank uses the emulated link.  If several ranks share a port, the port identifies
    this rank by the rank's number in the default process group."""
    rank = dist.get_rank() if dist.is_initialized() and link.shared else 0
    return Port(link, Path(link.shared) if link.shared else None, rank)
