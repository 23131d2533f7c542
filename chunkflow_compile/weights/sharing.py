"""Sharing: the ranks of a machine use one copy of the weights, in shared memory or in a file on the SSD.

The shared memory is a sealed memfd: a file without a name, which the kernel removes when the last process that maps it
has ended, for whatever reason.  The file on the SSD has no name either, and is removed in the same way.  The values of
a weight are known to be equal on all ranks if all ranks would read them from the same range of the same file.
Otherwise, after all weights are written, each rank compares all bytes of its weight with the bytes that the first rank
has written.
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
from chunkflow_compile.passes.problem import Source
from chunkflow_compile.units import size

from .backing import Backing, SharedMemory
from .bytes import as_weight, same_bits
from .drive import Scratch
from .limits import check_room
from .mapping import map_file, memory_file, prefer_huge_pages, whole_pages
from .node import Node
from .packed import fits, packed_like, unpacked
from .source import DriveBytes

_log = logging.getLogger(__name__)

# Number of elements that are cast and compared at a time.
_PIECE = 1 << 20
# Maximum number of weights that a message names.
_NAMED = 5


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """A weight to place.

    ``like``: a meta tensor with the final shape, strides and dtype.  ``read_as``: the present dtype of the values.
    ``part``: the file range that contains the weight now, or None.
    ``source``: the place where the bytes are to be stored, and their form.  ``stays``: whether the weight keeps its
    present memory or file range.
    ``frees``: the bytes of present memory that are freed after the move.  ``shard``: an id of the part of the weight
    that this rank has; None if it has the whole weight.
    """

    name: str
    like: torch.Tensor
    read_as: torch.dtype
    part: DriveBytes | None
    source: Source
    stays: bool
    frees: int = 0
    shard: tuple[int, ...] | None = None

    @property
    def stored(self) -> torch.Tensor:
        """A meta tensor with the shape and dtype in which the weight is stored."""
        return packed_like(self.like) if self.source.compressed else self.like

    @property
    def takes(self) -> int:
        """Bytes by which the move increases the host memory that the weight takes; at least 0."""
        return max(0, self.nbytes - self.frees)

    @property
    def takes_temporarily(self) -> int:
        """Bytes of host memory that the weight takes only while it is moved.  For a weight to pack, they include its
        unpacked values and the unpacked values of the next weight, which is read ahead.  The next weight is counted with
        the size of this weight, so the maximum over all weights is an upper bound."""
        return min(self.nbytes, self.frees) + 2 * self.source.values

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def kind(self) -> str:
        """A text that identifies the weight for other ranks.  Ranks can share the weight if this text is equal on all
        of them."""
        shape, strides = [*self.like.shape], [*self.like.stride()]
        return repr((self.name, shape, strides, self.like.dtype, self.shard and [*self.shard], self.source))

    @property
    def origin(self) -> list[Any] | None:
        """The file range and dtype from which the weight is read, as JSON, or None if it is not read from a file.  If
        two ranks have the same origin for a weight, its values are equal on both ranks."""
        if (part := self.part) is None:
            return None
        return [part.file.name, part.file.stamp, part.offset, part.nbytes, str(self.read_as)]


class SharedPages:
    """The weights that ranks share after one move to host memory.  They are in shared memory or in a scratch file.

    ``writes``: the names of the weights that this rank writes.  For every other weight, this rank compares its own
    values with the written values, unless all ranks read the weight from the same range of the same file.
    """

    def __init__(self, node: Node, wanted: Sequence[LoadRequest]) -> None:
        """Every rank creates this object at the same time, with its own weights.  Raises ChunkflowError if the weights
        do not fit, or if a rank has ended."""
        self._node = node
        self._pages: dict[str, SharedMemory] = {}
        self._on_drive: dict[str, tuple[int, LoadRequest]] = {}  # name -> (offset in the scratch file, weight)
        self._differ: list[str] = []
        self._wanted = {w.name: w for w in wanted}
        mine = {w.kind: w for w in wanted}
        whole = sum(w.shard is None for w in wanted)  # the number of unsharded weights, which all ranks should have
        reports = node.gather([whole, [(kind, w.origin) for kind, w in mine.items()]])
        sources = [dict(each) for _, each in reports]
        # weights that some rank lacks, or has in another size, are not shared; the shared weights are in the order that
        # they have on the first rank
        kinds = [k for k in sources[0] if all(k in each for each in sources) and mine[k].nbytes]
        common = [mine[k] for k in kinds]
        if 2 * len([w for w in common if w.shard is None]) < max(count for count, _ in reports):
            _log.warning(
                "rank %s shares %s of its %s weights: another rank places another model. Ranks that share place the same "
                "models in the same order; pass share=False for a model that only some have",
                node.rank,
                len(common),
                len(wanted),
            )
        first, *others = sources
        self._in_one_file = {mine[k].name for k in kinds if first[k] and all(each[k] == first[k] for each in others)}
        self.writes = self._assigned(common)
        if memory := [w for w in common if not w.source.file]:
            self._share_memory(memory)
        if drive := [w for w in common if w.source.file]:
            self._share_file(drive)

    def __contains__(self, name: str) -> bool:
        return name in self._pages or name in self._on_drive

    def _share_memory(self, weights: Sequence[LoadRequest]) -> None:
        """Allocate shared memory on the leader, and map it on all ranks."""
        places = self._places(weights)
        if self._node.leads:
            # each weight frees its present memory once it is written, so only one weight at a time is in memory twice
            check_room(sum(w.takes for w in weights) + max(w.takes_temporarily for w in weights))
        descriptor = self._node.share(memory_file("chunkflow-weights", places[-1]) if self._node.leads else None)
        pages = map_file(descriptor, places[-1], mmap.MAP_SHARED)
        if pages is None:
            cause = os.strerror(ctypes.get_errno())
            raise ChunkflowError(f"{size(places[-1])} of shared memory cannot be mapped: {cause}.")
        prefer_huge_pages(pages)
        storage = pages.untyped_storage()
        for weight, begin in zip(weights, places, strict=False):
            # each weight has a separate storage, because pickling a tensor pickles its whole storage
            part = torch.empty(0, dtype=torch.uint8).set_(storage[begin : begin + weight.nbytes])
            self._pages[weight.name] = SharedMemory(descriptor, begin, as_weight(part, weight.stored))

    def _share_file(self, weights: Sequence[LoadRequest]) -> None:
        """Create the scratch file on the leader, and open it on all ranks."""
        places = self._places(weights)
        self._on_drive = {w.name: (begin, w) for w, begin in zip(weights, places, strict=False)}
        own = Scratch.made(places[-1]) if self._node.leads else None
        # each rank opens the file separately, because the kernel's read-ahead is per open file, and each rank reads at
        # another position
        file = self._node.share(None if own is None else own.file.descriptor)
        self._scratch = Scratch(file, f"of rank {self._node.ranks[0]}" if own is None else own.where)

    @staticmethod
    def _places(weights: Sequence[LoadRequest]) -> list[int]:
        """Return the byte offset of each weight (a page boundary), followed by the total size in bytes."""
        return [*accumulate((whole_pages(weight.nbytes) for weight in weights), initial=0)]

    def _assigned(self, weights: Sequence[LoadRequest]) -> frozenset[str]:
        """Return the names of the weights that this rank writes.

        Weights that all ranks would read from the same file range are divided among the ranks, so that each rank reads
        about the same number of bytes.  The leader writes all other weights, including all weights that go to the SSD.
        """
        ranks, done = self._node.ranks, 0
        split = {w.name for w in weights if w.name in self._in_one_file and not w.source.file}
        total = sum(w.nbytes for w in weights if w.name in split)
        writers = dict[str, int]()
        for weight in weights:
            writers[weight.name] = ranks[0]
            if weight.name in split:
                writers[weight.name] = ranks[min(len(ranks) * done // total, len(ranks) - 1)]
                done += weight.nbytes
        return frozenset(name for name, writer in writers.items() if writer == self._node.rank)

    def backing(self, name: str) -> Backing:
        """Return the shared pages of a weight, or the part of the scratch file to which the weight was written."""
        if name in self._pages:
            return self._pages[name]
        begin, weight = self._on_drive[name]
        return self._scratch.kept(begin, weight.stored)

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Write a weight, a dense host tensor, to the scratch file.  Raises ChunkflowError if the SSD is full."""
        self._scratch.write(self._on_drive[name][0], values)

    def same(self, name: str, values: torch.Tensor) -> bool:
        """Whether ``values`` are equal to the values that were written for a weight."""
        written, weight = self.backing(name).host, self._wanted[name]
        equal = name in self.writes or name in self._in_one_file
        if not equal and weight.source.compressed and fits(written):
            equal = _same_bytes(unpacked(name, written, weight.like), values)
        elif not equal:
            # values that do not fit in the packed form are not shared, so no rank reports a difference
            equal = weight.source.compressed or _same_bytes(written, values)
        if not equal:
            self._differ.append(name)
        return equal

    def report(self) -> None:
        """Log on all ranks which weights differ, after all ranks have compared their weights."""
        for rank, names in zip(self._node.ranks, self._node.gather(self._differ), strict=True):
            if names:
                _log.warning(
                    "rank %s has other values than rank %s in %s, and keeps its own copy of them",
                    rank,
                    self._node.ranks[0],
                    _first_names(names),
                )

    def leave(self, kept: Collection[str]) -> None:
        """Unmap the pages of all weights that are not in ``kept``."""
        for name in self._pages.keys() - kept:
            self._pages.pop(name).leave()


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _same_bytes(written: torch.Tensor, values: torch.Tensor) -> bool:
    """Cast ``values`` to the dtype of ``written``, and return whether the bytes of both are then equal.

    ``written``: a dense host tensor.
    """
    pieces = zip(*(t.as_strided((t.numel(),), (1,)).split(_PIECE) for t in (written, values)), strict=True)
    return all(same_bits(ours, theirs.to(written.dtype).to("cpu")) for ours, theirs in pieces)
