"""The functions of torch.cuda that the cuda device uses, bound to one GPU."""

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
from chunkflow_compile.weights.peer_pieces import Pieces

from .cuda_pulls import pull

Object = TypeVar("Object")

# Environment variables that Nsight Systems and Nsight Compute set in the processes that they start.
_OF_NSIGHT = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")


class TorchCuda:
    """A GPU, accessed through torch.cuda.  Tests replace this class by a fake with the same methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._traced = any(variable in os.environ for variable in _OF_NSIGHT)

    def stream(self, lane: Lane = "copy") -> torch.cuda.Stream:
        """Return the stream of a lane.  Each GPU has one such stream per lane, for the lifetime of the process."""
        return _lane_stream(self._device, lane)

    def current(self) -> torch.cuda.Stream:
        """Return the caller's current stream."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which ``stream`` is the current stream."""
        # When the context torch.cuda.stream ends, it selects the previously current GPU again, and thereby initializes that
        # GPU (by default GPU 0).  So if the current GPU is not the stream's GPU, the stream's GPU is selected first.
        here = torch.cuda.current_device() == stream.device_index
        return torch.cuda.stream(stream) if here else self._on_other(stream)

    @contextlib.contextmanager
    def _on_other(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def event(self, timed: bool) -> torch.cuda.Event:
        """Return a new event.  Recording takes longer for a ``timed`` event than for other events."""
        return _kept_by_children(torch.cuda.Event(enable_timing=timed))

    def profiled(self) -> bool:
        """Return whether a profiler that shows names is running: torch's profiler, or an NVIDIA profiler that started this
        process."""
        return self._traced or torch.autograd.profiler._is_profiler_enabled

    def named(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context.  Profilers show ``name`` for the work that is enqueued inside this context."""
        named: contextlib.AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return named

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory; return it as uint8.  Raises RuntimeError if there is not enough memory."""
        return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def trim(self) -> None:
        """Empty the cache of torch's allocator, so that freed memory goes back to the device."""
        torch.cuda.empty_cache()

    def record_stream(self, memory: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Mark ``memory`` as used by ``stream``.  After the memory is freed, the allocator does not reuse it until ``stream``
        has finished the work that was enqueued before the memory was freed."""
        _kept_by_children(memory).record_stream(stream)

    def abandon(self, memory: torch.Tensor) -> None:
        """Leak ``memory`` on purpose, so that it is never freed.  If torch freed memory after a failure of the GPU, it would
        abort the process."""
        _keep_for_ever(memory)

    def staging(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned host memory; return it as uint8.  Raises RuntimeError if it cannot be allocated."""
        with torch.cuda.device(self._device):
            return _kept_by_children(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def copy(self, target: torch.Tensor, source: torch.Tensor | Pieces) -> None:
        """Enqueue a copy on the current stream, from the host or from the devices of other ranks."""
        if isinstance(source, Pieces):
            pull(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pin the pages of a host tensor; return a function that unpins these pages.  Raises OSError if pinning fails."""
        return register(host, self._device)

    def free(self) -> int:
        """Wait for work in flight, empty torch's caches, and return the free memory of the device in bytes."""
        torch.cuda.synchronize(self._device)
        # cuBLAS keeps one workspace per stream.  If a workspace was allocated during a capture, it is in the graph pool,
        # where the next graph may overwrite it.  So all workspaces are freed, and cuBLAS allocates new ones when it needs
        # them.
        core.free_cublas_workspaces()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    @contextlib.contextmanager
    def capturing(
        self, shares: torch.cuda.CUDAGraph | None
    ) -> Iterator[tuple[torch.cuda.CUDAGraph, Mapping[Lane, torch.cuda.Stream]]]:
        """A context in which work that is enqueued on the current stream does not run, but is recorded in a CUDA graph.

        The context yields the graph, and for each lane the stream on which the copies of this lane are recorded.  ``shares``:
        a graph whose memory pool the new graph shares, or None to create a pool.  Raises RuntimeError if part of the work
        cannot be recorded; the streams remain usable.
        """
        lock, compute, lanes = _capture_streams(self._device)
        graph = _kept_by_children(torch.cuda.CUDAGraph())
        pool = torch.cuda.graph_pool_handle() if shares is None else shares.pool()
        # garbage collection is disabled: a finalizer may free device memory, which is not allowed during capture
        collects = gc.isenabled()
        with lock, torch.cuda.device(self._device), torch.cuda.stream(compute):
            gc.disable()
            try:
                # thread_local, because other threads may use the device during capture
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    yield graph, lanes
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # this error only repeats that the capture is invalid
                        _end_capture(graph, self._device, pool)
                    raise
                _end_capture(graph, self._device, pool)
            finally:
                if collects:
                    gc.enable()
                # after the capture: free all cuBLAS workspaces, including the workspaces in the graph pool
                core.free_cublas_workspaces()


# torch assigns the 32 streams of a pool round-robin.  If every arena took a new stream, some arena would get the same stream
# as the caller or NCCL, and copies would silently queue in front of compute.  torch has one pool per priority.  The caller
# and NCCL use priority 0.  Priority -3 is used by NCCL if is_high_priority_stream is set, and by symmetric memory.  FSDP uses
# priority -1.  No part of torch uses priority -2, so the lanes use it.  The priority of a stream has no effect on copies.
_PRIORITY = -2


@cache
def _lane_stream(device: torch.device, lane: Lane) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_PRIORITY)


@cache
def _capture_streams(
    device: torch.device,
) -> tuple[threading.Lock, torch.cuda.Stream, Mapping[Lane, torch.cuda.Stream]]:
    """Return a lock to hold while recording, the stream on which compute is recorded, and the streams of the lanes.

    No work ever runs on these streams.  Each node of a graph gets the priority of the stream on which it was recorded, so
    compute is recorded on a stream with the same priority as the caller's stream.
    """
    lanes: dict[Lane, torch.cuda.Stream] = {lane: torch.cuda.Stream(device, priority=_PRIORITY) for lane in LANES}
    return threading.Lock(), torch.cuda.Stream(device), lanes


def _end_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # without this call, torch 2.11 would go on allocating from the graph pool, and would never free the pool
        with contextlib.suppress(RuntimeError):
            core.end_pool(device.index, pool)
        raise


def _keep_for_ever(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


class _Token:
    """An object that is attached to an event or to memory, and that is freed together with it.  Weak references refer to the
    token instead of the event, because torch 2.11 never clears a weak reference to an event."""


@cache
def _tokens() -> weakref.WeakValueDictionary[int, _Token]:
    """Return the tokens of all events and of all memory, by the id of the object to which each token is attached."""
    tokens: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()

    def in_child() -> None:
        for address in list(tokens):
            _keep_for_ever(ctypes.cast(address, ctypes.py_object).value)

    os.register_at_fork(after_in_child=in_child)
    return tokens


def _kept_by_children(owner: Object) -> Object:
    """Prevent forked children from freeing ``owner``, a GPU event or GPU memory; return ``owner``.  A forked child cannot
    use the GPU, so torch would abort the child if the child freed ``owner``."""
    token: Any = _Token()
    owner.__dict__["chunkflow_token"] = _tokens()[id(owner)] = token
    return owner


# A flag of cudaHostRegister: the memory is pinned for every device.  The flag for read-only memory is not set, because
# load_state_dict writes to the pinned memory, possibly from a GPU.
_PORTABLE = 1


def register(host: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Pin exactly the bytes of a host tensor; return a function that unpins these bytes.  Raises OSError if pinning fails.

    The bytes are pinned by the CUDA runtime that torch has loaded, because the CUDA bindings of another package may need a
    newer driver.
    """
    if host.is_pinned():  # pinning it again would be a CUDA error
        return lambda: None
    address, nbytes, process = host.data_ptr(), host.numel() * host.element_size(), os.getpid()
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):  # otherwise, a thread that has not used a GPU yet would initialize GPU 0
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
    # the CUDA runtime would report this error again at the next kernel launch, so a kernel is launched here to clear the
    # error
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    raise OSError(f"CUDA error {int(error)}, {torch.cuda.cudart().cudaGetErrorString(error)}")
