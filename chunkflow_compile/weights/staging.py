"""Bytes between pageable host memory and a GPU, through two pinned pieces: the host fills one, the GPU reads the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .bytes import copy_host_bytes, flat_bytes
from .source import Bytes, take

# Large enough that a copy of one piece hides the start of the next, small enough to be pinned where nothing else can be.
PIECE = 16 << 20
PIECES = 2

Copy = Callable[[torch.Tensor, torch.Tensor], None]
Record = Callable[[Any], None]


class Staging:
    """``pinned``: whether the pieces could be pinned; if not, :meth:`to_device` and :meth:`to_host` must not be called."""

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], event: Callable[[], Any], copy: Copy, record: Record
    ) -> None:
        """``allocate``: pinned memory of so many bytes, uint8; raises RuntimeError if there is none.

        ``copy``, ``record``: enqueue a copy, and a mark after it, on the stream to use.
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
        """Copy bytes of the host or the drive to the device (uint8, equal sizes); it returns when all is enqueued."""
        for (piece, free), span in self._spans(source.numel()):
            free.synchronize()
            part = piece[: span.stop - span.start]
            take(part, source[span])
            self._copy(target[span], part)
            self._record(free)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy device bytes to the host (uint8, equal sizes); they are there when it returns."""
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
    """Tensors between pageable host memory and GPUs, on the caller's current streams, for one operation, such as restoring a
    model: the pinned memory is given back with it."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Staging] = {}

    def brought(self, host: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
        """The values of a dense host tensor on a device; on the CPU the tensor itself, unless a ``copy`` is wanted.

        Raises torch.OutOfMemoryError if there is no room.
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
        """Copy bytes of a device to host bytes (uint8, equal sizes)."""
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
