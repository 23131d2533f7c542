"""Links: the sockets between the ranks that share weights on the drive, kept while the weights are placed.

Over them the ranks read the drive together (``runtime/together.py``): the first rank reads, for all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

# For sockets without a timeout.
_SECONDS = 600.0
# How long a message may wait for room in a socket: a thread that does nothing else takes them out.
_TELLING_S = 10


class Links:
    """The other ranks that this one reads the drive with: the first rank has a socket to each, and each one to the first.

    ``ranks``: all of them, this one too.  ``seconds``: how long one waits for another, as a collective does.
    ``together``: what reads over them; made by the first reader that needs it.
    """

    def __init__(self, rank: int, ranks: Sequence[int], sockets: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.sockets = dict(sockets)
        self.seconds = min((s for link in sockets.values() if (s := link.gettimeout())), default=_SECONDS)
        self.together: Any = None
        self._reader: weakref.ref[Any] | None = None
        for link in self.sockets.values():
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _TELLING_S, 0))
        self._end = weakref.finalize(self, _shut, tuple(self.sockets.values()))
        # a child has no threads that answer, and a link that it held open would hide that this process has ended
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def claim(self, reader: Any) -> bool:
        """Whether ``reader`` is the one that reads over them: the first that asks, while it lasts."""
        if self._reader is None or self._reader() is None:
            self._reader = weakref.ref(reader)
        return self._reader() is reader

    def release(self, reader: Any) -> None:
        """The reader has ended: another one may read over them."""
        if self._reader is not None and self._reader() is reader:
            self._reader = None

    def close(self) -> None:
        """The other ranks go on alone."""
        self._end()


def _shut(links: Collection[socket.socket]) -> None:
    for link in links:
        with contextlib.suppress(OSError):  # the other rank has ended
            link.shutdown(socket.SHUT_RDWR)  # a thread may wait for it
        link.close()


def _leave(ref: weakref.ref[Links]) -> None:
    """Close this process's ends only."""
    if (links := ref()) is not None:
        links._end.detach()
        for link in links.sockets.values():
            link.close()
