"""The shared ring: host memory into which the first rank of a machine reads the drive, for all of its ranks.

Counters and the places of reads lie before it, in the same file without a name.  Each word has one writer, and nobody is
waited for to agree: a rank that finds the first one at the place of its own order joins from a read on that has not begun,
and one that finds it elsewhere reads for itself.  A rank that joined holds up the reads that would overwrite what it copies.

Ranks read together only if collectives of their programs, in which all of them meet, keep them in step (``Executor``).  Then
no wait is new: the graph of the waits between ranks maps onto that of one rank, in which each read waits for copies of
earlier reads only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import BLOCK
from chunkflow_compile.units import size

from .host_memory import empty_pages
from .mapping import Descriptor, map_file, memory_file, prefer_huge_pages

# A call, by a number that is equal on all ranks: how many calls they have met in, and how many came after the last of them.
Number = tuple[int, int]
# Lets the device read host memory directly; returns a function to undo it.
Pin = Callable[[torch.Tensor], Callable[[], None]]

# Words of the first rank: its run (0 for none), the reads that have begun, those that have come, and the digest of the order.
_RUN, _BEGUN, _CAME, _DIGEST = 0, 1, 2, 3
# Then its newest calls: call, run, number of the first read that repeats from then on, and the sum of these.
_CALLS, _CALL, _KEPT = 8, 4, 64
# Then, for each other rank, the run that it has joined (0 for none), and the reads that it has copied.
_RANKS = _CALLS + _CALL * _KEPT
_COUNTERS = 8 * BLOCK
# Of each read: where it begins in the ring, when it came, and how long it took, in ns.
_PLACE = 3
# Two rings, as ranks may still copy out of one when the first rank begins anew.  The file has no bytes between them.
_APART = 1 << 40
# How long the first rank waits for others to leave the ring, before it takes the other.  Their copies take milliseconds.
_LEAVING_S = 0.2
_POLL_S = 0.0005
# The machine on which taking a lock orders all reads and writes before it before all after it.  On others, aarch64 say, a
# write before it may be seen after a read that follows it.
_ORDERED = "x86_64"


class RingMemory:
    """Host pages that reads go into, of this process or of all ranks; they stay pinned as long as this lasts.

    ``bytes``: the pages, uint8.
    """

    def __init__(self, pages: torch.Tensor, pin: Pin) -> None:
        self.bytes = pages
        with contextlib.suppress(OSError):  # copies from memory that is not pinned are slower, and as right
            weakref.finalize(self, _unpinned, pin(pages)).atexit = False

    @staticmethod
    def own(nbytes: int, pin: Pin) -> RingMemory:
        """For this process alone."""
        return RingMemory(empty_pages(torch.empty(nbytes, dtype=torch.uint8, device="meta")), pin)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpinned(undo: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the device has failed
        undo()


class Came(NamedTuple):
    """A read that has come: where it begins in the ring; its seconds; and when it ended, by the clock."""

    begin: int
    seconds: float
    at: float


class Offer(NamedTuple):
    """What another rank may join: a run of the first rank, which counts ``ahead`` reads more than that rank."""

    run: int
    ahead: int


class SharedRing:
    """One rank's view of it.  ``leads``: whether this rank reads.  ``seconds``: how long ranks wait for each other.

    Reads are counted by the first rank: those that repeat are at the place in their order that their number has by modulo.
    """

    def __init__(self, descriptor: Descriptor, rank: int, ranks: Sequence[int], seconds: float) -> None:
        """Raises ChunkflowError if it cannot be mapped."""
        self.leads = rank == ranks[0]
        self.ranks = tuple(ranks)
        self.seconds = seconds
        self.memory: RingMemory | None = None
        self._descriptor = descriptor
        self._words = _words(descriptor, _COUNTERS, 0)
        self._others = range(_RANKS, _RANKS + 2 * (len(ranks) - 1), 2)
        self._mine = _RANKS + 2 * (self.ranks.index(rank) - 1)
        self._table = self._words
        self._run = 0  # that this rank reads, or has joined; its last bit says in which of two rings
        self._which = 0, 0  # and its bytes
        self._claimed = False
        self._lock = threading.Lock()

    @staticmethod
    def works_here() -> bool:
        """Whether ranks see each other's words in the order that :meth:`_fence` gives them."""
        return platform.machine() == _ORDERED

    @staticmethod
    def made() -> Descriptor:
        """A file for one, which grows with the ring.  Raises ChunkflowError if there is no memory."""
        try:
            return memory_file("chunkflow-ring", _COUNTERS, grows=True)
        except OSError as error:
            raise ChunkflowError(f"A ring for all ranks cannot be made: {error.strerror or error}.") from error

    def claim(self) -> bool:
        """Whether the caller may use it until it calls :meth:`release`: nobody else of this process does."""
        free, self._claimed = not self._claimed, True
        return free

    def release(self) -> None:
        """This rank reads nothing into the ring any more, and copies nothing out of it."""
        self._words[_RUN if self.leads else self._mine] = 0
        self._claimed = False

    # The first rank.

    def begin(self, digest: bytes, number: int, nbytes: int, pin: Pin) -> RingMemory | None:
        """Begin a run in this order, from read ``number`` on; return a ring of ``nbytes`` out of which no rank copies.

        None if they copy out of both.
        Raises ChunkflowError if there is no memory.
        """
        self.end()
        deadline = time.monotonic() + _LEAVING_S
        while (held := {self._words[o] & 1 for o in self._others if self._words[o]}) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if len(held) == 2:
            return None
        same = (self._run & 1) not in held
        run = self._run + (2 if same else 1)
        memory = self._mapped(run & 1, nbytes, pin)
        self._words[_BEGUN] = self._words[_CAME] = number
        self._words[_DIGEST] = _word(digest)
        self._fence()
        self._words[_RUN] = self._run = run
        return memory

    def reached(self, call: Number, read: int) -> None:
        """A call begins, from which on ``read`` is the first read that repeats."""
        entry = [_code(call), self._words[_RUN], read]
        at = _CALLS + _CALL * (sum(call) % _KEPT)
        for i, word in enumerate((*entry, sum(entry))):
            self._words[at + i] = word

    def room(self, after: int) -> bool:
        """Whether all ranks that have joined have copied the reads before ``after``."""
        run = self._words[_RUN]
        return all(self._words[o] != run or self._words[o + 1] >= after for o in self._others)

    def begins(self, number: int) -> None:
        """A read is about to begin; a rank that joins from now on gets the reads after it."""
        self._words[_BEGUN] = number + 1
        self._fence()

    def came(self, number: int, begin: int, seconds: float, at: float) -> None:
        place = _PLACE * (number % (len(self._table) // _PLACE))
        for i, word in enumerate((begin, int(at * 1e9), int(seconds * 1e9))):
            self._table[place + i] = word
        self._fence()
        self._words[_CAME] = number + 1

    def end(self) -> None:
        """There are no more reads for the others."""
        self._words[_RUN] = 0

    # The other ranks.

    def offer(self, digest: bytes, call: Number, read: int, period: int) -> Offer | None:
        """What to join for a rank that at ``call`` was before ``read``, the first of ``period`` that repeat.

        None if the first rank was elsewhere then, or reads in another order.
        """
        run: int = self._words[_RUN]
        at = _CALLS + _CALL * (sum(call) % _KEPT)
        *entry, total = self._words[at : at + _CALL]
        known = sum(entry) == total and entry[:2] == [_code(call), run]
        if not run or not known or self._words[_DIGEST] != _word(digest) or (entry[2] - read) % period:
            return None
        return Offer(run, entry[2] - read)

    def join(self, run: int, least: int, nbytes: int, pin: Pin) -> int | None:
        """Take part in a run from a read on, ``least`` at least; return it.  None if that fails.

        Raises ChunkflowError if the ring cannot be mapped.
        """
        self._mapped(run & 1, nbytes, pin)
        first = max(least, int(self._words[_BEGUN]))
        self._words[self._mine + 1] = first
        self._words[self._mine] = run
        self._fence()
        # it may not have seen this before it began the read
        if self._words[_RUN] != run or self._words[_BEGUN] > first:
            self.leave()
            return None
        self._run = run
        return first

    def next(self, number: int) -> Came | None:
        """A read, if it has come.  Raises EOFError if there are no more reads for this rank."""
        has_come = self._words[_CAME] > number
        self._fence()
        at = _PLACE * (number % (len(self._table) // _PLACE))
        begin, ended, took = self._table[at : at + _PLACE]
        self._fence()
        if self._words[_RUN] != self._run:  # asked last: the words may be those of another run by now
            raise EOFError
        return Came(begin, took / 1e9, ended / 1e9) if has_come else None

    def freed(self, number: int) -> None:
        """This rank has copied all reads before this one."""
        self._words[self._mine + 1] = number

    def leave(self) -> None:
        """This rank copies nothing out of the ring any more."""
        self._words[self._mine] = 0

    def _mapped(self, which: int, nbytes: int, pin: Pin) -> RingMemory:
        """The ring ``which``, and the table of its reads, which is as long as it may have reads at once."""
        if self.memory is not None and (which, nbytes) == self._which:
            return self.memory
        table = -(-8 * _PLACE * (nbytes // BLOCK + 1) // BLOCK) * BLOCK
        self.memory = None  # freed before the new one is mapped
        begin = which * _APART + _COUNTERS
        end = begin + table + nbytes
        if self.leads and os.fstat(self._descriptor.number).st_size < end:
            try:
                # all of it, now: a write to a mapping that finds no room kills the process
                os.posix_fallocate(self._descriptor.number, begin, end - begin)
            except OSError as error:
                raise ChunkflowError(f"A ring of {size(nbytes)} cannot be made: {error.strerror or error}.") from error
        self._table = _words(self._descriptor, table, begin)
        pages = map_file(self._descriptor, nbytes, mmap.MAP_SHARED, begin + table)
        if pages is None:
            raise ChunkflowError(f"A ring of {size(nbytes)} cannot be mapped: {os.strerror(ctypes.get_errno())}.")
        prefer_huge_pages(pages)
        self.memory, self._which = RingMemory(pages, pin), (which, nbytes)
        return self.memory

    def _fence(self) -> None:
        """What was written before is seen before what is written or read after: a lock is a full barrier where
        :meth:`works_here`."""
        with self._lock:
            pass


def _words(descriptor: Descriptor, nbytes: int, offset: int) -> memoryview:
    """Words of 8 bytes, which are written and read whole."""
    try:
        return memoryview(mmap.mmap(descriptor.number, nbytes, offset=offset)).cast("q")
    except OSError as error:
        raise ChunkflowError(f"A ring for all ranks cannot be mapped: {error.strerror or error}.") from error


def _word(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "little")


def _code(call: Number) -> int:
    met, since = call
    return met << 24 | since & 0xFFFFFF
