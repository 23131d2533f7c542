"""What the cuda device uses of torch.cuda, for one GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import torch

from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.private_torch import core
from chunkflow_compile.weights.pieces import Pieces

from .cuda_pulls import pull

Object = TypeVar("Object")

# Nsight Systems and Nsight Compute set them for the processes that they start.
_OF_NSIGHT = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")


class TorchCuda:
    """A GPU through torch.cuda.  Tests put another in its place, which has the same methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._traced = any(variable in os.environ for variable in _OF_NSIGHT)

    def stream(self, moves: Lane = "copy") -> torch.cuda.Stream:
        """The stream of a lane: one for each GPU, for the life of the process."""
        return _lane_stream(self._device, moves)

    def current(self) -> torch.cuda.Stream:
        """The caller's current stream."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """Make ``stream`` the current one inside the context."""
        # torch.cuda.stream ends by setting the thread's own GPU, which starts it: GPU 0 in any thread that set none
        here = torch.cuda.current_device() == stream.device_index
        return torch.cuda.stream(stream) if here else self._on_other(stream)

    @contextlib.contextmanager
    def _on_other(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def event(self, timed: bool) -> torch.cuda.Event:
        """A new event; a timed one costs more to record."""
        return _kept_by_children(torch.cuda.Event(enable_timing=timed))

    def profiled(self) -> bool:
        """Whether a profiler runs that shows names: torch's, or one of NVIDIA's, which has started this process."""
        return self._traced or torch.autograd.profiler._is_profiler_enabled

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Name the work enqueued inside the context, for profilers."""
        named: contextlib.AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return named

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8.  Raises RuntimeError if there is not enough."""
        return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def trim(self) -> None:
        """Give memory that was freed back to the device."""
        torch.cuda.empty_cache()

    def record_stream(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Let the allocator reuse ``memory``, once freed, only after the work that ``stream`` holds by then."""
        _kept_by_children(memory).record_stream(stream)

    def abandon(self, memory: torch.Tensor) -> None:
        """Never free ``memory``.  On a GPU that has failed, torch would end the process when it frees it."""
        _keep_for_ever(memory)

    def staging(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8.  Raises RuntimeError if there is none."""
        with torch.cuda.device(self._device):
            return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def copy(self, target: torch.Tensor, source: torch.Tensor | Pieces) -> None:
        """Enqueue a copy from the host, or from the devices of the ranks, on the current stream."""
        if isinstance(source, Pieces):
            pull(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pin the pages of a host tensor; return a function that unpins them.  Raises OSError if that fails."""
        return register(host, self._device)

    def free(self) -> int:
        """Bytes of the device that nothing holds, with nothing in flight and nothing kept for later."""
        torch.cuda.synchronize(self._device)
        # its workspaces are of a stream: captured, one lies in the pool, and the next graph may use its bytes again
        core.free_cublas_workspaces()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    @contextlib.contextmanager
    def capturing(
        self, shares: torch.cuda.CUDAGraph | None
    ) -> Iterator[tuple[torch.cuda.CUDAGraph, Mapping[Lane, torch.cuda.Stream]]]:
        """Record what the context enqueues on the current stream as a CUDA graph: that one and the streams of its lanes.

        ``shares``: a graph whose pool of memory it shares, None for one of its own.
        Raises RuntimeError if something cannot be recorded.  The streams can be used again then.
        """
        lock, compute, lanes = _capture_streams(self._device)
        graph = _kept_by_children(torch.cuda.CUDAGraph())
        pool = torch.cuda.graph_pool_handle() if shares is None else shares.pool()
        # a finalizer may free memory of the device, which no capture allows
        collects = gc.isenabled()
        with lock, torch.cuda.device(self._device), torch.cuda.stream(compute):
            gc.disable()
            try:
                # other threads may use the device meanwhile
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    yield graph, lanes
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # what it says is that the capture is invalid
                        _end_capture(graph, self._device, pool)
                    raise
                _end_capture(graph, self._device, pool)
            finally:
                if collects:
                    gc.enable()
                # of the pool, like those of any other stream while nothing is captured
                core.free_cublas_workspaces()


# torch hands out the 32 streams of a pool in turn.  A new one for each session would in time be the caller's own, or
# NCCL's, and copies would queue before compute without a word.  Each priority has a pool.  Within torch, NCCL and the
# caller have that of 0, NCCL with is_high_priority_stream and symmetric memory that of -3, FSDP that of -1, and nothing that
# of -2.  A priority has no effect on copies.
_PRIORITY = -2


@cache
def _lane_stream(device: torch.device, moves: Lane) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_PRIORITY)


@cache
def _capture_streams(
    device: torch.device,
) -> tuple[threading.Lock, torch.cuda.Stream, Mapping[Lane, torch.cuda.Stream]]:
    """The streams on which calls are recorded, of compute and of the lanes, and who records holds the lock.

    Nothing ever runs on them.  The nodes of a graph have the priorities of their streams: compute that of the caller's.
    """
    lanes: dict[Lane, torch.cuda.Stream] = {moves: torch.cuda.Stream(device, priority=_PRIORITY) for moves in LANES}
    return threading.Lock(), torch.cuda.Stream(device), lanes


def _end_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # else torch 2.11 stays in the pool, and gives no memory back any more
            core.end_pool(device.index, pool)
        raise


def _keep_for_ever(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class _Token:
    """Lasts as long as the event or the memory that has it.  torch 2.11 clears no weak reference to an event itself."""


@cache
def _tokens() -> weakref.WeakValueDictionary[int, _Token]:
    """By the address of what has them."""
    tokens: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()

    def in_child() -> None:
        for address in list(tokens):
            _keep_for_ever(ctypes.cast(address, ctypes.py_object).value)

    os.register_at_fork(after_in_child=in_child)
    return tokens


def _kept_by_children(owner: Object) -> Object:
    """Let a forked child never free an event or memory of the GPU, which it cannot use: torch would end it."""
    token: Any = _Token()
    owner.__dict__["chunkflow_token"] = _tokens()[id(owner)] = token
    return owner


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
