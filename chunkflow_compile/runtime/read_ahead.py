"""Reading ahead: the bytes of weights on the drive, in the order of their copies, round and round.

The plan fixes that order.  So what the next copies need is read into a ring of host memory ahead of them, across the ends of
calls: by a thread of this rank, or by the first rank of the machine for all (``shared_ring.py``).  A cold start or a jump
gives another order.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import ring_bytes
from chunkflow_compile.weights.limits import host_memory, local_ranks
from chunkflow_compile.weights.ring_memory import Pin, RingMemory
from chunkflow_compile.weights.shared_ring import Number, SharedRing
from chunkflow_compile.weights.source import DriveBytes

from .drive_runs import BroughtRun, Key, Order, Over, OwnRun, Run
from .host_clock import MONOTONIC, HostClock

_log = logging.getLogger(__name__)

# A drive is reported if it reads at less than this share of the rate that the plan expects, over at least this time.
_SLOW = 1 / 3
_SURE_S = 1.0
# Calls of which a rank remembers where they began, to find the first rank in one of them: ranks that wait for each other in
# collectives are rarely further apart.
_REMEMBERED = 16


@dataclass(frozen=True)
class Reading:
    """The bytes of a copy that the drive is to bring.  They are in the ring from :meth:`take` to :meth:`free`."""

    reader: ReadAhead
    key: Key
    source: DriveBytes

    def numel(self) -> int:
        return self.source.numel()

    def take(self) -> tuple[torch.Tensor, float]:
        """Wait for the bytes; return them, uint8, and when they came, by the clock.

        Raises ChunkflowError if the drive fails.
        """
        return self.reader.take(self)

    def free(self, event: Any = None) -> None:
        """Give the ring the room back, once ``event`` has come to pass."""
        self.reader.free(event)


@dataclass(frozen=True)
class Start:
    """Where reading starts: the call, and what ranks must have in common to read together.

    ``ring``: of the ranks that share the weights and that collectives keep in step, None for none.  ``plan``: what is to be
    equal on all of them.
    """

    call: Number = (0, 0)
    ring: SharedRing | None = None
    plan: object = None


@dataclass
class _Live:
    """What goes on for a reader: its run, and the event of the newest copy out of the ring, which comes after those of all
    others."""

    run: Run | None = None
    newest: Any = None

    def stop(self) -> None:
        if self.run is not None:
            self.run.stop()
        self.run = self.newest = None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _drop(live: _Live) -> None:
    """End what goes on for a reader that was dropped: its model was, without restore."""
    with contextlib.suppress(RuntimeError, ChunkflowError):  # the device has failed
        if live.newest is not None:
            live.newest.synchronize()
    live.stop()


class ReadAhead:
    """The reader of an arena.  :meth:`restart`, :meth:`goes_on`, :meth:`take` and :meth:`free` are work of the copy stream,
    in its order."""

    def __init__(self, pin: Pin, rate: float = 0.0, clock: HostClock = MONOTONIC) -> None:
        """``pin``: pins host memory for the device.  ``rate``: bytes/s of a drive to emulate; 0 for the machine's own."""
        self._pin = pin
        self._rate = rate
        self._clock = clock
        self._ring: RingMemory | None = None  # of this rank alone
        self._wanted = 0
        self._beside = False
        self._live = _Live()
        weakref.finalize(self, _drop, self._live).atexit = False
        self._shared: SharedRing | None = None
        self._digest = b""
        self._calls: dict[Number, tuple[int, int]] = {}  # the newest: their first read that repeats, and its place
        self._number = 0  # of the next read to take
        self._expected: float | None = None
        # where the room of each read not yet freed goes back to, None for one that is not in a ring
        self._taken: deque[SimpleQueue[Any] | None] = deque()
        self._done = (0.0, 0)  # seconds and bytes of the runs that have ended
        self._told = (0.0, 0)  # those that :meth:`settle` has returned
        self._warned = False

    def restart(self, order: Order, expected: float | None = None, start: Start | None = None) -> None:
        """Read in this order.  ``expected``: the rate, bytes/s.  ``start``: None for this rank alone.

        Waits for the copies out of the ring that are in flight, for readers in the calls before.
        """
        if self._live.newest is not None:
            self._live.newest.synchronize()
        self.stop()
        self._expected = expected
        sizes = [source.numel() for _, source in order.repeated]
        self._wanted = ring_bytes(sizes)  # as large as in the proof
        start = start or Start()
        self._shared = start.ring if start.ring is not None and start.ring.claim(self) else None
        alone = local_ranks() < 2 if self._shared is None else self._shared.leads
        # where memory is short, the page cache would drop what it has before it is read again; ranks that each read for
        # themselves may still find there what another has just read
        self._beside = alone and host_memory().free < sum(sizes)
        if self._shared is not None:
            self._digest = order.digest(start.plan)
        self._live.run = self._for_all(order) or self._own(order, 0, self._own_ring())
        self.goes_on(start.call)

    def goes_on(self, call: Number) -> None:
        """A call begins.  Here ranks may begin to read together."""
        if isinstance(self._live.run, BroughtRun) and self._live.run.ended:
            self._go_on(None)
        run = self._live.run
        if self._shared is None or run is None:
            return
        found = run.order.begins_at(self._number)
        if self._shared.leads:
            self._shared.reached(call, *found)
        elif isinstance(run, OwnRun):
            self._calls = dict(list(self._calls.items())[1 - _REMEMBERED :]) | {call: found}
            self._join(run)

    def _join(self, run: OwnRun) -> None:
        """Take what the first rank reads, if it was where this one was in one of the newest calls."""
        shared = self._shared
        assert shared is not None
        told = (shared.ahead(self._digest, c, *found) for c, found in self._calls.items())
        if (ahead := next((n for n in told if n is not None), None)) is None:
            return

        def take(number: int) -> tuple[int, Run] | None:
            least = max(number, len(run.order.first))  # the first rank has other reads before those that repeat
            first = shared.join(least + ahead, self._wanted, self._pin)
            if first is None:
                return None
            return first - ahead, BroughtRun(run.order, first - ahead, shared, ahead, self._clock)

        try:
            run.hand_over(take)
        except ChunkflowError as error:
            _log.warning("this rank reads the drive for itself: %s", error)
            self._shared = None

    def take(self, reading: Reading) -> tuple[torch.Tensor, float]:
        while self._live.run is not None:
            found = self._live.run.head()
            if isinstance(found, Over):
                self._go_on(found.then)
                continue
            if isinstance(found, ChunkflowError):
                raise found
            if found.key != reading.key:
                break
            self._live.run.pop()
            self._number += 1
            self._taken.append(self._live.run.freed)
            return found.values, found.at
        self._taken.append(None)
        return reading.source.read_all(), self._clock.now()  # out of order

    def free(self, event: Any) -> None:
        freed = self._taken.popleft()
        if freed is not None:
            freed.put(event)
            self._live.newest = event

    def alone(self) -> None:
        """Wait for no other rank any more: a call has failed."""
        if self._live.run is not None:
            self._live.run.alone()

    def settle(self) -> tuple[float, int]:
        """Seconds and bytes of reading since the last call; says once if the drive is far slower than expected."""
        seconds, nbytes = self._done
        if self._live.run is not None:
            seconds, nbytes = seconds + self._live.run.seconds, nbytes + self._live.run.nbytes
            slow = self._expected is not None and seconds >= _SURE_S and nbytes < _SLOW * self._expected * seconds
            if slow and not self._warned:
                self._warned = True
                _log.warning(
                    "%s is read at %.3g MB/s, but the plan expects %.3g MB/s, so steps take longer than predicted. Measure "
                    "the drive with chunkflow calibrate --drive PATH, or keep more in memory: host_memory.",
                    self._live.run.name,
                    nbytes / seconds / 1e6,
                    (self._expected or 0.0) / 1e6,
                )
        before, self._told = self._told, (seconds, nbytes)
        return seconds - before[0], nbytes - before[1]

    def stop(self) -> None:
        """End the reading.  No copy may need its bytes any more."""
        if self._live.run is not None:
            self._end(self._live.run)
        self._live.stop()
        self._number = 0
        self._calls.clear()
        self._taken.clear()

    def close(self) -> None:
        """Stop, and give the ring back."""
        self.stop()
        if self._shared is not None:
            self._shared.release()
        self._shared = self._ring = None

    def _go_on(self, then: Run | None) -> None:
        """Another run has the next read."""
        before = self._live.run
        assert before is not None
        self._end(before)
        if isinstance(before, BroughtRun):
            before.over()
        if then is None:
            self._live.run = self._own(before.order, self._number, self._own_ring())
        else:
            self._live.run, self._ring = then, None

    def _for_all(self, order: Order) -> OwnRun | None:
        """A run that reads for all ranks; None if this is not the first one, or if there is no ring for it."""
        if self._shared is None or not self._shared.leads:
            return None
        try:
            memory = self._shared.begin(self._digest, self._wanted, self._pin)
        except ChunkflowError as error:
            _log.warning("each rank reads the drive for itself: %s", error)
            self._shared = None
            return None
        if memory is None:
            return None
        self._ring = None
        return self._own(order, 0, memory, self._shared)

    def _own(self, order: Order, number: int, memory: RingMemory, others: SharedRing | None = None) -> OwnRun:
        spare = partial(RingMemory.own, self._wanted, self._pin)  # the run does not keep the reader
        return OwnRun(
            order,
            number,
            memory,
            self._wanted,
            spare,
            rate=self._rate,
            beside=self._beside,
            others=others,
            clock=self._clock,
        )

    def _own_ring(self) -> RingMemory:
        if self._ring is None or self._ring.bytes.numel() < self._wanted:
            self._ring = None  # freed before the new one is allocated
            self._ring = RingMemory.own(self._wanted, self._pin)
        return self._ring

    def _end(self, run: Run) -> None:
        self._done = self._done[0] + run.seconds, self._done[1] + run.nbytes
