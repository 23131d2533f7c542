"""Copies between pageable host memory and a GPU through two pinned buffers.  The host accesses one buffer while the GPU
accesses the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .bytes import copy_host_bytes, flat_bytes
from .source import Bytes, take

# Bytes per buffer.  A buffer is large enough that the next copy is launched before the copy of this buffer ends, and
# small enough that it can be pinned even if weights cannot be pinned.
PIECE = 16 << 20
PIECES = 2

Copy = Callable[[torch.Tensor, torch.Tensor], None]
Record = Callable[[Any], None]


class Staging:
    """A ring of pinned buffers for one device.

    ``pinned``: whether the buffers could be pinned; if not, :meth:`to_device` and :meth:`to_host` must not be called.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], event: Callable[[], Any], copy: Copy, record: Record
    ) -> None:
        """``allocate``: a function that returns pinned memory of a given size, uint8; it raises RuntimeError if the memory
        cannot be pinned.

        ``event``: a function that creates an event.  ``copy``: a function that enqueues a copy on the stream for copies.
        ``record``: a function that records an event on this stream.
        """
        self._copy = copy
        self._record = record
        self._pieces: list[tuple[torch.Tensor, Any]] = []
        with contextlib.suppress(RuntimeError):
            self._pieces = [(allocate(PIECE), event()) for _ in range(PIECES)]

    @property
    def pinned(self) -> bool:
        return bool(self._pieces)

    def to_device(self, target: torch.Tensor, source: Bytes) -> None:
        """Copy bytes from any source to the device (uint8, equal sizes); return when all copies are enqueued."""
        for (piece, free), span in self._spans(source.numel()):
            free.synchronize()
            part = piece[: span.stop - span.start]
            take(part, source[span])
            self._copy(target[span], part)
            self._record(free)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes from the device to the host (uint8, equal sizes); return when they have arrived."""
        under_way: list[tuple[torch.Tensor, Any, slice]] = []

        def take() -> None:
            part, over, span = under_way.pop(0)
            over.synchronize()
            copy_host_bytes(target[span], part)

        for (piece, over), span in self._spans(source.numel()):
            if len(under_way) == PIECES:
                take()
            part = piece[: span.stop - span.start]
            self._copy(part, source[span])
            self._record(over)
            under_way.append((part, over, span))
        while under_way:
            take()

    def _spans(self, nbytes: int) -> Iterator[tuple[tuple[torch.Tensor, Any], slice]]:
        for number, begin in enumerate(range(0, nbytes, PIECE)):
            yield self._pieces[number % PIECES], slice(begin, min(begin + PIECE, nbytes))


class GpuStagings:
    """Copies tensors between pageable host memory and GPUs, on the caller's current streams.

    Create a GpuStagings for each operation, such as restoring a model.  The pinned memory is freed together with the
    object.
    """

    def __init__(self) -> None:
        self._made: dict[torch.device, Staging] = {}

    def copied_to(self, host: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
        """Copy a dense host tensor to a device.  If the device is the CPU, return the tensor itself, unless ``copy`` is
        True.

        Raises torch.OutOfMemoryError if the tensor does not fit in GPU memory.
        """
        if device.type != "cuda":
            return host.to(device, copy=copy)
        if host.is_pinned() or not (staging := self._of(device)).pinned:
            return host.to(device, copy=True)
        value = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        with torch.cuda.device(device):
            staging.to_device(flat_bytes(value), flat_bytes(host))
        return value

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes from a device tensor to a host tensor (uint8, equal sizes)."""
        if source.device.type != "cuda" or not (staging := self._of(source.device)).pinned:
            target.copy_(source)
            return
        with torch.cuda.device(source.device):
            staging.to_host(target, source)

    def _of(self, device: torch.device) -> Staging:
        if device not in self._made:
            with torch.cuda.device(device):
                self._made[device] = Staging(_pinned, torch.cuda.Event, _copy, torch.cuda.Event.record)
        return self._made[device]


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
