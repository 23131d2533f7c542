"""Reading ahead: the bytes of weights on the drive, in the order of their copies, round and round.

The plan fixes that order.  So one thread reads what the next copies need into a ring of host memory, ahead of the copies,
across the ends of calls.  A cold start or a jump gives it another order.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import Ring, ring_bytes
from chunkflow_compile.weights.source import DriveBytes

# A weight, and the chunks of it that one copy moves.
Key = tuple[str, int, int]
Order = Sequence[tuple[Key, DriveBytes]]

_OVER = object()
_log = logging.getLogger(__name__)

# A drive is reported if it reads at less than this share of the rate that the plan expects, over at least this time.
_SLOW = 1 / 3
_SURE_S = 1.0
# An emulated drive makes up for a thread that wakes up late, by at most this.
_LATE_S = 0.005


@dataclass(frozen=True)
class Reading:
    """The bytes of a copy that the drive is to bring.  They are in the ring from :meth:`take` to :meth:`free`."""

    reader: ReadAhead
    key: Key
    source: DriveBytes

    def numel(self) -> int:
        return self.source.numel()

    def take(self) -> tuple[torch.Tensor, float]:
        """Wait for the bytes; return them, uint8, and when they came, ``time.monotonic`` seconds.

        Raises ChunkflowError if the drive fails.
        """
        return self.reader.take(self)

    def free(self, event: Any = None) -> None:
        """Give the ring the room back, once ``event`` has come to pass."""
        self.reader.free(event)


class ReadAhead:
    """The reader of an arena.  :meth:`restart`, :meth:`take` and :meth:`free` are work of the copy stream, in its order."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], rate: float = 0.0) -> None:
        """``allocate``: memory for the ring, uint8.  ``rate``: bytes/s of a drive to emulate; 0 for the machine's own."""
        self._allocate = allocate
        self._rate = rate
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._run: _Run | None = None
        self._expected: float | None = None
        self._taken: deque[bool] = deque()  # whether each of the bytes not yet freed is in the ring
        self._newest: Any = None  # the event of the newest copy out of the ring, after those of all others
        self._done = (0.0, 0)  # seconds and bytes of the runs that have ended
        self._told = (0.0, 0)  # those that :meth:`settle` has returned
        self._warned = False

    def restart(self, first: Order, cycle: Order, begin: int, expected: float | None = None) -> None:
        """Read ``first``, and then ``cycle`` from ``begin`` on, again and again.  ``expected``: the rate, bytes/s.

        Waits for the copies out of the ring that are in flight, for readers in the calls before.
        """
        if self._newest is not None:
            self._newest.synchronize()
        self.stop()
        self._expected = expected
        wanted = ring_bytes([source.numel() for _, source in cycle])
        if self._ring.numel() < wanted:
            self._ring = torch.empty(0, dtype=torch.uint8)  # freed before the new one is allocated
            self._ring = self._allocate(wanted)
        order = itertools.chain(first, cycle[begin:], itertools.cycle(cycle))
        self._run = _Run(order, self._ring[:wanted], self._rate)  # as large as in the proof

    def take(self, reading: Reading) -> tuple[torch.Tensor, float]:
        found = None if self._run is None else self._run.take(reading.key)
        self._taken.append(found is not None)
        if found is not None:
            return found
        return reading.source.read_all(), time.monotonic()  # out of order

    def free(self, event: Any) -> None:
        if self._taken.popleft() and self._run is not None:
            self._run.freed.put(_OVER if event is None else event)
            self._newest = event

    def settle(self) -> tuple[float, int]:
        """Seconds and bytes of reading since the last call; says once if the drive is far slower than expected."""
        seconds, nbytes = self._done
        if self._run is not None:
            seconds, nbytes = seconds + self._run.seconds, nbytes + self._run.nbytes
            slow = self._expected is not None and seconds >= _SURE_S and nbytes < _SLOW * self._expected * seconds
            if slow and not self._warned:
                self._warned = True
                _log.warning(
                    "%s is read at %.3g MB/s, but the plan expects %.3g MB/s, so steps take longer than predicted. Measure "
                    "the drive with chunkflow calibrate --drive PATH, or keep more in memory: host_memory.",
                    self._run.name,
                    nbytes / seconds / 1e6,
                    (self._expected or 0.0) / 1e6,
                )
        before, self._told = self._told, (seconds, nbytes)
        return seconds - before[0], nbytes - before[1]

    def stop(self) -> None:
        """End the thread.  No copy may need its bytes any more."""
        if self._run is not None:
            self._run.stop()
            self._done = self._done[0] + self._run.seconds, self._done[1] + self._run.nbytes
            self._run = None
        self._newest = None
        self._taken.clear()


@dataclass
class _Run:
    """One thread, from a restart to the next."""

    order: Iterable[tuple[Key, DriveBytes]]
    ring: torch.Tensor
    rate: float
    ready: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    freed: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    over: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    name: str = ""
    _next: Any = None
    _copied: int = 0

    def __post_init__(self) -> None:
        self._slots = Ring(self.ring.numel())
        self._thread = threading.Thread(target=self._read, name="chunkflow-read-ahead", daemon=True)
        self._thread.start()

    def take(self, key: Key) -> tuple[torch.Tensor, float] | None:
        """The bytes of the next read, None if it is another one."""
        if self._next is None:
            self._next = self.ready.get()
        if isinstance(self._next, ChunkflowError):
            raise self._next
        found, values, at = self._next
        if found != key:
            return None
        self._next = None
        return values, at

    def stop(self) -> None:
        self.over = True
        self.freed.put(None)
        self._thread.join()

    def _read(self) -> None:
        try:
            self._read_in_order()
        except ChunkflowError as error:
            self.ready.put(error.with_traceback(None))
        except RuntimeError as error:  # from an event
            self.ready.put(ChunkflowError(f"The GPU failed: {error}"))
        except Exception as error:  # noqa: BLE001  without a word of it, the copies would wait for ever
            self.ready.put(ChunkflowError(f"Reading ahead of the copies failed: {type(error).__name__}: {error}"))

    def _read_in_order(self) -> None:
        through = ended = time.monotonic()
        for key, source in self.order:
            begin = self._room(source.numel())
            if begin is None or self.over:
                return
            values = self.ring[begin : begin + source.numel()]
            start = time.monotonic()
            source.read(values)
            if self.rate:
                through = start - min(max(0.0, ended - through), _LATE_S) + source.numel() / self.rate
                time.sleep(max(0.0, through - time.monotonic()))
            ended = time.monotonic()
            self.seconds += ended - start
            self.nbytes += source.numel()
            self.name = source.file.name
            self.ready.put((key, values, ended))

    def _room(self, nbytes: int) -> int | None:
        """Where the next bytes go in the ring, None when it is over.  Waits until the copies that use them have ended."""
        slot = self._slots.slot(nbytes)
        while self._copied < slot.after:
            event = self.freed.get()
            if event is None:
                return None
            if event is not _OVER:
                event.synchronize()
            self._copied += 1
        return slot.begin
