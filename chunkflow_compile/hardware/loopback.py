"""Collectives on one device, for benchmarks: a process group that copies the exchanged bytes to host memory and back.

The bytes of a collective use PCIe at the same time as copies of weights, as with NCCL on nodes without peer access
between GPUs.  NCCL moves the bytes with kernels; this group uses the copy engines, or optionally kernels.  The process
is rank 0.  The other ranks do not exist; instead of their data, the process receives the data that it has sent to them.
So the outputs of a model differ from its outputs on several ranks, but they are reproducible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chunkflow_compile.private_torch import core

LOOPBACK = "loopback"


class Loopback(dist.ProcessGroup):
    """A process group of ``size`` ranks, of which only rank 0 exists.

    ``by_kernels``: whether kernels, and not copy engines, move the bytes on a GPU.
    """

    def __init__(self, size: int, by_kernels: bool) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self._by_kernels = by_kernels
        self._size = size
        self._staging: dict[torch.device, torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._group_name = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def alltoall_base(
        self, output: torch.Tensor, sent: torch.Tensor, output_splits: Any, input_splits: Any, *_: Any
    ) -> Any:
        if list(output_splits or ()) != list(input_splits or ()):
            raise NotImplementedError("a loopback group returns what it is sent: input and output splits must be equal")
        parts = output_splits or [len(output) // self._size] * self._size
        return self._work(output, list(zip(output.split(parts), sent.split(parts), strict=True)))

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], *_: Any
    ) -> Any:
        (output,), (mine,) = outputs, sent
        return self._work(output, [(part, mine.reshape(part.shape)) for part in output.chunk(self._size)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]  # as torch 2.13 calls it

    def barrier(self, *_: Any, **__: Any) -> Any:
        return self._work(None, [])

    def getBackendName(self) -> str:
        return LOOPBACK

    def _work(self, result: Any, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copy each part to the host and back, on the group's own stream.  The part that this rank sends to itself is
        copied directly."""
        device = parts[0][0].device if parts else torch.device("cpu")
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        with self._aside(device):
            self._exchange(parts)
            future.set_result(result)
        return core.work_of(future)

    def _aside(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which ops run on the group's own stream, after the work that was issued on the caller's
        stream.  For the CPU, return a context that does nothing."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[device])

    def _exchange(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for rank, (target, source) in enumerate(parts):
            if rank == 0:
                target.copy_(source)
                continue
            staged = self._stage(source)
            self._copy(staged, source)
            self._copy(target, staged.reshape(target.shape))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        on_gpu = target.is_cuda or source.is_cuda
        if self._by_kernels and on_gpu and target.is_contiguous() and source.is_contiguous():
            from .kernel_copy import copy_by_kernel

            copy_by_kernel(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def _stage(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned host memory for one part.  All parts use the same memory, one after the other, because they are
        copied on one stream."""
        nbytes = like.numel() * like.element_size()
        held = self._staging.get(like.device)
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, pin_memory=like.device.type == "cuda")
            self._staging[like.device] = held
        return held[:nbytes].view(like.dtype).view(like.shape)


def join_loopback(size: int, by_kernels: bool = False) -> None:
    """Initialise the default process group as a loopback group of ``size`` ranks.

    ``by_kernels``: whether Triton kernels move the bytes on a GPU.
    """
    name = f"{LOOPBACK}_kernels" if by_kernels else LOOPBACK
    if name.upper() not in dist.Backend.__dict__:

        def create(common: Any, _: Any) -> Loopback:
            return Loopback(common.group_size, by_kernels)

        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    store: Any = dist.__dict__["HashStore"]()
    dist.init_process_group(name, rank=0, world_size=size, store=store, timeout=timedelta(minutes=1))
