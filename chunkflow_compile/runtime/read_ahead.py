"""Reading ahead: the bytes of weights on the drive, in the order of their copies, round and round.

The plan fixes that order.  So a thread reads what the next copies need into a ring of host memory ahead of them, across the
ends of calls.  A cold start or a jump gives another order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from queue import SimpleQueue
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import Ring, ring_bytes
from chunkflow_compile.weights.host_memory import empty_pages
from chunkflow_compile.weights.limits import host_memory, local_ranks
from chunkflow_compile.weights.locks import when_collected
from chunkflow_compile.weights.source import DriveBytes

from .host_clock import MONOTONIC, HostClock

_log = logging.getLogger(__name__)

# Lets the device read host memory directly; returns a function to undo it.
Pin = Callable[[torch.Tensor], Callable[[], None]]

# A read that has ended: its bytes, uint8, in the ring; and when, by the clock.
_Ready = tuple[DriveBytes, torch.Tensor, float]

# A drive is reported if it reads at less than this share of the rate that the plan expects, over at least this time.
_SLOW = 1 / 3
_SURE_S = 1.0
# An emulated drive makes up for a thread that wakes up late, by at most this.
_LATE_S = 0.005
# In the queue of the copies: the thread is to look whether it is to stop.
_LOOK = object()


@dataclass(frozen=True)
class ReadOrder:
    """The reads from a start on: ``first``, then ``repeated`` from ``begin`` on, again and again."""

    first: Sequence[DriveBytes]
    repeated: Sequence[DriveBytes]
    begin: int

    def reads(self) -> Iterator[DriveBytes]:
        return chain(self.first, islice(cycle(self.repeated), self.begin, None))


@dataclass(frozen=True)
class Reading:
    """The bytes of a copy that the drive is to bring.  They are in the ring from :meth:`acquire` to :meth:`release`."""

    reader: ReadAhead
    source: DriveBytes

    def numel(self) -> int:
        return self.source.numel()

    def acquire(self) -> tuple[torch.Tensor, float]:
        """Wait for the bytes; return them, uint8, and when their read ended, by the clock.

        Raises ChunkflowError if the drive fails.
        """
        return self.reader.acquire(self.source)

    def release(self, event: Any = None) -> None:
        """Give the ring the room back, once ``event`` has come to pass."""
        self.reader.release(event)


class ReadAhead:
    """The reader of an arena.  Its methods but :meth:`settle` are work of the copy stream, in its order, or wait for it."""

    def __init__(self, pin: Pin, rate: float = 0.0, clock: HostClock = MONOTONIC) -> None:
        """``pin``: pins host memory for the device.  ``rate``: bytes/s of a drive to emulate; 0 for the machine's own."""
        self._pin = pin
        self._drive = _Drive(clock, rate)
        self._ring: _RingMemory | None = None  # between two threads
        self._thread: _Thread | None = None
        self._dropped: weakref.finalize[..., Any] | None = None
        self._expected: float | None = None
        self._settled = (0.0, 0)  # seconds and bytes that :meth:`settle` has returned
        self._warned = False

    def reset(self, order: ReadOrder, expected: float | None = None) -> None:
        """Read in this order.  ``expected``: the rate, bytes/s.  Waits for the copies out of the ring that are in flight."""
        self.stop()
        self._expected = expected
        # where memory is short, the page cache would drop what it has before it is read again; ranks of one machine may
        # still find there what another has just read
        short = host_memory().free < sum(source.numel() for source in order.repeated)
        self._drive.past_cache = short and local_ranks() < 2
        self._thread = _Thread(order, self._pin, self._drive, self._ring)
        self._ring = None
        self._dropped = when_collected(self, self._thread.stop)  # for a model that is dropped without restore

    def acquire(self, source: DriveBytes) -> tuple[torch.Tensor, float]:
        """See :meth:`Reading.acquire`.  What is out of order is read now."""
        read = None if self._thread is None else self._thread.acquire(source)
        return read or (source.read_all(), self._drive.clock.now())

    def release(self, event: Any) -> None:
        if self._thread is not None:
            self._thread.release(event)

    def settle(self) -> tuple[float, int]:
        """Seconds and bytes of reading since the last call; says once if the drive is far slower than expected."""
        seconds, nbytes = self._drive.seconds, self._drive.nbytes
        slow = self._expected is not None and seconds >= _SURE_S and nbytes < _SLOW * self._expected * seconds
        if slow and not self._warned:
            self._warned = True
            _log.warning(
                "%s is read at %.3g MB/s, but the plan expects %.3g MB/s, so steps take longer than predicted. Measure "
                "the drive with chunkflow calibrate --drive PATH, or keep more in memory: host_memory.",
                self._drive.name,
                nbytes / seconds / 1e6,
                (self._expected or 0.0) / 1e6,
            )
        before, self._settled = self._settled, (seconds, nbytes)
        return seconds - before[0], nbytes - before[1]

    def stop(self) -> None:
        """End the reading.  Waits for the copies out of the ring that are in flight."""
        if self._thread is not None and self._dropped is not None:
            self._dropped.detach()
            self._thread.stop()
            self._ring, self._thread = self._thread.ring, None

    def close(self) -> None:
        """Stop, and give the ring back."""
        self.stop()
        self._ring = None


@dataclass
class _Drive:
    """How the drive is read, and what was read.

    ``rate``: bytes/s of a drive to emulate, 0 for the machine's own.  ``past_cache``: whether to leave the page cache.
    ``seconds``, ``nbytes``: of reading so far.  ``name``: the file read last.
    """

    clock: HostClock
    rate: float = 0.0
    past_cache: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    name: str = ""
    _late: float = 0.0

    def read(self, source: DriveBytes, memory: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Read into memory of the ring; return the bytes there, and when it ended."""
        now, values = self.clock.now, memory[: source.numel()]
        start = now()
        if self.past_cache:
            values = source.read_direct(memory)
        else:
            source.read(values)
        if self.rate:
            through = start - min(max(0.0, self._late), _LATE_S) + source.numel() / self.rate
            self.clock.sleep(max(0.0, through - now()))
            self._late = now() - through
        ended = now()
        self.seconds += ended - start
        self.nbytes += source.numel()
        self.name = source.file.name
        return values, ended


class _RingMemory:
    """Host pages that reads go into; they stay pinned as long as this lasts.  ``bytes``: the pages, uint8."""

    def __init__(self, nbytes: int, pin: Pin) -> None:
        self.bytes = empty_pages(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        with contextlib.suppress(OSError):  # copies from memory that is not pinned are slower, and as right
            when_collected(self, _unpinned, pin(self.bytes))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpinned(undo: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the device has failed
        undo()


class _Thread:
    """Reads in one order until it is stopped.  It does not keep its reader, which may be dropped.

    ``ring``: None until it has one.
    """

    def __init__(self, order: ReadOrder, pin: Pin, drive: _Drive, ring: _RingMemory | None) -> None:
        """``ring``: to use if it is large enough."""
        self.ring = ring
        self._order = order
        self._pin = pin
        self._drive = drive
        self._wanted = ring_bytes([source.numel() for source in order.repeated])  # as large as in the proof
        self._ready: SimpleQueue[_Ready | ChunkflowError] = SimpleQueue()
        self._head: _Ready | ChunkflowError | None = None
        self._acquired = False
        self._copies: SimpleQueue[Any] = SimpleQueue()  # their events, None for one that has ended
        self._copied = 0  # reads whose copies have ended
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="chunkflow-read-ahead", daemon=True)
        self._thread.start()

    def acquire(self, source: DriveBytes) -> tuple[torch.Tensor, float] | None:
        """Wait for the bytes of a read; return them, and when their read ended.  None if it is not the next one in the order.

        Raises ChunkflowError if the drive fails.
        """
        if self._head is None:
            self._head = self._ready.get()
        if isinstance(self._head, ChunkflowError):
            raise self._head
        wanted, values, at = self._head
        if wanted != source:
            return None
        self._head, self._acquired = None, True
        return values, at

    def release(self, event: Any) -> None:
        """Give the room of what was acquired back, once ``event`` has come to pass; None for at once."""
        if self._acquired:
            self._copies.put(event)
            self._acquired = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # also a finalizer: the collector may run it anywhere
    def stop(self) -> None:
        """End the reading.  Waits for the copies out of the ring that are in flight."""
        self._stopped = True
        self._copies.put(_LOOK)
        if threading.current_thread() is not self._thread:  # the collector may run a finalizer anywhere
            self._thread.join()
        with contextlib.suppress(RuntimeError):  # the device has failed
            while not self._copies.empty():
                self._wait_for_copy()

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
        if self.ring is None or self.ring.bytes.numel() < self._wanted:
            self.ring = None  # freed before the new one is allocated
            self.ring = _RingMemory(self._wanted, self._pin)
        slots = Ring(self._wanted)
        for source in self._order.reads():
            slot = slots.slot(source.numel())
            while self._copied < slot.after and not self._stopped:
                self._wait_for_copy()
            if self._stopped:
                return
            self._ready.put((source, *self._drive.read(source, self.ring.bytes[slot.begin : slot.end])))

    def _wait_for_copy(self) -> None:
        """Wait for the next copy out of the ring to end, or for something else to look at."""
        if (event := self._copies.get()) is _LOOK:
            return
        if event is not None:
            event.synchronize()
        self._copied += 1
