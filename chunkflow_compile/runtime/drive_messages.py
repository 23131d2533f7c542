"""Messages between the first rank, which reads the drive, and the others; ``together.py`` says what for."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from chunkflow_compile.weights.links import Links
from chunkflow_compile.weights.mapping import Descriptor

_log = logging.getLogger(__name__)

# The number of a call: of calls in which the ranks that read together met, and of the calls since then.
Number = tuple[int, int]

_KINDS = AT, FREED, LEFT, TAKES, OFFER, READY, OVER = range(7)
_WIRE = struct.Struct("!B5q2d16s")
_DESCRIPTOR = struct.Struct("i")


@dataclass(frozen=True)
class Message:
    """What one rank tells another.

    ``AT``: of a call, the place in the cycle of its first read, and the digest of the order.  ``OFFER``: of a run, the first
    read offered, and the first one of a call, by their numbers; with the file of the ring.  ``TAKES``: the first read that is
    taken.  ``FREED``: how many were copied.  ``READY``: a read, and where it begins in the ring; its seconds, and its end.
    """

    kind: int
    run: int = 0
    read: int = 0
    place: int = 0
    call: Number = (0, 0)
    seconds: float = 0.0
    at: float = 0.0
    digest: bytes = bytes(16)

    def packed(self) -> bytes:
        return _WIRE.pack(self.kind, self.run, self.read, self.place, *self.call, self.seconds, self.at, self.digest)

    @staticmethod
    def unpacked(data: bytes) -> Message:
        kind, run, read, place, first, second, seconds, at, digest = _WIRE.unpack(data)
        return Message(kind, run, read, place, (first, second), seconds, at, digest)


class Part(Protocol):
    """What a rank does in it."""

    def heard(self, rank: int, message: Message | None, descriptor: Descriptor | None) -> None:
        """What another rank tells, with a file if it hands one over; None if it has ended."""

    def failed(self, rank: int) -> None:
        """What it told could not be heard.  It may still copy out of the ring."""


def send(link: socket.socket, message: Message, descriptor: Descriptor | None = None) -> bool:
    """Tell a rank; return whether that was possible."""
    try:
        if descriptor is None:
            link.sendall(message.packed())
        else:
            socket.send_fds(link, [message.packed()], [descriptor.number])
    except BlockingIOError:
        _log.warning("another rank does not listen, and is told no more: it reads the drive for itself when it does")
        return False
    except OSError:
        return False
    return True


def hang_up(link: socket.socket) -> None:
    """Tell a rank no more: it goes on as if this one had ended, once it has heard what was told.  This one still hears it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)


def listen(part: Part, links: Links) -> None:
    """Let a thread for each link tell ``part`` what is heard there, as long as both last."""
    for rank, link in links.sockets.items():
        threading.Thread(
            target=_hear, args=(weakref.ref(part), rank, link), name="chunkflow-drive-links", daemon=True
        ).start()


def _hear(ref: weakref.ref[Part], rank: int, link: socket.socket) -> None:
    """Hand on what another rank tells, until it ends or this part does."""
    while True:
        message, descriptor = None, None
        with contextlib.suppress(OSError):
            # not socket.recv_fds, which drops the flags
            flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
            data, beside, _, _ = link.recvmsg(_WIRE.size, socket.CMSG_LEN(_DESCRIPTOR.size), flags)
            for _, _, found in beside:
                descriptor = Descriptor(*_DESCRIPTOR.unpack(found))
            message = Message.unpacked(data) if len(data) == _WIRE.size else None
        part = ref()
        if part is None:
            return
        try:
            part.heard(rank, message, descriptor)
        except Exception:  # noqa: BLE001  without a word of it, the other rank would wait
            _log.exception("the link to rank %s fails: this rank and that one read the drive for themselves", rank)
            part.failed(rank)
        del part
        if message is None:
            return
