"""Reading ahead: the runtime reads weights from the SSD into a ring buffer in host memory.  Copies to the device take the
bytes from this buffer.

The ops of a step (step.py) determine which bytes are read, when they are read, and where in the ring they are stored.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import BLOCK, slot_bytes
from chunkflow_compile.weights.host_memory import empty_pages
from chunkflow_compile.weights.limits import host_memory, local_ranks
from chunkflow_compile.weights.locks import when_collected
from chunkflow_compile.weights.source import DriveBytes

from .host_clock import MONOTONIC, HostClock

_log = logging.getLogger(__name__)

# A function that pins host memory, so that the device can read this memory directly.  It returns a function that unpins the
# memory.
Pin = Callable[[torch.Tensor], Callable[[], None]]

# An SSD is reported as slow if its rate is less than this share of the rate that the plan expects, measured over at least
# _SURE_S seconds of reads.
_SLOW = 1 / 3
_SURE_S = 1.0
# A thread that emulates the duration of a read by sleeping may wake up too late.  The next read is then shortened by the
# delay, but at most by this many seconds.
_LATE_S = 0.005


@dataclass(frozen=True)
class InRing:
    """The source of a copy: the bytes of ``source``, which ``reader`` reads into the ring at the byte position ``begin``."""

    reader: DriveReader
    source: DriveBytes
    begin: int

    def numel(self) -> int:
        return self.source.numel()

    def values(self) -> torch.Tensor:
        """Return the bytes as a uint8 tensor.  Before this call, :meth:`DriveReader.read` must have read them into the
        ring."""
        return self.reader.values(self.source, self.begin)


class DriveReader:
    """Reads weights from the SSD for an arena.  All programs of the arena share one ring."""

    def __init__(self, pin: Pin, rate: float = 0.0, clock: HostClock = MONOTONIC) -> None:
        """``pin``: a function that pins host memory for the device.  ``rate``: the rate of an SSD to emulate, in bytes/s; 0
        to use the real rate."""
        self._pin = pin
        self._drive = _Drive(clock, rate)
        self._ring: _RingMemory | None = None
        self._expected: float | None = None
        self._collected = (0.0, 0)  # total seconds and bytes at the last call of collect()
        self._warned = False

    def expect(self, nbytes: int, rate: float | None) -> None:
        """From now on, expect each step to read ``nbytes`` in total.  ``rate``: the expected rate of these reads in bytes/s;
        None if it is not known."""
        self._expected = rate
        # If free host memory is smaller than the bytes that a step reads, the page cache is bypassed, because it would drop
        # each page before the next step reads the page again.  With several ranks on one machine, the page cache is always
        # used, because another rank may just have read the same pages.
        self._drive.past_cache = host_memory().free < nbytes and local_ranks() < 2

    def read(self, source: DriveBytes, begin: int, ring_bytes: int) -> None:
        """Read ``source`` into the ring at the byte position ``begin``.  The stream of reads runs this method as work.

        ``ring_bytes``: the size in bytes of the ring that the program needs.  If the present ring is smaller, it is replaced
        by a larger ring.  This happens only in the first read after a prologue, when all copies from the old ring have ended.
        Raises ChunkflowError if the read fails.
        """
        try:
            if self._ring is None or self._ring.bytes.numel() < ring_bytes:
                self._ring = None  # this frees the old ring before the new ring is allocated
                self._ring = _RingMemory(ring_bytes, self._pin)
            self._drive.read(source, self._ring.bytes[begin : begin + slot_bytes(source.numel())])
        except ChunkflowError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ChunkflowError(f"Reading ahead of the copies failed: {what}") from error

    def values(self, source: DriveBytes, begin: int) -> torch.Tensor:
        """Return the bytes of ``source`` as a uint8 tensor.  Before this call, :meth:`read` must have read them into the ring
        at the byte position ``begin``."""
        assert self._ring is not None, "it is read before"
        return _inside(source, self._ring.bytes[begin:])

    def collect(self) -> tuple[float, int]:
        """Return the seconds and the bytes of the reads since the previous call of this method.  Warns once if the SSD is
        much slower than the plan expects."""
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
        before, self._collected = self._collected, (seconds, nbytes)
        return seconds - before[0], nbytes - before[1]

    def close(self) -> None:
        """Free the ring."""
        self._ring = None


def _inside(source: DriveBytes, memory: torch.Tensor) -> torch.Tensor:
    """Return the part of ``memory`` that contains the bytes of ``source``.  Files are read in whole blocks, so ``memory``
    begins with the block that contains the first byte of ``source``."""
    begin = source.offset % BLOCK
    return memory[begin : begin + source.numel()]


@dataclass
class _Drive:
    """Reads from the SSD, and sums the durations of the reads.

    ``rate``: the rate of an SSD to emulate, in bytes/s; 0 to use the real rate.  ``past_cache``: whether to bypass the page
    cache.  ``seconds``, ``nbytes``: total duration and bytes of all reads so far.  ``name``: the name of the file that was
    read last.
    """

    clock: HostClock
    rate: float = 0.0
    past_cache: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    name: str = ""
    _late: float = 0.0

    def read(self, source: DriveBytes, memory: torch.Tensor) -> None:
        """Read the bytes of ``source`` into ``memory``, a part of the ring."""
        now = self.clock.now
        start = now()
        if self.past_cache:
            source.read_direct(memory)
        else:
            source.read(_inside(source, memory))
        if self.rate:
            through = start - min(max(0.0, self._late), _LATE_S) + source.numel() / self.rate
            self.clock.sleep(max(0.0, through - now()))
            self._late = now() - through
        self.seconds += now() - start
        self.nbytes += source.numel()
        self.name = source.file.name


class _RingMemory:
    """Pinned host memory for reads.  The memory is unpinned when this object is garbage-collected.  ``bytes``: the memory,
    as uint8."""

    def __init__(self, nbytes: int, pin: Pin) -> None:
        self.bytes = empty_pages(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        with contextlib.suppress(OSError):  # copies from unpinned memory are slower, but correct
            when_collected(self, _unpinned, pin(self.bytes))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer may run inside compiled code
def _unpinned(undo: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # unpinning fails if the device has failed
        undo()
