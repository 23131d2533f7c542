"""Holes: what weights had of a file that lives on, given back once nobody can see it any more."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import cache, partial

from .mapping import Descriptor, libc, whole_pages

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate


class _Forks:
    """Whether this process has a child that may have its mappings, and may read them at any time."""

    def __init__(self) -> None:
        self.happened = False
        os.register_at_fork(after_in_parent=partial(self._note, True), after_in_child=partial(self._note, False))

    def _note(self, happened: bool) -> None:
        self.happened = happened


@cache
def _forks() -> _Forks:
    return _Forks()


def note_forks() -> None:
    """From now on forks count, because this process is about to map a file that ranks share."""
    _forks()


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
    def told(self) -> list[int]:
        """What other ranks know it by; nothing if its file is closed."""
        if (found := self.descriptor()) is None:
            return []
        status = os.fstat(found.number)
        return [status.st_dev, status.st_ino, self.offset]

    @property
    def seen(self) -> bool:
        """Whether something beside the weights may show the bytes: a tensor that ``state_dict`` has made, or a child."""
        if _forks().happened or (found := self.descriptor()) is None:
            return True
        end = self.offset + self.nbytes
        return any(begin < end and self.offset < until for begin, until in list(found.shown.values()))

    def clear(self) -> None:
        """Give the bytes back to the system, where the file system can."""
        if (found := self.descriptor()) is not None:
            libc().fallocate(found.number, _KEEP_SIZE | _PUNCH_HOLE, self.offset, self.nbytes)
