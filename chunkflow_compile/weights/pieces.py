"""The pieces of a weight on the devices of the ranks of a node, as a source of copies.

Nothing writes a piece after the weight is sharded, so a rank may pull from it at any time, and no rank waits for another.
The pages of a piece last as long as any rank has them: those of a host device are shared memory, and of a GPU torch counts
who has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from chunkflow_compile.passes.pieces import Part, parts


@dataclass(frozen=True, eq=False)
class Pieces:
    """The bytes ``[begin, end)`` of a weight of ``nbytes`` that lies in pieces.

    ``held``: the piece of each rank of the node in their order, uint8, as this rank maps it.  ``place``: of this rank among
    them.  ``version``: that of the weight's values when they were sharded.
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
        """A device reads them as they are."""
        return True

    def __getitem__(self, part: slice) -> Pieces:
        begin, end, _ = part.indices(self.numel())
        return replace(self, begin=self.begin + begin, end=self.begin + max(begin, end))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Those of other ranks from the next rank on: so not all ranks pull from one at a time."""
        ranks = len(self.held)
        return tuple(parts(self.begin, self.end, self.nbytes, ranks, (self.place + 1) % ranks))

    @property
    def from_others(self) -> int:
        """How many of the bytes other ranks have."""
        return sum(part.nbytes for part in self.parts if part.owner != self.place)

    @cached_property
    def _sources(self) -> tuple[tuple[int, slice, torch.Tensor], ...]:
        """Whose each part is, where its bytes go, and the bytes: made once, because every step copies them."""
        return tuple(
            (owner, slice(begin - self.begin, begin - self.begin + nbytes), self.held[owner].narrow(0, offset, nbytes))
            for owner, begin, offset, nbytes in self.parts
        )

    def copies(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The copies that bring the bytes into ``target`` (uint8, of as many): of each its target and its source."""
        for _, where, source in self._sources:
            yield target[where], source

    def own(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Those of :meth:`copies` from this rank's own piece."""
        for owner, where, source in self._sources:
            if owner == self.place:
                yield target[where], source

    @cached_property
    def pulls(self) -> tuple[list[int], list[int], list[int]]:
        """The others, as numbers: where the bytes of each go, from the first byte on, its address, and its bytes."""
        others = [(where.start, source) for owner, where, source in self._sources if owner != self.place]
        return [at for at, _ in others], [s.data_ptr() for _, s in others], [s.numel() for _, s in others]
