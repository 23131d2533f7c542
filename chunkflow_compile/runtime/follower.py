"""The part of every rank but the first in reading together; see ``together.py``."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.links import Links
from chunkflow_compile.weights.mapping import Descriptor

from .drive_messages import AT, FREED, LEFT, OFFER, OVER, READY, TAKES, Message, Number, hang_up, listen, send
from .drive_runs import BroughtRun, OwnRun
from .ring_memory import Pin, RingMemory, inode

_log = logging.getLogger(__name__)

# Calls in which a rank asks in vain until it says so: ranks take up a course a few calls apart.
_IN_VAIN = 256


@dataclass(frozen=True)
class _Asked:
    """Where this rank was when it told of a call: its run, and the number of the first read of the cycle from then on."""

    call: Number
    run: OwnRun
    read: int


class Follower:
    """The part of every other rank."""

    def __init__(self, links: Links) -> None:
        self.seconds = links.seconds  # how long it waits for the first rank
        (self._link,) = links.sockets.values()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._asked: _Asked | None = None
        self._brought: BroughtRun | None = None
        self._run = 0  # of the first rank
        self._first = 0  # of its reads that this one takes
        self._memory: RingMemory | None = None
        self._pin: Pin | None = None
        self._in_vain = 0  # calls since the first rank has read for this one
        self._gone = False  # whether that one is heard no more
        listen(self, links)

    def reached(self, call: Number, run: OwnRun, taken: int, digest: bytes, pin: Pin) -> None:
        """A call begins, in a run of this rank's own, before which so many of its reads were taken."""
        with self._lock:
            if self._gone or self._brought is not None:  # it is about to take over
                return
            read = max(taken, len(run.order.first))
            self._asked, self._pin = _Asked(call, run, read), pin
            self._in_vain += 1
        if self._in_vain == _IN_VAIN:
            _log.warning(
                "this rank reads the drive for itself, because the first rank has another plan or other weights, or is in "
                "other calls: place the model with the same arguments and call it in the same way on all ranks"
            )
        self._send(Message(AT, place=run.order.place(read), call=call, digest=digest))

    def alone(self) -> None:
        """Wait for the first rank no more, nor take what it is about to offer."""
        with self._lock:
            self._asked = None
            if self._brought is not None:
                self._brought.end()

    def leave(self) -> None:
        """Begin anew: no copy out of the ring is in flight."""
        with self._lock:
            brought, self._brought, self._asked = self._brought, None, None
        if brought is not None:
            brought.stop()

    def close(self) -> None:
        """Read no more."""
        self.leave()
        self._memory = None

    def heard(self, rank: int, message: Message | None, descriptor: Descriptor | None) -> None:
        """What the first rank tells, None if it has ended."""
        with self._lock:
            brought = self._brought
            if self._gone:
                return
            if message is None:
                self._end()
            elif message.kind == OFFER:
                assert descriptor is not None
                self._take(message, descriptor)
            elif message.run != self._run or brought is None:
                return
            elif message.kind == READY and message.read >= self._first:
                brought.came(message.place, message.seconds, message.at)
            elif message.kind == OVER:
                brought.end()

    def failed(self, rank: int) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        """The first rank brings no more; what it has brought is still copied."""
        self._gone, self._asked = True, None
        if self._brought is not None:
            self._brought.end()

    def _take(self, offer: Message, descriptor: Descriptor) -> None:
        """Let the first rank read from some read on, if this one is still in the run in which it has asked."""
        asked, self._asked = self._asked, None
        if asked is None or asked.call != offer.call or self._pin is None:
            self._send(Message(LEFT, offer.run))
            return
        try:
            if self._memory is None or self._memory.file != inode(descriptor):
                self._memory = RingMemory.of(descriptor, self._pin)
        except ChunkflowError as error:
            _log.warning("this rank reads the drive for itself: %s", error)
            self._send(Message(LEFT, offer.run))
            return
        memory, ahead = self._memory, offer.place - asked.read  # how much further its numbers are

        def make(number: int) -> BroughtRun:
            first, run = number + ahead, offer.run
            self._run, self._first, self._in_vain = run, first, 0
            self._send(Message(TAKES, run, first))
            self._brought = BroughtRun(
                asked.run.order,
                number,
                memory,
                lambda copied: self._send(Message(FREED, run, first + copied)),
                lambda: self._left(run),
            )
            return self._brought

        asked.run.until(max(offer.read - ahead, len(asked.run.order.first)), make)

    def _left(self, run: int) -> None:
        with self._lock:
            if self._run == run:
                self._brought = None
        self._send(Message(LEFT, run))

    def _send(self, message: Message) -> None:
        with self._sending:
            if not send(self._link, message) and message.kind == LEFT:
                hang_up(self._link)  # it copies no more, and must not be waited for
