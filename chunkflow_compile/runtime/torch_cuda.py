"""The functions of torch.cuda that the cuda device uses, for one GPU."""

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

# Environment variables that Nsight Systems and Nsight Compute set in the processes that they start.
_OF_NSIGHT = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")


class TorchCuda:
    """A GPU, accessed through torch.cuda.  Tests replace it by a fake with the same methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._traced = any(variable in os.environ for variable in _OF_NSIGHT)

    def stream(self, lane: Lane = "copy") -> torch.cuda.Stream:
        """The stream of a lane.  There is one per GPU, for the lifetime of the process."""
        return _lane_stream(self._device, lane)

    def current(self) -> torch.cuda.Stream:
        """The caller's current stream."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """A context in which ``stream`` is the current stream."""
        # At its end, torch.cuda.stream sets the GPU of the thread again, which initializes that GPU: GPU 0 by default.
        here = torch.cuda.current_device() == stream.device_index
        return torch.cuda.stream(stream) if here else self._on_other(stream)

    @contextlib.contextmanager
    def _on_other(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def event(self, timed: bool) -> torch.cuda.Event:
        """A new event.  Recording a timed event costs more."""
        return _kept_by_children(torch.cuda.Event(enable_timing=timed))

    def profiled(self) -> bool:
        """Whether a profiler that shows names is running: torch's profiler, or an NVIDIA profiler that started this
        process."""
        return self._traced or torch.autograd.profiler._is_profiler_enabled

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Name the work enqueued inside the context, for profilers."""
        named: contextlib.AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return named

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8.  Raises RuntimeError if there is not enough."""
        return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def trim(self) -> None:
        """Return freed memory to the device."""
        torch.cuda.empty_cache()

    def record_stream(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing ``memory`` after it is freed until the work enqueued on ``stream`` by then is
        done."""
        _kept_by_children(memory).record_stream(stream)

    def abandon(self, memory: torch.Tensor) -> None:
        """Never free ``memory``.  If the GPU has failed, torch would abort the process when it frees the memory."""
        _keep_for_ever(memory)

    def staging(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8.  Raises RuntimeError if it cannot be allocated."""
        with torch.cuda.device(self._device):
            return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def copy(self, target: torch.Tensor, source: torch.Tensor | Pieces) -> None:
        """Enqueue a copy from the host, or from the devices of other ranks, on the current stream."""
        if isinstance(source, Pieces):
            pull(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pin the pages of a host tensor; return a function that unpins them.  Raises OSError if that fails."""
        return register(host, self._device)

    def free(self) -> int:
        """Free memory of the device in bytes, after work in flight has ended and caches were emptied."""
        torch.cuda.synchronize(self._device)
        # cuBLAS keeps a workspace per stream: a captured one is in the pool, where the next graph may reuse its bytes
        core.free_cublas_workspaces()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    @contextlib.contextmanager
    def capturing(
        self, shares: torch.cuda.CUDAGraph | None
    ) -> Iterator[tuple[torch.cuda.CUDAGraph, Mapping[Lane, torch.cuda.Stream]]]:
        """A context that records the work enqueued on the current stream as a CUDA graph.

        It yields the graph, and the streams of its lanes.
        ``shares``: a graph whose memory pool the new graph shares, or None to create a pool.
        Raises RuntimeError if part of the work cannot be recorded.  The streams can still be used afterwards.
        """
        lock, compute, lanes = _capture_streams(self._device)
        graph = _kept_by_children(torch.cuda.CUDAGraph())
        pool = torch.cuda.graph_pool_handle() if shares is None else shares.pool()
        # a finalizer may free device memory, which is not allowed during capture
        collects = gc.isenabled()
        with lock, torch.cuda.device(self._device), torch.cuda.stream(compute):
            gc.disable()
            try:
                # other threads may use the device meanwhile
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    yield graph, lanes
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # it only says that the capture is invalid
                        _end_capture(graph, self._device, pool)
                    raise
                _end_capture(graph, self._device, pool)
            finally:
                if collects:
                    gc.enable()
                # no capture is active now: this frees the workspaces left in the pool, and those in all other streams
                core.free_cublas_workspaces()


# torch hands out the 32 streams of a pool round-robin.  If every arena took a new stream, it would in time get the caller's
# stream or NCCL's, and copies would silently queue in front of compute.  torch has one pool per priority.  NCCL and the
# caller use the pool of priority 0, NCCL with is_high_priority_stream and symmetric memory use priority -3, and FSDP uses -1.
# No part of torch uses -2, so the lanes do.  The priority of a stream has no effect on copies.
_PRIORITY = -2


@cache
def _lane_stream(device: torch.device, lane: Lane) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_PRIORITY)


@cache
def _capture_streams(
    device: torch.device,
) -> tuple[threading.Lock, torch.cuda.Stream, Mapping[Lane, torch.cuda.Stream]]:
    """A lock to hold while recording, the stream on which compute is recorded, and the streams of the lanes.

    No work ever runs on these streams.  The nodes of a graph get the priorities of the streams on which they are recorded, so
    compute has the priority of the caller's stream.
    """
    lanes: dict[Lane, torch.cuda.Stream] = {lane: torch.cuda.Stream(device, priority=_PRIORITY) for lane in LANES}
    return threading.Lock(), torch.cuda.Stream(device), lanes


def _end_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # else torch 2.11 keeps allocating from the pool, and never returns memory
        with contextlib.suppress(RuntimeError):
            core.end_pool(device.index, pool)
        raise


def _keep_for_ever(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class _Token:
    """Lives as long as the event or the memory that it is attached to.  In torch 2.11, a weak reference to an event itself is
    never cleared."""


@cache
def _tokens() -> weakref.WeakValueDictionary[int, _Token]:
    """The tokens of all events and memory, by the ids of their owners."""
    tokens: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()

    def in_child() -> None:
        for address in list(tokens):
            _keep_for_ever(ctypes.cast(address, ctypes.py_object).value)

    os.register_at_fork(after_in_child=in_child)
    return tokens


def _kept_by_children(owner: Object) -> Object:
    """Keep a forked child from ever freeing a GPU event or GPU memory.  It cannot use the GPU, so torch would abort it."""
    token: Any = _Token()
    owner.__dict__["chunkflow_token"] = _tokens()[id(owner)] = token
    return owner


# Flag of cudaHostRegister: pinned for every device.  Not combined with the read-only flag, because load_state_dict
# writes there, also from a GPU.
_PORTABLE = 1


def register(host: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Pin exactly the bytes of a host tensor; return a function that unpins them.  Raises OSError if that fails.

    It uses the CUDA runtime that torch has loaded, because the bindings of another package may be newer than the driver.
    """
    if host.is_pinned():  # for example by torch's allocator; pinning it twice is a CUDA error
        return lambda: None
    address, nbytes, process = host.data_ptr(), host.numel() * host.element_size(), os.getpid()
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):  # a thread that has not used a GPU yet would initialize GPU 0
        _check(runtime.cudaHostRegister(address, nbytes, _PORTABLE), device)

    def undo() -> None:
        if os.getpid() != process:
            return  # a forked child has pinned nothing and cannot use the GPU
        with torch.cuda.device(device):
            _check(runtime.cudaHostUnregister(address), device)

    return undo


def _check(error: Any, device: torch.device) -> None:
    if int(error) == 0:
        return
    # the runtime raises the error again in the next launch, so launch a kernel here
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    raise OSError(f"CUDA error {int(error)}, {torch.cuda.cudart().cudaGetErrorString(error)}")
