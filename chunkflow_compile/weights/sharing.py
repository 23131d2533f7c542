"""Sharing: one copy of the weights on a machine, in memory that its ranks map together, or in one file on the drive.

The memory is a sealed memfd: a file without a name, which is gone when the last process that maps it has ended, however it
ended.  So is the file on the drive.  That a weight is the same on all ranks is proved, not assumed: it is the same part of
the same file everywhere, or each rank compares all bytes of its own with those that the first rank has written, once all
are written.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .backing import FileSlice, SharedMemory
from .bytes import as_weight, same_bits
from .drive import Scratch
from .limits import check_room
from .mapping import map_file, memory_file, prefer_huge_pages, whole_pages
from .node import Node
from .source import DriveBytes

_log = logging.getLogger(__name__)

# Elements of a weight that are cast and compared at a time.
_PIECE = 1 << 20
# In messages, names of more weights are left out.
_NAMED = 5


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """A weight to place: its name, and the part of a file that it is, if it is one.

    ``like``: its shape, strides and dtype from then on, as a tensor without memory.  ``read_as``: its dtype now.
    ``drive``: whether it goes to the drive.  ``stays``: whether it keeps its memory, or its place in a file on the drive.
    ``frees``: bytes that its present memory gives back.  ``shard``: which part of a weight it is, None for a whole one.
    """

    name: str
    like: torch.Tensor
    read_as: torch.dtype
    part: DriveBytes | None
    drive: bool
    stays: bool
    frees: int = 0
    shard: tuple[int, ...] | None = None

    @property
    def takes(self) -> int:
        """Bytes of host memory that a copy of it takes in the end."""
        return max(0, self.nbytes - self.frees)

    @property
    def nbytes(self) -> int:
        return self.like.nbytes

    def manifest(self) -> dict[str, Any]:
        """As JSON holds it."""
        part = (
            None
            if self.part is None
            else [self.part.file.name, self.part.file.stamp, self.part.offset, self.part.nbytes]
        )
        shard = None if self.shard is None else [*self.shard]
        kind = [self.name, [*self.like.shape], [*self.like.stride()], str(self.like.dtype), self.drive, shard]
        return {"as": kind, "from": [part, str(self.read_as)]}


class SharedPages:
    """The weights of one move that ranks share, in memory or in a scratch file.

    ``writes``: those that this rank writes.  Of the others, it compares its own values with what is written, unless another
    rank reads the same part of the same file.
    """

    def __init__(self, node: Node, wanted: Sequence[LoadRequest]) -> None:
        """All ranks create it, each with its own weights.  Raises ChunkflowError if there is no room, or one has ended."""
        self._node = node
        self.writes: set[str] = set()
        self._pages: dict[str, SharedMemory] = {}
        self._on_drive: dict[str, tuple[int, LoadRequest]] = {}  # and where each begins in the scratch file
        self._in_one_file: set[str] = set()
        self._differ: list[str] = []
        manifests = node.gather([w.manifest() for w in wanted])
        sources: dict[str, list[Any]] = {}
        for manifest in manifests:
            for weight in manifest:
                sources.setdefault(repr(weight["as"]), []).append(weight["from"])
        # in the order of the first rank; a weight of other sizes elsewhere, or of some ranks only, stays private
        order = [repr(w["as"]) for w in manifests[0]]
        mine = {repr(w.manifest()["as"]): w for w in wanted}
        common = [
            mine[key] for key in order if key in mine and len(sources[key]) == len(manifests) and mine[key].nbytes
        ]
        if 2 * len([w for w in common if w.shard is None]) < max(map(_whole, manifests)):
            _log.warning(
                "rank %s shares %s of its %s weights: another rank places another model. Ranks that share place the same "
                "models in the same order; pass share=False for a model that only some have",
                node.rank,
                len(common),
                len(wanted),
            )
        for weight in common:
            first, *others = sources[repr(weight.manifest()["as"])]
            if first[0] and all(other == first for other in others):
                self._in_one_file.add(weight.name)
        self._assign(common)
        if memory := [w for w in common if not w.drive]:
            self._share_memory(memory)
        if drive := [w for w in common if w.drive]:
            self._share_file(drive)

    def __contains__(self, name: str) -> bool:
        return name in self._pages or name in self._on_drive

    def _share_memory(self, weights: Sequence[LoadRequest]) -> None:
        """The leader makes the memory, and the others get it."""
        places = self._places(weights)
        if self._node.leads:
            # each leaves the memory that it has once it is written: one at a time exists twice
            check_room(sum(w.takes for w in weights) + max(min(w.nbytes, w.frees) for w in weights))
        descriptor = self._node.share(memory_file("chunkflow-weights", places[-1]) if self._node.leads else None)
        pages = map_file(descriptor, places[-1], mmap.MAP_SHARED)
        if pages is None:
            cause = os.strerror(ctypes.get_errno())
            raise ChunkflowError(f"{size(places[-1])} of shared memory cannot be mapped: {cause}.")
        prefer_huge_pages(pages)
        storage = pages.untyped_storage()
        for weight, begin in zip(weights, places, strict=False):
            # each has a storage of its own: one of all weights would be pickled with each of them
            part = torch.empty(0, dtype=torch.uint8).set_(storage[begin : begin + weight.nbytes])
            self._pages[weight.name] = SharedMemory(descriptor, begin, as_weight(part, weight.like))

    def _share_file(self, weights: Sequence[LoadRequest]) -> None:
        """The leader makes the scratch file, and the others get it."""
        places = self._places(weights)
        self._on_drive = {w.name: (begin, w) for w, begin in zip(weights, places, strict=False)}
        made = Scratch.made(places[-1]) if self._node.leads else None
        # each rank has an opening of its own: the kernel reads ahead for each, and they read at different places
        file = self._node.share(None if made is None else made.file.descriptor)
        self._scratch = Scratch(file, f"of rank {self._node.ranks[0]}" if made is None else made.where)

    @staticmethod
    def _places(weights: Sequence[LoadRequest]) -> list[int]:
        """Where each weight begins, on a page of its own, and the end."""
        return [*accumulate((whole_pages(weight.nbytes) for weight in weights), initial=0)]

    def _assign(self, weights: Sequence[LoadRequest]) -> None:
        """Parts of one file are read by one rank each, in shares of equal bytes; the leader writes the rest.

        The leader also reads what it writes to the drive.
        """
        ranks, done = self._node.ranks, 0
        split = {w.name for w in weights if w.name in self._in_one_file and not w.drive}
        total = sum(w.nbytes for w in weights if w.name in split)
        for weight in weights:
            writer = ranks[0]
            if weight.name in split:
                writer = ranks[min(len(ranks) * done // total, len(ranks) - 1)]
                done += weight.nbytes
            if writer == self._node.rank:
                self.writes.add(weight.name)

    def pages(self, name: str) -> SharedMemory:
        """The pages of a weight that is shared in memory."""
        return self._pages[name]

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Write a weight, a dense host tensor, to the scratch file.  Raises ChunkflowError if the drive is full."""
        self._scratch.write(self._on_drive[name][0], values)

    def kept(self, name: str) -> FileSlice:
        """A weight in the scratch file, once it is written."""
        begin, weight = self._on_drive[name]
        return self._scratch.kept(begin, weight.like)

    def same(self, name: str, host: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether ``values`` are those that were written to ``host``."""
        equal = name in self.writes or name in self._in_one_file or _same_bytes(host, values)
        if not equal:
            self._differ.append(name)
        return equal

    def wait(self) -> None:
        """Until all ranks have written their weights."""
        self._node.gather(None)

    def report(self) -> None:
        """Name the weights that differ, on all ranks, when all have compared them."""
        for rank, names in zip(self._node.ranks, self._node.gather(self._differ), strict=True):
            if names:
                _log.warning(
                    "rank %s has other values than rank %s in %s, and keeps its own copy of them",
                    rank,
                    self._node.ranks[0],
                    _some_of(names),
                )

    def leave(self, kept: Collection[str]) -> None:
        """Unmap the pages of all weights but those ``kept``."""
        for name in self._pages.keys() - kept:
            self._pages.pop(name).leave()


def _whole(manifest: Sequence[Any]) -> int:
    """The number of weights that are not parts, which ranks are expected to have in common."""
    return sum(weight["as"][-1] is None for weight in manifest)


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _same_bytes(made: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether a dense host tensor has the bytes that ``values``, cast to its dtype, would have there."""
    pieces = zip(*(t.as_strided((t.numel(),), (1,)).split(_PIECE) for t in (made, values)), strict=True)
    return all(same_bits(ours, theirs.to(made.dtype).to("cpu")) for ours, theirs in pieces)
