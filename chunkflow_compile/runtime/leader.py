"""The first rank's part in reading together: it reads, for all; see ``together.py``."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from chunkflow_compile.weights.links import Links
from chunkflow_compile.weights.mapping import Descriptor

from .drive_messages import AT, FREED, LEFT, OFFER, OVER, READY, TAKES, Message, Number, hang_up, listen, send
from .drive_runs import Order
from .ring_memory import Pin, RingMemory

_log = logging.getLogger(__name__)

# Calls of which the first rank remembers where they began: ranks that wait for each other in collectives are rarely further
# apart.
_REMEMBERED = 64
# How long a new run waits for other ranks to leave the ring, before it takes another one.  Their copies take milliseconds.
_LEAVING_S = 1.0


@dataclass
class _Other:
    """A rank that is read for.  ``run``: the run that it takes part in, 0 for none; from read ``first`` on, of which it has
    copied all before ``freed``.  ``at``: where it is, while it reads alone.  ``gone``: whether it is told no more; if it has
    not ended, it still copies what it was told of."""

    link: socket.socket
    run: int = 0
    first: int = 0
    freed: int = 0
    at: Message | None = None
    gone: bool = False


@dataclass(frozen=True)
class _Place:
    """Where a call began: its run, and the number of the first read of the cycle from then on."""

    run: int
    read: int
    place: int


class Leader:
    """The first rank's part.  Fulfils :class:`~.drive_runs.Others`."""

    def __init__(self, links: Links) -> None:
        self.seconds = links.seconds
        self._others = {rank: _Other(link) for rank, link in links.sockets.items()}
        self._changed = threading.Condition()
        self._runs = itertools.count(1)
        self._run = 0  # 0 for none
        self._digest = b""
        self._least = 0  # the first read of the cycle
        self._next = 0
        self._memory: RingMemory | None = None
        self._wake: Callable[[], None] | None = None
        self._places: OrderedDict[Number, _Place] = OrderedDict()
        listen(self, links)

    def begin(self, order: Order, digest: bytes, nbytes: int, pin: Pin) -> RingMemory:
        """Begin a run; return its ring, of ``nbytes`` at least, out of which no rank copies."""
        self.end()
        with self._changed:
            left = self._changed.wait_for(self._all_left, _LEAVING_S)
            if self._memory is None or not left or self._memory.bytes.numel() < nbytes:
                self._memory = None  # freed before the new one is allocated
                self._memory = RingMemory.shared(nbytes, pin)
            for other in self._others.values():
                other.run = 0
            self._run, self._digest, self._least, self._next = next(self._runs), digest, len(order.first), 0
            return self._memory

    def reached(self, call: Number, order: Order, taken: int) -> None:
        """A call begins, before which so many reads of the run were taken."""
        with self._changed:
            read = max(taken, self._least)
            self._places[call] = _Place(self._run, read, order.place(read))
            if len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)
            for rank, other in self._others.items():
                self._offer(rank, other)

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def room(self, after: int) -> bool:
        with self._changed:
            return all(other.freed >= after for other in self._others.values() if other.run and other.run == self._run)

    def begins(self, number: int) -> None:
        with self._changed:
            self._next = number + 1

    def came(self, number: int, begin: int, seconds: float, at: float) -> None:
        with self._changed:
            told = Message(READY, self._run, number, begin, seconds=seconds, at=at)
            theirs = [o for o in self._others.values() if o.run == self._run and number >= o.first and not o.gone]
        for other in theirs:  # not under the lock: what they tell must be heard even if they do not listen
            self._tell(other, told)

    def end(self) -> None:
        with self._changed:
            for other in self._others.values():
                if self._run and other.run == self._run:
                    self._tell(other, Message(OVER, self._run))
            self._run, self._wake = 0, None

    def close(self) -> None:
        """Read no more."""
        self.end()
        self._memory = None

    def heard(self, rank: int, message: Message | None, descriptor: Descriptor | None) -> None:
        """What another rank tells, None if it has ended."""
        with self._changed:
            other = self._others[rank]
            if message is None:
                other.gone, other.run, other.at = True, 0, None
            elif message.kind == AT:
                other.at = message
                self._offer(rank, other)
            elif message.run == other.run and message.kind == TAKES:
                other.first = other.freed = message.read
            elif message.run == other.run and message.kind == FREED:
                other.freed = message.read
            elif message.run == other.run and message.kind == LEFT:
                other.run = 0
            self._changed.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def failed(self, rank: int) -> None:
        with self._changed:
            self._others[rank].gone = True
        hang_up(self._others[rank].link)

    def _all_left(self) -> bool:
        return all(other.run == 0 for other in self._others.values())

    def _offer(self, rank: int, other: _Other) -> None:
        """Offer what is read next to a rank that is where this one is, in the same call of the same plan."""
        at, memory = other.at, self._memory
        here = None if at is None else self._places.get(at.call)
        if at is None or here is None or memory is None or other.run or other.gone:
            return
        if not self._run or here.run != self._run or at.digest != self._digest or at.place != here.place:
            return
        first = max(self._next, self._least)
        other.at, other.run, other.first, other.freed = None, self._run, first, first
        told = Message(OFFER, self._run, first, here.read, at.call)
        if not self._tell(other, told, memory.descriptor):
            other.run = 0  # it knows of none
            return
        _log.info("rank %s gets from the drive what this rank reads", rank)

    def _tell(self, other: _Other, message: Message, descriptor: Descriptor | None = None) -> bool:
        """Tell a rank, and no more if that fails: without one message, it would take those after it for others."""
        if not (told := send(other.link, message, descriptor)):
            other.gone = True
            hang_up(other.link)
        return told
