"""Holes: what weights had of a file that lives on, given back once nobody can see it any more."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import partial

from .mapping import Descriptor, libc, whole_pages

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_forked = False


def _fork(parent: bool) -> None:
    global _forked
    _forked = parent


# A child has the mappings of its parent, and may read them at any time.
os.register_at_fork(after_in_parent=partial(_fork, True), after_in_child=partial(_fork, False))


@dataclass(frozen=True)
class Place:
    """``nbytes`` from a page on, ``offset``, of a file that ranks share."""

    descriptor: weakref.ref[Descriptor]
    offset: int
    nbytes: int

    @staticmethod
    def of(descriptor: Descriptor, offset: int, nbytes: int) -> Place:
        return Place(weakref.ref(descriptor), offset, whole_pages(nbytes))

    @property
    def seen(self) -> bool:
        """Whether something beside the weights may show the bytes: a tensor that ``state_dict`` has made, or a child."""
        if _forked or (found := self.descriptor()) is None:
            return True
        end = self.offset + self.nbytes
        return any(begin < end and self.offset < until for begin, until in list(found.shown.values()))

    def clear(self) -> None:
        """Give the bytes back to the system, where the file system can."""
        if (found := self.descriptor()) is not None:
            libc().fallocate(found.number, _KEEP_SIZE | _PUNCH_HOLE, self.offset, self.nbytes)
