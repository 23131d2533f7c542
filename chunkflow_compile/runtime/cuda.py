"""The cuda device: the caller's stream computes, a stream of its own copies, events order them.

Within a step the host waits for nothing and allocates nothing.  What is needed of torch.cuda is asked of a :class:`Cuda`,
so that the same code runs in tests without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .cuda_time import Clock, Frame
from .streams import Over, Waited, Watch


class Cuda(Protocol):
    """One GPU, in the terms of torch.cuda.  Streams have ``wait_event`` and ``synchronize``; events ``record(stream)``,
    ``query``, ``synchronize`` and ``elapsed_time``, milliseconds."""

    def stream(self) -> Any:
        """A new stream."""

    def current(self) -> Any:
        """The stream that the caller's work goes to."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Makes another stream the current one."""

    def event(self, timed: bool) -> Any:
        """A new event; one that is timed costs more to record."""

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Work enqueued meanwhile has this name in profilers."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8.  Raises RuntimeError if there is not so much."""

    def keep(self, memory: torch.Tensor, stream: Any) -> None:
        """Lets the allocator hand out ``memory`` again, once it is freed, only behind what ``stream`` has to do by then."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy from the host on the current stream."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pins the pages of a host tensor; returns what undoes it.  Raises OSError if they cannot be."""


class CudaStream:
    """A stream of the GPU.  ``stream``: torch's; the caller's may be another in every step."""

    def __init__(self, device: CudaDevice, stream: Any = None) -> None:
        self._device = device
        self.stream = stream
        self._side = stream is not None

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        frame = self._device.frame
        if not self._side and not name and watch is None:  # what only the host does, such as dropping values
            work()
            return
        with contextlib.ExitStack() as around:
            if self._side:
                around.enter_context(self._device.cuda.on(self.stream))
            if name:
                around.enter_context(self._device.cuda.named(name))
            if watch is None or frame is None:
                work()
                return
            begin = frame.mark(self.stream)
            work()
            frame.between(begin, frame.mark(self.stream), watch)

    def record(self, event: Any) -> None:
        event.record(self.stream)

    def wait(self, event: Any, waited: Waited | None = None) -> None:
        frame = self._device.frame
        if waited is None or frame is None:
            self.stream.wait_event(event)
            return
        begin = frame.mark(self.stream)
        self.stream.wait_event(event)
        frame.stood(begin, frame.mark(self.stream), waited)

    def synchronize(self) -> None:
        try:
            if self.stream is not None:
                self.stream.synchronize()
        except RuntimeError as error:
            raise ChunkflowError(f"The GPU failed: {error}") from error


class CudaDevice:
    """Compute and collectives on the caller's stream (a collective has its own inside, which the caller's waits for where
    it is awaited), copies on one of their own."""

    name = "cuda"

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.compute = self.collective = CudaStream(self)
        self.copy = CudaStream(self, cuda.stream())
        self.frame: Frame | None = None
        self._clock = Clock(lambda: cuda.event(True))
        self._handover = self.event()
        self._memory: torch.Tensor | None = None
        self.closed = False

    def event(self) -> Any:
        return self.cuda.event(False)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = None
        self._memory = memory = self.cuda.allocate(nbytes)
        self.cuda.keep(memory, self.copy.stream)  # once, here: a model may be dropped beside copies
        return memory

    def copy_bytes(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.cuda.copy(target, source)

    def received(self, nbytes: int) -> None:
        """The link is real."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        return self.cuda.pin(host)

    def start(self, step: int) -> Frame | None:
        """Takes up the caller's stream, behind what ran on the one before."""
        self.collect()
        current, before = self.cuda.current(), self.compute.stream
        if before is not None and current != before:
            self._handover.record(before)
            current.wait_event(self._handover)
            if self._memory is not None:
                self.cuda.keep(self._memory, current)
        self.compute.stream = current
        self.frame = self._clock.frame(step, current)
        return self.frame

    def finish(self, begun: Frame | None, over: Over) -> None:
        self.frame = None
        if begun is not None:
            self._clock.close(begun, self.compute.stream, self.copy.stream, over)

    def collect(self, wait: bool = False) -> None:
        try:
            self._clock.collect(wait)
        except RuntimeError as error:
            raise ChunkflowError(f"The GPU failed: {error}") from error

    def deliver(self) -> None:
        """Outputs are tensors, whose values may be under way."""

    def settle(self) -> None:
        self.copy.synchronize()

    def close(self) -> None:
        """Waits: streams and events end with their objects, work does not."""
        self.closed = True
        self._memory = None
        for stream in (self.compute, self.copy):
            with contextlib.suppress(ChunkflowError):
                stream.synchronize()


class TorchCuda:
    """A GPU by torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self, timed: bool) -> Any:
        return torch.cuda.Event(enable_timing=timed)

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return found

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def keep(self, memory: torch.Tensor, stream: Any) -> None:
        memory.record_stream(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        return register(host)


# Of cudaHostRegister: pinned for every device.  Not read-only for them: load_state_dict writes there, from a GPU too.
_PORTABLE = 1


def register(host: torch.Tensor) -> Callable[[], None]:
    """Pins exactly the bytes of a host tensor; returns what undoes it.  Raises OSError if the driver refuses."""
    address, nbytes = host.data_ptr(), host.numel() * host.element_size()
    try:
        from cuda.bindings import runtime
    except ImportError:  # ROCm, and builds of torch that do not bring it
        plain = torch.cuda.cudart()
        _check(plain.cudaHostRegister(address, nbytes, _PORTABLE))
        return lambda: _check(plain.cudaHostUnregister(address))
    _check(*runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    return lambda: _check(*runtime.cudaHostUnregister(address))


def _check(error: Any) -> None:
    if int(error) != 0:
        raise OSError(f"CUDA error {int(error)}, {getattr(error, 'name', error)}")
