"""The thread of a reader: reads in one order into a ring, or lets the first rank of the machine read for it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import Ring, ring_bytes
from chunkflow_compile.weights.shared_ring import Number, Offer, Pin, RingMemory, SharedRing
from chunkflow_compile.weights.source import DriveBytes

from .host_clock import HostClock

_log = logging.getLogger(__name__)

# An emulated drive makes up for a thread that wakes up late, by at most this.
_LATE_S = 0.005
# How often to look for what other ranks have done: a read takes milliseconds.
_POLL_S = 0.0005
# Calls of which a rank remembers where they began, to find the first rank in one of them: ranks that wait for each other in
# collectives are rarely further apart.
_REMEMBERED = 16


@dataclass(frozen=True)
class Order:
    """The reads from a start on: ``first``, then ``repeated`` from ``begin`` on, again and again.

    A read that repeats has a number that is its place in ``repeated`` by modulo, ``begin`` at the start; those of ``first``
    have the numbers before ``begin``.  ``plan``: what else must be equal on ranks that read together.
    """

    first: Sequence[DriveBytes]
    repeated: Sequence[DriveBytes]
    begin: int
    plan: str = ""

    @property
    def start(self) -> int:
        return self.begin - len(self.first)

    def at(self, number: int) -> DriveBytes:
        if number < self.begin:
            return self.first[number - self.begin]
        return self.repeated[number % len(self.repeated)]

    def digest(self) -> bytes:
        """Equal on two ranks only if they read the same bytes in the same order."""
        reads = [source.identity for source in self.repeated]
        return hashlib.sha256(repr((self.plan, reads)).encode()).digest()[:16]


@dataclass
class DriveMeter:
    """How a rank reads the drive, and what it has read.

    ``rate``: bytes/s of a drive to emulate, 0 for the machine's own.  ``beside``: whether to leave the page cache as it is.
    ``seconds``, ``nbytes``: of reading so far, by this rank or for it.  ``name``: the file read last.
    """

    clock: HostClock
    rate: float = 0.0
    beside: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    name: str = ""
    _late: float = 0.0

    def read(self, source: DriveBytes, memory: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """Read into memory of the ring; return the bytes there, the seconds, and when it ended."""
        now, values = self.clock.now, memory[: source.numel()]
        start = now()
        if self.beside:
            values = source.read_beside(memory)
        else:
            source.read(values)
        if self.rate:
            through = start - min(max(0.0, self._late), _LATE_S) + source.numel() / self.rate
            self.clock.sleep(max(0.0, through - now()))
            self._late = now() - through
        ended = now()
        self.count(source, ended - start)
        return values, ended - start, ended

    def count(self, source: DriveBytes, seconds: float) -> None:
        self.seconds += seconds
        self.nbytes += source.numel()
        self.name = source.file.name


@dataclass(frozen=True)
class _Ready:
    """A read that has come: its bytes, uint8, in a ring; when, by the clock; what to do when the copy of it has ended."""

    source: DriveBytes
    values: torch.Tensor
    at: float
    copied: Callable[[], None]


class _Filling:
    """A ring that is filled: the slots of reads, and how many of them have come and have been copied since ``first``."""

    def __init__(self, memory: RingMemory, nbytes: int, first: int) -> None:
        self.memory = memory
        self.slots = Ring(nbytes)
        self.first = first
        self.filled = self.emptied = 0

    def empty(self) -> None:
        """One more is copied."""
        self.emptied += 1


class ReadThread:
    """Reads in one order until it is stopped.  :meth:`on_call`, :meth:`acquire` and :meth:`release` are work of the copy
    stream, in its order.

    ``memory``: the ring of this rank alone, None if it has none now.  ``joined``: whether the first rank brings the reads.
    """

    def __init__(
        self,
        order: Order,
        pin: Pin,
        drive: DriveMeter,
        memory: RingMemory | None = None,
        shared: SharedRing | None = None,
    ) -> None:
        """``memory``: a ring to use if it is large enough.  ``shared``: the ring of all ranks that read together."""
        self.memory = memory
        self.joined = False
        self._order = order
        self._pin = pin
        self._drive = drive
        self._shared = shared
        self._digest = b"" if shared is None else order.digest()
        self._wanted = ring_bytes([source.numel() for source in order.repeated])  # as large as in the proof
        self._number = order.start  # of the next read to acquire
        self._calls: dict[Number, int] = {}  # the newest: their first read that repeats
        self._offer: Offer | None = None
        self._until: int | None = None  # from this read on, the first rank brings them
        self._ahead = 0
        self._theirs: RingMemory | None = None  # the ring that they are in
        self._ready: SimpleQueue[_Ready | ChunkflowError | None] = (
            SimpleQueue()
        )  # None: the first rank has the next one
        self._head: _Ready | ChunkflowError | None = None
        self._acquired: _Ready | None = None
        # the events of copies, and what to do then; None: to stop, or to read again
        self._copies: SimpleQueue[tuple[Any, Callable[[], None]] | None] = SimpleQueue()
        self._alone = self._stopped = False
        self._leads = False
        self._filling = self._led(order.start)
        self._thread = threading.Thread(target=self._run, name="chunkflow-read-ahead", daemon=True)
        self._thread.start()

    def on_call(self, call: Number) -> None:
        """A call begins.  Here ranks may begin to read together."""
        shared, read = self._shared, max(self._number, self._order.begin)
        if shared is None or self.joined or self._alone:
            return
        if self._leads:
            shared.reached(call, read)
        elif not shared.leads:
            self._calls = dict(list(self._calls.items())[1 - _REMEMBERED :]) | {call: read}
            period = len(self._order.repeated)
            offers = (shared.offer(self._digest, c, r, period) for c, r in self._calls.items())
            self._offer = next((offer for offer in offers if offer is not None), None)

    def acquire(self, source: DriveBytes) -> tuple[torch.Tensor, float] | None:
        """Wait for the bytes of a read; return them, and when they came.  None if it is not the next one in the order.

        Raises ChunkflowError if the drive fails.
        """
        while self._head is None:
            if not self.joined:
                self._head = self._ready.get()
                self.joined = self._head is None
            elif (brought := self._brought()) is not None:
                self._head = brought
            else:
                self.joined = False
                self._copies.put(None)
        if isinstance(self._head, ChunkflowError):
            raise self._head
        if self._head.source != source:
            return None
        self._acquired, self._head = self._head, None
        self._number += 1
        return self._acquired.values, self._acquired.at

    def release(self, event: Any) -> None:
        """Give the room of what was acquired back, once ``event`` has come to pass; None for at once."""
        if self._acquired is not None:
            self._copies.put((event, self._acquired.copied))
            self._acquired = None

    def alone(self) -> None:
        """Wait for no other rank any more."""
        self._alone = True

    def stop(self) -> None:
        """End the reading.  Waits for the copies out of the ring that are in flight."""
        self._stopped = True
        self._copies.put(None)
        if threading.current_thread() is not self._thread:  # the collector may run a finalizer anywhere
            self._thread.join()
        with contextlib.suppress(RuntimeError):  # the device has failed
            while not self._copies.empty():
                self._wait_for_copy()
        self._filling = self._theirs = None
        if self._shared is not None:
            self._shared.release()

    def _led(self, number: int) -> _Filling | None:
        """The ring to fill for all ranks; None if this is not the first one, or if there is no ring for it."""
        if self._shared is None or not self._shared.leads:
            return None
        try:
            memory = self._shared.begin(self._digest, number, self._wanted, self._pin)
        except ChunkflowError as error:
            _log.warning("each rank reads the drive for itself: %s", error)
            return None
        if memory is None:
            return None
        self._leads, self.memory = True, None
        return _Filling(memory, self._wanted, number)

    def _own(self, number: int) -> _Filling:
        """A ring to fill for this rank alone."""
        if self.memory is None or self.memory.bytes.numel() < self._wanted:
            self.memory = None  # freed before the new one is allocated
            self.memory = RingMemory.own(self._wanted, self._pin)
        return _Filling(self.memory, self._wanted, number)

    def _brought(self) -> _Ready | None:
        """The next read as the first rank brings it, None if it is not going to."""
        shared, ring, now = self._shared, self._theirs, self._drive.clock.now
        assert shared is not None and ring is not None
        since, number = now(), self._number + self._ahead
        while not self._alone:
            try:
                came = shared.next(number)
            except EOFError:
                break
            if came is not None:
                source = self._order.at(self._number)
                self._drive.count(source, came.seconds)
                values = ring.bytes[came.begin : came.begin + source.numel()]
                return _Ready(source, values, came.at, partial(shared.freed, number + 1))
            if now() - since > shared.seconds:
                _log.warning("the first rank has read nothing from the drive for too long: this one reads alone now")
                self._alone = True
            time.sleep(_POLL_S)
        return None

    # What follows is run by the thread.

    def _run(self) -> None:
        try:
            self._read()
        except ChunkflowError as error:
            self._ready.put(error.with_traceback(None))
        except RuntimeError as error:  # from an event
            self._ready.put(ChunkflowError(f"The GPU failed: {error}"))
        except Exception as error:  # noqa: BLE001  without a word of it, the copies would wait for ever
            self._ready.put(ChunkflowError(f"Reading ahead of the copies failed: {type(error).__name__}: {error}"))

    def _read(self) -> None:
        number = self._order.start
        while not self._stopped:
            if self._until is None and self._offer is not None:
                self._join(number, self._offer)
            if number == self._until:
                number = self._let_read()
            elif self._read_one(number):
                number += 1

    def _read_one(self, number: int) -> bool:
        """Read what comes next; False if the thread is to stop."""
        source, shared = self._order.at(number), self._shared if self._leads else None
        if shared is not None:
            shared.begins(number)
        if (slot := self._room(number, source.numel())) is None or self._filling is None:
            return False
        values, seconds, ended = self._drive.read(source, slot)
        self._filling.filled += 1
        self._ready.put(_Ready(source, values, ended, self._filling.empty))
        if shared is not None and self._leads:
            shared.came(number, values.data_ptr() - self._filling.memory.bytes.data_ptr(), seconds, ended)
        return True

    def _room(self, number: int, nbytes: int) -> torch.Tensor | None:
        """The bytes of the ring for the next read, None when the thread is to stop.

        Waits until the copies that use them have ended, on all ranks.
        """
        filling = self._filling = self._filling or self._own(number)
        slot = filling.slots.slot(nbytes)
        while not self._stopped:
            if filling.emptied < slot.after:
                self._wait_for_copy()
            elif not self._others_have_copied(filling.first + slot.after):
                filling = self._filling = self._own(number)  # they may still copy out of the one before
                slot = filling.slots.slot(nbytes)
            elif not self._stopped:
                return filling.memory.bytes[slot.begin : slot.end]
        return None

    def _others_have_copied(self, after: int) -> bool:
        """Wait until the ranks that have joined have copied the reads before ``after``; False if they are left alone."""
        shared, now = self._shared, self._drive.clock.now
        if shared is None or not self._leads:
            return True
        since = now()  # not sooner: before that, the model may not have been called
        while not (self._stopped or shared.room(after)):
            if now() - since > shared.seconds:
                _log.warning("another rank has copied nothing from the drive for too long: each one reads alone now")
                self._alone = True
            if self._alone:
                shared.end()
                self._leads = False
                return False
            time.sleep(_POLL_S)
        return True

    def _wait_for_copy(self) -> bool:
        """Wait for the next copy to end; False if there is something else to do."""
        if (found := self._copies.get()) is None:
            return False
        event, copied = found
        if event is not None:
            event.synchronize()
        copied()
        return True

    def _join(self, number: int, offer: Offer) -> None:
        """Take what the first rank reads, from a read on."""
        assert self._shared is not None
        self._offer = None
        try:
            least = max(number, self._order.begin) + offer.ahead
            first = self._shared.join(offer.run, least, self._wanted, self._pin)
        except ChunkflowError as error:
            _log.warning("this rank reads the drive for itself: %s", error)
            self._alone = True
            return
        if first is not None:
            self._theirs = self._shared.memory
            self._ahead, self._until = offer.ahead, first - offer.ahead

    def _let_read(self) -> int:
        """Let the first rank read until it has no more; return the number of the first read that this rank has again."""
        assert self._shared is not None
        self._ready.put(None)
        while self._wait_for_copy():
            if self._filling is not None and self._filling.emptied == self._filling.filled:
                self._filling = self.memory = None  # the ring goes with the last copy out of it
        self._shared.leave()
        self._until = self._offer = None
        return self._number
