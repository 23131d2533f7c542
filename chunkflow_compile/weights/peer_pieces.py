"""The pieces of a weight, as a source of copies.  Each rank of a node keeps one piece on its device.

A piece never changes after the weight was sharded, so any rank may pull from it at any time, without synchronization.
The memory of a piece lasts as long as any rank uses the piece: on a CPU, it is shared memory, and on a GPU, torch counts
the processes that use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from chunkflow_compile.passes.pieces import PiecePart, parts


@dataclass(frozen=True, eq=False)
class Pieces:
    """The byte range ``[begin, end)`` of a weight that has ``nbytes`` bytes and is stored in pieces.

    ``held``: the piece of each rank of the node in rank order, uint8, as mapped on this rank.  ``place``: the index of
    this rank among the ranks.  ``version``: the version of the weight's values when they were sharded.
    """

    held: Sequence[torch.Tensor]
    place: int
    nbytes: int
    version: int
    begin: int
    end: int

    def numel(self) -> int:
        return self.end - self.begin

    def is_pinned(self) -> bool:
        """Return True, because a device reads the pieces directly."""
        return True

    def __getitem__(self, part: slice) -> Pieces:
        begin, end, _ = part.indices(self.numel())
        return replace(self, begin=self.begin + begin, end=self.begin + max(begin, end))

    @cached_property
    def parts(self) -> tuple[PiecePart, ...]:
        """The parts of the range, in the order in which this rank copies them.  The part that the next rank holds comes
        first, so that not all ranks pull from the same rank at the same time."""
        ranks = len(self.held)
        return tuple(parts(self.begin, self.end, self.nbytes, ranks, (self.place + 1) % ranks))

    @property
    def from_others(self) -> int:
        """The number of bytes of the range that are in pieces of other ranks."""
        return sum(part.nbytes for part in self.parts if part.owner != self.place)

    @cached_property
    def _sources(self) -> tuple[tuple[int, slice, torch.Tensor], ...]:
        """For each part, (owner, target range, source bytes).  Computed once, because every step copies all parts."""
        return tuple(
            (owner, slice(begin - self.begin, begin - self.begin + nbytes), self.held[owner].narrow(0, offset, nbytes))
            for owner, begin, offset, nbytes in self.parts
        )

    def copies(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (target, source) for each copy that is needed to fill ``target`` with the bytes of the range.

        ``target``: uint8, as large as the range.
        """
        for _, where, source in self._sources:
            yield target[where], source

    def own(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pairs from :meth:`copies` whose source is in this rank's own piece."""
        for owner, where, source in self._sources:
            if owner == self.place:
                yield target[where], source

    @cached_property
    def pulls(self) -> tuple[list[int], list[int], list[int]]:
        """The copies from other ranks, as three lists: offsets in the target in bytes, source addresses, and sizes in
        bytes."""
        others = [(where.start, source) for owner, where, source in self._sources if owner != self.place]
        return [at for at, _ in others], [s.data_ptr() for _, s in others], [s.numel() for _, s in others]
