"""Runs: where the bytes of a reader come from until it begins anew: its own thread, or the first rank of the machine."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import Ring
from chunkflow_compile.weights.ring_memory import RingMemory
from chunkflow_compile.weights.shared_ring import Came, SharedRing
from chunkflow_compile.weights.source import DriveBytes

from .host_clock import MONOTONIC, HostClock

_log = logging.getLogger(__name__)

# A weight, and the chunks of it that one copy moves.
Key = tuple[str, int, int]
Item = tuple[Key, DriveBytes]

# An emulated drive makes up for a thread that wakes up late, by at most this.
_LATE_S = 0.005


@dataclass(frozen=True)
class Order:
    """The reads from a start on, by number: ``first``, then ``repeated`` from ``begin`` on, again and again."""

    first: Sequence[Item]
    repeated: Sequence[Item]
    begin: int

    def at(self, number: int) -> Item:
        if number < len(self.first):
            return self.first[number]
        return self.repeated[self.place(number)]

    def place(self, number: int) -> int:
        """The place of a read after the first ones among those that repeat."""
        return (self.begin + number - len(self.first)) % len(self.repeated)

    def begins_at(self, number: int) -> tuple[int, int]:
        """The first read that repeats from a number on, and its place among those."""
        read = max(number, len(self.first))
        return read, self.place(read)

    def digest(self, plan: object) -> bytes:
        """Equal on two ranks only if they read the same bytes in the same order.  ``plan``: what else must be equal."""
        reads = [(key, source.identity) for key, source in self.repeated]
        return hashlib.sha256(repr((plan, reads)).encode()).digest()[:16]


@dataclass(frozen=True)
class Ready:
    """The bytes of a read, uint8, in the ring, and when they came, by the clock."""

    key: Key
    values: torch.Tensor
    at: float


@dataclass(frozen=True)
class Over:
    """A run has no more reads.  ``then``: the run that has them, None for a new one."""

    then: Run | None = None


class Run:
    """Reads that become ready, in order, from the thread of the run to that of the copies.

    ``freed``: where the room of each goes back, as an event, or None at once.  ``seconds``, ``nbytes``: of reading so far.
    ``name``: the file read last.
    """

    def __init__(self, order: Order, number: int) -> None:
        """``number``: the first read."""
        self.order = order
        self.ready: SimpleQueue[Ready | Over | ChunkflowError] = SimpleQueue()
        self.freed: SimpleQueue[Any] = SimpleQueue()
        self.seconds = 0.0
        self.nbytes = 0
        self.name = ""
        self._number = number
        self._head: Ready | Over | ChunkflowError | None = None

    def head(self) -> Ready | Over | ChunkflowError:
        """What comes next; waits for it."""
        if self._head is None:
            self._head = self.ready.get()
        return self._head

    def pop(self) -> None:
        """The head is taken."""
        self._head = None

    def alone(self) -> None:
        """Wait for no other rank any more."""

    def stop(self) -> None:
        """End the run.  No copy needs its bytes any more."""
        raise NotImplementedError


class _Token:
    """In ``freed``, in the place of an event."""


_ALONE, _STOP, _OVER, _LATER = _Token(), _Token(), _Token(), _Token()
# How often to look for what other ranks have done: a read takes milliseconds.
_POLL_S = 0.0005


class OwnRun(Run):
    """A thread of this rank reads, for others too if there are any."""

    def __init__(
        self,
        order: Order,
        number: int,
        memory: RingMemory,
        wanted: int,
        spare: Callable[[], RingMemory],
        *,
        rate: float = 0.0,
        beside: bool = False,
        others: SharedRing | None = None,
        clock: HostClock = MONOTONIC,
    ) -> None:
        """``wanted``: bytes of the ring, those of the proof.  ``spare``: makes another ring.  ``rate``: bytes/s of a drive to
        emulate, 0 for the machine's own.  ``beside``: whether to leave the page cache as it is.  ``others``: the ring, if
        other ranks copy out of it too."""
        super().__init__(order, number)
        self._memory: RingMemory | None = memory
        self._wanted = wanted
        self._spare = spare
        self._rate = rate
        self._beside = beside
        self._others = others
        self._clock = clock
        self._slots = Ring(wanted)
        self._copied = 0  # of the reads in these slots
        self._issued = 0  # reads so far
        self._lock = threading.Lock()
        self._until: int | None = None
        self._then: Run | None = None
        self._left: RingMemory | None = None  # copies out of it may be in flight
        self._over = False
        self._thread = threading.Thread(target=self._run, name="chunkflow-read-ahead", daemon=True)
        self._thread.start()

    def hand_over(self, take: Callable[[int], tuple[int, Run] | None]) -> bool:
        """Let another run go on: ``take`` gets the number of the next read, and returns that which it begins with, and the
        run; None if there is none."""
        with self._lock:
            found = take(self._number) if self._until is None else None
            if found is not None:
                self._until, self._then = found
        return found is not None

    def alone(self) -> None:
        self.freed.put(_ALONE)

    def stop(self) -> None:
        self._over = True
        self.freed.put(_STOP)
        self._thread.join()
        if self._others is not None:
            self._others.end()
        if self._then is not None:  # it has not begun
            self._then.stop()

    def _run(self) -> None:
        try:
            self._read()
        except ChunkflowError as error:
            self.ready.put(error.with_traceback(None))
        except RuntimeError as error:  # from an event
            self.ready.put(ChunkflowError(f"The GPU failed: {error}"))
        except Exception as error:  # noqa: BLE001  without a word of it, the copies would wait for ever
            self.ready.put(ChunkflowError(f"Reading ahead of the copies failed: {type(error).__name__}: {error}"))

    def _read(self) -> None:
        now = self._clock.now
        through = ended = now()
        while (number := self._next()) is not None:
            key, source = self.order.at(number)
            if self._others is not None:
                self._others.begins(number)
            slot = self._room(source.numel())
            if slot is None or self._over:
                return
            start = now()
            values = slot[: source.numel()]
            if self._beside:
                values = source.read_beside(slot)
            else:
                source.read(values)
            if self._rate:
                through = start - min(max(0.0, ended - through), _LATE_S) + source.numel() / self._rate
                self._clock.sleep(max(0.0, through - now()))
            ended = now()
            self.seconds += ended - start
            self.nbytes += source.numel()
            self.name = source.file.name
            self._issued += 1
            self.ready.put(Ready(key, values, ended))
            if self._others is not None and self._memory is not None:
                begin = values.data_ptr() - self._memory.bytes.data_ptr()
                self._others.came(number, begin, ended - start, ended)
        self.ready.put(Over(self._then))
        while self._copied < self._issued and self._one_copied() is not _STOP:
            pass  # the ring goes with the last copy out of it
        self._memory = None

    def _next(self) -> int | None:
        """The number of the next read, None if another run has it."""
        with self._lock:
            if self._number == self._until:
                return None
            self._number += 1
            return self._number - 1

    def _room(self, nbytes: int) -> torch.Tensor | None:
        """The bytes of the ring for the next read, None when it is over.

        Waits until the copies that use them have ended, on all ranks.
        """
        slot = self._slots.slot(nbytes)
        since: float | None = None  # since this rank waits for others only: before that, the model may not be called
        while self._copied < slot.after or not (self._others is None or self._others.room(slot.after)):
            token = self._one_copied(waits=self._copied < slot.after)
            if token is _STOP:
                return None
            since = self._clock.now() if since is None or token is not _LATER else since
            if self._others is not None and token is _LATER and self._clock.now() - since > self._others.seconds:
                _log.warning("another rank has copied nothing from the drive for too long: each one reads alone now")
                token = _ALONE
            if token is _ALONE and self._others is not None:
                self._others.end()  # they may still copy out of this ring: go on in another one
                self._left, self._memory, self._slots = self._memory, self._spare(), Ring(self._wanted)
                self._others = None
                self._copied -= self._issued
                self._issued = 0
                slot = self._slots.slot(nbytes)
        assert self._memory is not None
        return self._memory.bytes[slot.begin : slot.end]

    def _one_copied(self, waits: bool = True) -> Any:
        """A copy has ended, or something else has happened.  ``waits``: until then; else a moment, for other ranks."""
        try:
            token = self.freed.get(timeout=None if waits else _POLL_S)
        except Empty:
            return _LATER
        if isinstance(token, _Token):
            return token
        if token is not None:
            token.synchronize()
        self._copied += 1
        return token


class BroughtRun(Run):
    """The first rank reads, into a ring that this one maps too."""

    def __init__(self, order: Order, number: int, ring: SharedRing, ahead: int, clock: HostClock) -> None:
        """``ahead``: how many reads more the first rank counts."""
        super().__init__(order, number)
        assert ring.memory is not None
        self._memory = ring.memory
        self._ring = ring
        self._ahead = ahead
        self._clock = clock
        self._alone = self._over = False
        self._popped = 0
        self._copied = number + ahead
        self._thread = threading.Thread(target=self._give_back, name="chunkflow-read-ahead", daemon=True)
        self._thread.start()

    def head(self) -> Ready | Over | ChunkflowError:
        since = self._clock.now()
        while self._head is None:
            if (came := self._came()) is not None:
                key, source = self.order.at(self._number)
                self._number += 1
                self.seconds += came.seconds
                self.nbytes += source.numel()
                self.name = source.file.name
                self._head = Ready(key, self._memory.bytes[came.begin : came.begin + source.numel()], came.at)
            elif self._alone:
                self._head = Over()
            elif self._clock.now() - since > self._ring.seconds:
                _log.warning("the first rank has read nothing from the drive for too long: this one reads alone now")
                self._head = Over()
            else:
                time.sleep(_POLL_S)
        return self._head

    @property
    def ended(self) -> bool:
        """Whether the next read is not going to come."""
        return self._head is None and self._came() is None and self._alone

    def _came(self) -> Came | None:
        try:
            return self._ring.next(self._number + self._ahead)
        except EOFError:
            self._alone = True
            return None

    def pop(self) -> None:
        super().pop()
        self._popped += 1

    def alone(self) -> None:
        self._alone = True

    def over(self) -> None:
        """No more of its reads are taken.  The ring is left with the last copy out of it."""
        self.freed.put(_OVER)

    def stop(self) -> None:
        self.freed.put(_STOP)
        self._thread.join()

    def _give_back(self) -> None:
        copied, over = 0, False
        while not (over and copied == self._popped) and (token := self.freed.get()) is not _STOP:
            if token is _OVER:
                over = True
                continue
            if token is not None:
                try:
                    token.synchronize()
                except RuntimeError:  # the device has failed, as the copies say
                    break
            copied += 1
            self._ring.freed(self._copied + copied)
        self._ring.leave()
