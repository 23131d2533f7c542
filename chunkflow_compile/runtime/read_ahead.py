"""Reading ahead: read weights from the SSD into a ring buffer in host memory, from which copies to the device take them.

The ops of a step (step.py) determine which bytes are read, when, and to which position of the ring.
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

# Pins host memory, so that the device can read it directly; returns a function that unpins it.
Pin = Callable[[torch.Tensor], Callable[[], None]]

# An SSD is reported as slow if it reads at less than this share of the rate that the plan expects, over at least _SURE_S
# seconds.
_SLOW = 1 / 3
_SURE_S = 1.0
# An emulated SSD makes up for a thread that wakes up late, by at most this many seconds.
_LATE_S = 0.005


@dataclass(frozen=True)
class InRing:
    """The source of a copy whose bytes are read into the ring at the position ``begin``."""

    reader: DriveReader
    source: DriveBytes
    begin: int

    def numel(self) -> int:
        return self.source.numel()

    def values(self) -> torch.Tensor:
        """The bytes, uint8.  They must have been read."""
        return self.reader.values(self.source, self.begin)


class DriveReader:
    """Reads weights from the SSD for an arena, into one ring for all its programs."""

    def __init__(self, pin: Pin, rate: float = 0.0, clock: HostClock = MONOTONIC) -> None:
        """``pin``: pins host memory for the device.  ``rate``: bytes/s of an SSD to emulate; 0 to use the SSD as it is."""
        self._pin = pin
        self._drive = _Drive(clock, rate)
        self._ring: _RingMemory | None = None
        self._expected: float | None = None
        self._collected = (0.0, 0)  # seconds and bytes up to the last call of :meth:`collect`
        self._warned = False

    def expect(self, nbytes: int, rate: float | None) -> None:
        """Expect that each step reads ``nbytes`` from now on, at this rate in bytes/s; None if the rate is not known."""
        self._expected = rate
        # If memory is short, the page cache would drop pages before they are read again, so it is bypassed.  Several ranks
        # on one machine use it all the same: they may find pages there that another rank has just read.
        self._drive.past_cache = host_memory().free < nbytes and local_ranks() < 2

    def read(self, source: DriveBytes, begin: int, ring_bytes: int) -> None:
        """Read into the ring at the position ``begin``.  It runs as work of the stream of reads.

        ``ring_bytes``: size of the ring that the program needs.  The ring is replaced by a larger one only in the first read
        after a prologue, which is issued after all copies out of the ring.  Raises ChunkflowError if the read fails.
        """
        try:
            if self._ring is None or self._ring.bytes.numel() < ring_bytes:
                self._ring = None  # freed before the new one is allocated
                self._ring = _RingMemory(ring_bytes, self._pin)
            self._drive.read(source, self._ring.bytes[begin : begin + slot_bytes(source.numel())])
        except ChunkflowError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ChunkflowError(f"Reading ahead of the copies failed: {what}") from error

    def values(self, source: DriveBytes, begin: int) -> torch.Tensor:
        """The bytes that were read into the ring at the position ``begin``, uint8."""
        assert self._ring is not None, "it is read before"
        return _inside(source, self._ring.bytes[begin:])

    def collect(self) -> tuple[float, int]:
        """Seconds and bytes of reading since the last call.  Warns once if the SSD is much slower than expected."""
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
    """The bytes of ``source`` within ``memory``, which begins with the file block that contains their first byte."""
    begin = source.offset % BLOCK
    return memory[begin : begin + source.numel()]


@dataclass
class _Drive:
    """Reads from the SSD, and sums their times.

    ``rate``: bytes/s of an SSD to emulate; 0 to use the SSD as it is.  ``past_cache``: whether to bypass the page cache.
    ``seconds``, ``nbytes``: duration and bytes of all reads so far.  ``name``: name of the last file that was read.
    """

    clock: HostClock
    rate: float = 0.0
    past_cache: bool = False
    seconds: float = 0.0
    nbytes: int = 0
    name: str = ""
    _late: float = 0.0

    def read(self, source: DriveBytes, memory: torch.Tensor) -> None:
        """Read the bytes of ``source`` into memory of the ring."""
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
    """Pinned host pages for reads; they are unpinned when this object is collected.  ``bytes``: the pages, uint8."""

    def __init__(self, nbytes: int, pin: Pin) -> None:
        self.bytes = empty_pages(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        with contextlib.suppress(OSError):  # copies from memory that is not pinned are slower, but correct
            when_collected(self, _unpinned, pin(self.bytes))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer, which may run anywhere
def _unpinned(undo: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the device has failed
        undo()
