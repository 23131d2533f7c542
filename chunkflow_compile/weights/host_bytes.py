"""The host memory of one offloaded weight, which all views of the weight have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sharing import SharedWeight
    from .undeclared import Arrival


class HostBytes:
    """The host memory of one storage.

    ``version`` counts the writes through weights; those to the memory itself are in its tensor's ``_version``.
    ``order``: of the store that it belongs to; an op that writes several weights enters ``writing`` in this order.
    ``writing``: entered around each write; it waits for the steps and copies that read the memory.  ``leaving``: the same
    for a weight that gets other memory.  ``read``: called with
    the bytes of each fetch.  ``shared``: its place, if other ranks have the memory too; ``writing`` ends that.
    ``scratch``: whether the memory is a mapping of a scratch file.  ``home``: returns the home of the weight, or None.
    ``arriving``: what collectives may still write to it and to the others of its store, oldest first.
    """

    def __init__(self) -> None:
        self.version = 0
        self.order = 0
        self.writing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.leaving: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.read: Callable[[int], None] = _ignore
        self.shared: SharedWeight | None = None
        self.scratch = False
        self.home: Callable[[], Any] = _nowhere
        self.arriving: list[Arrival] = []

    def check(self) -> None:
        """Raise ChunkflowError if the memory is a mapping of a file that has changed: to touch it could kill the process."""
        if (home := self.home()) is not None:
            home.check()


def _ignore(nbytes: int) -> None:
    """Count nothing: the memory belongs to no store."""


def _nowhere() -> None:
    """The home of memory that belongs to no store."""
