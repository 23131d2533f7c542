"""The cuda device: compute on the caller's stream, copies on a stream of their own, events between the two.

Within a step the host waits for nothing and allocates nothing.  All use of torch.cuda goes through :class:`Cuda`, so
the same code runs in tests without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.source import Source

from .cuda_time import Clock, Frame
from .host_clock import MONOTONIC
from .read_ahead import Reading
from .staged import StagedCopies
from .streams import Over, Waited, Watch

Made = TypeVar("Made")


class Cuda(Protocol):
    """What the device uses of torch.cuda, for one GPU.

    Streams have ``wait_event`` and ``synchronize``.  Events have ``record(stream)``, ``query``, ``synchronize`` and
    ``elapsed_time``, in milliseconds.
    """

    def stream(self) -> Any:
        """The stream for copies: one for each GPU, for the life of the process."""

    def current(self) -> Any:
        """The caller's current stream."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make ``stream`` the current one inside the context."""

    def event(self, timed: bool) -> Any:
        """A new event; a timed one costs more to record."""

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Name the work enqueued inside the context, for profilers."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8.  Raises RuntimeError if there is not enough."""

    def trim(self) -> None:
        """Give memory that was freed back to the device."""

    def keep(self, memory: torch.Tensor, stream: Any) -> None:
        """Let the allocator reuse ``memory``, once freed, only after the work that ``stream`` holds by then."""

    def abandon(self, memory: torch.Tensor) -> None:
        """Never free ``memory``.  On a GPU that has failed, torch would end the process when it frees it."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8.  Raises RuntimeError if there is none."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from the host on the current stream."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pin the pages of a host tensor; return a function that unpins them.  Raises OSError if that fails."""


class CudaStream:
    """A stream of the GPU.  ``stream``: torch's stream; None for the caller's, which each step sets again."""

    def __init__(self, device: CudaDevice, stream: Any = None) -> None:
        self._device = device
        self.stream = stream
        self._side = stream is not None

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        frame = self._device.frame
        if not self._side and not name and watch is None:  # host work only, such as dropping values
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
        frame, copies = self._device.frame, self._device.copy
        if isinstance(copies, StagedCopies) and not self._side:
            copies.await_record(event)
        if waited is None or frame is None:
            self.stream.wait_event(event)
            return
        begin = frame.mark(self.stream)
        self.stream.wait_event(event)
        frame.stood(begin, frame.mark(self.stream), waited)

    def synchronize(self) -> None:
        try:
            if self.stream is not None and not self._device.inherited:
                self.stream.synchronize()
        except RuntimeError as error:
            raise ChunkflowError(f"The GPU failed: {error}") from error


class CudaDevice:
    """Compute and collectives on the caller's stream, copies on a stream of their own.

    The process group runs a collective on a stream of its own, and the caller's stream waits for that at wait_tensor.
    """

    name = "cuda"
    clock = MONOTONIC

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.compute = self.collective = CudaStream(self)
        self.copy: CudaStream | StagedCopies = CudaStream(self, cuda.stream())
        self.frame: Frame | None = None
        self._clock = Clock(lambda: cuda.event(True))
        self._handover = self.event()
        self._memory: torch.Tensor | None = None
        self._held: list[weakref.ref[torch.Tensor]] = []
        self._process = os.getpid()
        self.closed = False

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that made the device: it has no GPU, and waits for none."""
        return os.getpid() != self._process

    def event(self) -> Any:
        return self.cuda.event(False)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._memory = None
        self.cuda.trim()  # a smaller arena that was freed would stay beside the new one, as memory that nothing uses
        self._memory = memory = self.cuda.allocate(nbytes)
        self.cuda.keep(memory, self.copy.stream)  # a model may be dropped while copies are in flight
        return memory

    def release(self) -> None:
        self._memory = None

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory that steps read besides the arena: it may be dropped while they are in flight, on any stream."""
        self._held = [ref for ref in self._held if ref() is not None] + [weakref.ref(t) for t in tensors]

    def stage(self) -> None:
        """From now on, some copies come from pageable memory."""
        if isinstance(self.copy, CudaStream):
            self.copy = StagedCopies(self, self.copy)

    def copy_bytes(self, target: torch.Tensor, source: Source | Reading) -> None:
        if isinstance(self.copy, StagedCopies):
            self.copy.copy_bytes(target, source)
        else:
            assert isinstance(source, torch.Tensor), "weights on the drive are staged"
            self.cuda.copy(target, source)

    def received(self, nbytes: int) -> None:
        """Nothing to emulate: the link is real."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        return self.cuda.pin(host)

    def measure(self, passes: int | None) -> None:
        self._clock.only(passes)

    def choose(self, step: int) -> bool:
        return self._clock.choose(step)

    def start(self, marked: bool, known: bool) -> Frame | None:
        """Adopt the caller's current stream; its work starts after that of the caller's previous stream."""
        current, before = self.cuda.current(), self.compute.stream
        if before is not None and current != before:
            self._handover.record(before)
            current.wait_event(self._handover)
            for memory in self._all_memory():
                self.cuda.keep(memory, current)
        self.compute.stream = current
        self.frame = self._clock.frame(current, known) if marked else None
        return self.frame

    def finish(self, begun: Frame | None, over: Over) -> None:
        if isinstance(self.copy, StagedCopies):
            self.copy.end_step()
        self.frame = None
        if begun is not None:
            self._clock.close(begun, self.compute.stream, self.copy.stream, over)
        self.collect()  # now, because the GPU has a whole step to work on: reading a thousand marks takes milliseconds

    def collect(self, wait: bool = False) -> None:
        if self.inherited:
            return
        try:
            self._clock.collect(wait)
        except RuntimeError as error:
            raise ChunkflowError(f"The GPU failed: {error}") from error

    def deliver(self) -> None:
        """Nothing to wait for: outputs are tensors, and their contents may still be in flight."""

    def settle(self) -> None:
        self.copy.synchronize()

    def close(self) -> None:
        """Wait for work in flight: destroying the stream objects does not stop it."""
        self.closed = True
        if self.inherited:
            return
        memory, self._memory = self._all_memory(), None
        for stream in (self.compute, self.copy):
            try:
                stream.synchronize()
            except ChunkflowError:
                for kept in memory:
                    self.cuda.abandon(kept)
        if isinstance(self.copy, StagedCopies):
            self.copy.close()

    def _all_memory(self) -> list[torch.Tensor]:
        held = [tensor for ref in self._held if (tensor := ref()) is not None]
        return held if self._memory is None else [self._memory, *held]


class TorchCuda:
    """A GPU through torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return _copy_stream(self._device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        # torch.cuda.stream ends by setting the thread's own GPU, which starts it: GPU 0 in any thread that set none
        here = torch.cuda.current_device() == stream.device_index
        return torch.cuda.stream(stream) if here else self._on_other(stream)

    @contextlib.contextmanager
    def _on_other(self, stream: Any) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def event(self, timed: bool) -> Any:
        return _kept_by_children(torch.cuda.Event(enable_timing=timed))

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return found

    def allocate(self, nbytes: int) -> torch.Tensor:
        return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def keep(self, memory: torch.Tensor, stream: Any) -> None:
        _kept_by_children(memory).record_stream(stream)

    def abandon(self, memory: torch.Tensor) -> None:
        _keep_for_ever(memory)

    def staging(self, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        return register(host, self._device)


# torch hands out the 32 streams of a pool in turn.  A new one for each session would in time be the caller's own, or
# NCCL's, and copies would queue before compute without a word.  Each priority has a pool.  Within torch, NCCL and the
# caller have that of 0, NCCL with is_high_priority_stream and symmetric memory that of -3, FSDP that of -1, and nothing that
# of -2.  A priority has no effect on copies.
_PRIORITY = -2


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=_PRIORITY)


def _keep_for_ever(made: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))


class _Token:
    """Lasts as long as the event or the memory that has it.  torch 2.11 clears no weak reference to an event itself."""


@cache
def _tokens() -> weakref.WeakValueDictionary[int, _Token]:
    """By the address of what has them."""
    found: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()

    def in_child() -> None:
        for address in list(found):
            _keep_for_ever(ctypes.cast(address, ctypes.py_object).value)

    os.register_at_fork(after_in_child=in_child)
    return found


def _kept_by_children(made: Made) -> Made:
    """Let a forked child never free an event or memory of the GPU, which it cannot use: torch would end it."""
    token: Any = _Token()
    made.__dict__["chunkflow_token"] = _tokens()[id(made)] = token
    return made


# Flag of cudaHostRegister: pinned for every device.  Not combined with the read-only flag, because load_state_dict
# writes there, also from a GPU.
_PORTABLE = 1


def register(host: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Pin exactly the bytes of a host tensor; return a function that unpins them.  Raises OSError if that fails.

    The runtime that torch itself has loaded does it: bindings of another package may be newer than the driver.
    """
    if host.is_pinned():  # by torch's allocator, say: CUDA refuses to pin it twice
        return lambda: None
    address, nbytes, process = host.data_ptr(), host.numel() * host.element_size(), os.getpid()
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):  # a thread that has used no GPU yet would start GPU 0
        _check(runtime.cudaHostRegister(address, nbytes, _PORTABLE), device)

    def undo() -> None:
        if os.getpid() != process:
            return  # a forked child has pinned nothing, and has no GPU
        with torch.cuda.device(device):
            _check(runtime.cudaHostUnregister(address), device)

    return undo


def _check(error: Any, device: torch.device) -> None:
    if int(error) == 0:
        return
    with contextlib.suppress(RuntimeError):  # the runtime keeps the error for the next launch: let it be ours
        torch.zeros(1, device=device)
    raise OSError(f"CUDA error {int(error)}, {torch.cuda.cudart().cudaGetErrorString(error)}")
