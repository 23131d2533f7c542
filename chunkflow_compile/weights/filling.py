"""Filling: how the weights of one move get into host memory, from where, in which dtype, and into which pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError

from .bytes import ordinary
from .checkpoint import CheckpointReader, FilePart, Mappings
from .drive import Drive
from .host_memory import empty_pages, fill, near_cpus, running_on
from .limits import check_room, host_memory
from .peers import Peers
from .sharing import SharedPages, SharedWeight, Wanted
from .source import DriveBytes
from .staging import GpuStagings

# Bytes to fill until the free memory is looked at again, which takes half a millisecond.
_CHECKED = 256 << 20
# The dtype that a weight of this name gets.
DtypeOf = Callable[[str, torch.Tensor], torch.dtype]


@dataclass(frozen=True)
class Placed:
    """Where the values of a weight are: ``host``, a tensor of them, in pages, in a mapping of a file, or where they were.

    ``shared``: its place, if other ranks have the memory too.  ``drive``: its bytes in a file, if it is on the drive;
    ``scratch``: in a scratch file, where writes to ``host`` go too.
    """

    host: torch.Tensor
    shared: SharedWeight | None = None
    drive: DriveBytes | None = None
    scratch: bool = False


class Filling:
    """Makes the host tensors of the weights of one move, in their order.

    Each gets pages of its own, which can be pinned for a GPU and shared; on the CPU it may keep its memory instead.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Sequence[tuple[str, torch.Tensor]],
        dtype_of: DtypeOf,
        *,
        pages: bool,
        peers: Peers | None = None,
        on_drive: Collection[str] = (),
    ) -> None:
        """``device``: where programs run.  ``weights``: all of the move, by name.  ``pages``: whether all get pages of their
        own.  ``peers``: the ranks to share them with, which move the weights of the same model.  ``on_drive``: the names of
        those that go to the drive instead."""
        self._device = device
        self._nbytes = sum(w.nbytes for _, w in weights)
        self._pages = pages or peers is not None
        self._dtype_of = dtype_of
        self._stagings = GpuStagings()
        self._peers = peers
        self._on_drive = on_drive
        self._parts: dict[str, FilePart | None] = {}
        self._left: list[tuple[torch.Tensor, FilePart, torch.dtype]] = []  # to other ranks
        self._kept: set[str] = set()
        self._unchecked = 0
        self._shared: SharedPages | None = None
        try:
            if peers is not None:
                self._shared = SharedPages(peers, [self._wanted(*w) for w in weights if w[0] not in on_drive])
            self._todo = sum(self._taken(*w) for w in weights)
            check_room(self._todo)
        except BaseException as error:
            self.close(error)
            raise

    def place(self, name: str, tensor: torch.Tensor) -> Placed:
        """Where the values of a weight are from now on.

        Raises ChunkflowError if it lies in a checkpoint that cannot be read, or if a rank to share it with has ended.
        """
        values, dtype = tensor.detach(), self._dtype_of(name, tensor)
        if self._stays(values, dtype):
            return Placed(ordinary(values))
        self._take(self._taken(name, tensor))
        part = self._part(name, values)
        if name in self._on_drive:
            return self._on_the_drive(values, dtype, part)
        found = None if self._shared is None else self._shared.pages(name)
        if self._shared is not None and found is not None:
            role, equal = self._shared.role(name), True
            if role == "fill":
                self._fill(found.host, values, part)
                self._shared.written(name)
            elif role == "leave" and part is not None:
                self._left.append((found.host, part, values.dtype))
            else:
                equal = self._shared.same(name, values)
            if equal:
                self._kept.add(name)
                return Placed(found.host, shared=found)
        made = empty_pages(values, dtype)
        self._fill(made, values, part)
        return Placed(made)

    def _on_the_drive(self, values: torch.Tensor, dtype: torch.dtype, part: FilePart | None) -> Placed:
        if part is not None and dtype == values.dtype and not values.is_inference():
            return Placed(values, drive=self._drive.part(part))
        made = empty_pages(values, dtype)
        self._fill(made, values, part)
        host, kept = self._drive.keep(made)
        return Placed(host, drive=kept, scratch=True)

    def finish(self) -> None:
        """Wait until the other ranks have done their share."""
        if self._shared is not None:
            self._shared.finish()
            self._left.clear()

    def close(self, error: BaseException | None = None) -> None:
        """Give back threads, files and sockets.

        ``error``: why the move has failed; the weights that this rank has left to others are read now, so that none is lost.
        """
        if self._peers is not None:
            self._peers.close(error)
        if error is not None:
            for made, part, dtype in self._left:
                with suppress(ChunkflowError):  # the file is gone too
                    self._reader.read(part, made, dtype)
        if "_reader" in self.__dict__:
            self._reader.close()
        self._left.clear()
        if self._shared is not None:
            self._shared.leave(self._kept)

    def _stays(self, values: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether a weight keeps its memory."""
        return not self._pages and values.device.type == "cpu" and dtype == values.dtype

    def _taken(self, name: str, tensor: torch.Tensor) -> int:
        """Bytes of host memory that a weight takes from this rank.  One that is there already gives its own back."""
        values, dtype = tensor.detach(), self._dtype_of(name, tensor)
        if name in self._on_drive or self._stays(values, dtype):
            return 0
        nbytes = values.numel() * dtype.itemsize
        if self._shared is not None and self._shared.pages(name) is not None:
            return nbytes if self._shared.role(name) == "fill" else 0
        if values.device.type == "cpu" and self._part(name, values) is None:
            return max(0, nbytes - values.nbytes)
        return nbytes

    def _take(self, nbytes: int) -> None:
        """Look again, from time to time, whether there is room for the rest: others take memory meanwhile."""
        self._unchecked += nbytes
        if self._unchecked >= _CHECKED:
            self._unchecked = 0
            check_room(self._todo)
        self._todo -= nbytes

    def _fill(self, made: torch.Tensor, values: torch.Tensor, part: FilePart | None) -> None:
        if part is not None:
            self._reader.read(part, made, values.dtype)
        elif made.numel():
            with running_on(self._cpus):  # the first thread to write a page decides its memory node
                fill(made, values, self._stagings.of(values.device))

    def _part(self, name: str, values: torch.Tensor) -> FilePart | None:
        if name not in self._parts:
            self._parts[name] = self._mappings.part(values)
        return self._parts[name]

    def _wanted(self, name: str, tensor: torch.Tensor) -> Wanted:
        values = tensor.detach()
        part = self._part(name, values)
        return Wanted(name, (*values.shape,), (*values.stride(),), self._dtype_of(name, tensor), values.dtype, part)

    @cached_property
    def _cpus(self) -> frozenset[int]:
        return near_cpus(self._device)

    @cached_property
    def _drive(self) -> Drive:
        return Drive()

    @cached_property
    def _mappings(self) -> Mappings:
        return Mappings()

    @cached_property
    def _reader(self) -> CheckpointReader:
        # the page cache of the checkpoint would push out other memory if there is no room for both
        return CheckpointReader(direct=host_memory().free < 2 * self._nbytes, cpus=self._cpus)


def as_they_are(name: str, tensor: torch.Tensor) -> torch.dtype:
    """Each weight keeps its dtype."""
    return tensor.dtype


def cast_to(dtype: torch.dtype, root: nn.Module) -> DtypeOf:
    """As ``from_pretrained(torch_dtype=dtype)`` of diffusers: all floating-point weights of the state, except those that
    the class of the model keeps in float32."""
    kept = set(getattr(root, "_keep_in_fp32_modules", None) or ())
    known = root.state_dict().keys()

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if name not in known or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            return tensor.dtype
        return torch.float32 if kept & set(name.split(".")) else dtype

    return of
