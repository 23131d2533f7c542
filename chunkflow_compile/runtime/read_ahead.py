"""Reading ahead: the bytes of weights on the drive, in the order of their copies, round and round.

The plan fixes that order.  So what the next copies need is read into a ring of host memory ahead of them, across the ends of
calls: by a thread of this rank, or by the first rank of the machine for all (``shared_ring.py``).  A cold start or a jump
gives another order.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from chunkflow_compile.weights.limits import host_memory, local_ranks
from chunkflow_compile.weights.shared_ring import Number, Pin, RingMemory, SharedRing
from chunkflow_compile.weights.source import DriveBytes

from .host_clock import MONOTONIC, HostClock
from .read_thread import DriveMeter, Order, ReadThread

_log = logging.getLogger(__name__)

# A drive is reported if it reads at less than this share of the rate that the plan expects, over at least this time.
_SLOW = 1 / 3
_SURE_S = 1.0


@dataclass(frozen=True)
class Reading:
    """The bytes of a copy that the drive is to bring.  They are in the ring from :meth:`acquire` to :meth:`release`."""

    reader: ReadAhead
    source: DriveBytes

    def numel(self) -> int:
        return self.source.numel()

    def acquire(self) -> tuple[torch.Tensor, float]:
        """Wait for the bytes; return them, uint8, and when they came, by the clock.

        Raises ChunkflowError if the drive fails.
        """
        return self.reader.acquire(self.source)

    def release(self, event: Any = None) -> None:
        """Give the ring the room back, once ``event`` has come to pass."""
        self.reader.release(event)


class ReadAhead:
    """The reader of an arena.  :meth:`reset`, :meth:`on_call`, :meth:`acquire` and :meth:`release` are work of the copy
    stream, in its order."""

    def __init__(self, pin: Pin, rate: float = 0.0, clock: HostClock = MONOTONIC) -> None:
        """``pin``: pins host memory for the device.  ``rate``: bytes/s of a drive to emulate; 0 for the machine's own."""
        self._pin = pin
        self._drive = DriveMeter(clock, rate)
        self._memory: RingMemory | None = None  # of this rank alone, between two threads
        self._ring: SharedRing | None = None
        self._thread: ReadThread | None = None
        self._dropped: weakref.finalize[[ReadThread], ReadAhead] | None = None
        self._expected: float | None = None
        self._told = (0.0, 0)  # seconds and bytes that :meth:`settle` has returned
        self._warned = False

    @property
    def joined(self) -> bool:
        """Whether the first rank of the machine reads for this one."""
        return self._thread is not None and self._thread.joined

    def reset(
        self, order: Order, expected: float | None = None, call: Number = (0, 0), ring: SharedRing | None = None
    ) -> None:
        """Read in this order, from ``call`` on.  ``expected``: the rate, bytes/s.  ``ring``: of the ranks that share the
        weights and that collectives keep in step, None to read for this rank alone.

        Waits for the copies out of the ring that are in flight, for readers in the calls before.
        """
        self.stop()
        self._expected = expected
        self._ring = shared = ring if ring is not None and ring.claim() else None
        try:
            alone = local_ranks() < 2 if shared is None else shared.leads
            # where memory is short, the page cache would drop what it has before it is read again; ranks that each read for
            # themselves may still find there what another has just read
            self._drive.beside = alone and host_memory().free < sum(source.numel() for source in order.repeated)
            self._thread = ReadThread(order, self._pin, self._drive, self._memory, shared)
        except BaseException:
            if shared is not None:
                shared.release()  # nobody else would
            raise
        self._memory = None
        self._dropped = weakref.finalize(self, _drop, self._thread)
        self._dropped.atexit = False
        self.on_call(call)

    def on_call(self, call: Number) -> None:
        """A call begins."""
        if self._thread is not None:
            self._thread.on_call(call)

    def acquire(self, source: DriveBytes) -> tuple[torch.Tensor, float]:
        """See :meth:`Reading.acquire`.  What is out of order is read now."""
        found = None if self._thread is None else self._thread.acquire(source)
        return found or (source.read_all(), self._drive.clock.now())

    def release(self, event: Any) -> None:
        if self._thread is not None:
            self._thread.release(event)

    def alone(self) -> None:
        """Wait for no other rank any more: a call has failed."""
        if self._thread is not None:
            self._thread.alone()

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
        before, self._told = self._told, (seconds, nbytes)
        return seconds - before[0], nbytes - before[1]

    def stop(self) -> None:
        """End the reading.  Waits for the copies out of the ring that are in flight."""
        if self._thread is not None and self._dropped is not None:
            self._dropped.detach()
            self._thread.stop()
            self._memory, self._thread = self._thread.memory, None

    def close(self) -> None:
        """Stop, and give the ring back."""
        self.stop()
        self._memory = None
        if self._ring is not None:
            self._ring.memory = None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _drop(thread: ReadThread) -> None:
    """End the thread of a reader that was dropped: its model was, without restore."""
    thread.stop()
