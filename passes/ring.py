"""The ring: a buffer in host memory for weights on the SSD.  Reads from the SSD fill the ring, and copies to the device take
their bytes from it.

Reads and copies are in the same order, and each read uses the same bytes of the ring in every step.  The reads of a step fill
the ring several times, each time from its beginning.  Each such pass through the ring is a *lap*, and all laps have about the
same size.  A read waits until the copies that took the same bytes in the previous lap have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Direct I/O, which bypasses the page cache, reads whole blocks of the file.
BLOCK = 4096
# The maximum number of bytes that are read from the SSD ahead of their copies.  A fast SSD reads them in some tens of
# milliseconds.
MOST_READ_AHEAD = 128 << 20


def slot_bytes(nbytes: int) -> int:
    """Return the number of bytes that a read of ``nbytes`` bytes occupies in the ring.  The read may touch one more block
    than its size suggests, because a weight can begin in the middle of a block of the file."""
    return (-(-nbytes // BLOCK) + 1) * BLOCK


def lap_bytes(reads: Sequence[int]) -> int:
    """Return the minimum size in bytes of a lap, that is, of the reads that fill the ring once.  ``reads``: sizes of the
    reads of a step in bytes.

    A lap has space for the largest read while its bytes are copied to the device, and for the reads ahead of this copy.  For
    the reads ahead, a lap has space for a quarter of the bytes that a step reads, at most :data:`MOST_READ_AHEAD`, but at
    least for one read.
    """
    sizes = [slot_bytes(nbytes) for nbytes in reads]
    largest = max(sizes, default=0)
    return largest + max(largest, min(MOST_READ_AHEAD, sum(sizes) // 4))


@dataclass(frozen=True)
class RingSlot:
    """The bytes ``[begin, end)`` of the ring that a read uses in every step.  ``after``: number of the copy that must have
    ended before the read starts; a negative number counts back from the end of the previous step."""

    begin: int
    end: int
    after: int


def ring_slots(reads: Sequence[int]) -> list[RingSlot]:
    """Return the slots of the reads of a step, aligned to blocks.  ``reads``: sizes of the reads in bytes, in the order
    of their copies."""
    sizes, count = [slot_bytes(nbytes) for nbytes in reads], len(reads)
    total = sum(sizes)
    laps = max(1, total // max(1, lap_bytes(reads)))
    spans, lap, begin, passed = list[tuple[int, int]](), 0, 0, 0
    for taken in sizes:
        if (now := passed * laps // total) != lap:
            lap, begin = now, 0
        spans.append((begin, begin + taken))
        begin, passed = begin + taken, passed + taken
    newest = [_newest_overlapping(spans, number) for number in range(count)]
    # reads run in order, so a read also waits for the copies that earlier reads wait for
    slots, after = list[RingSlot](), max((n - count for n in newest), default=0)
    for (begin, end), overlapping in zip(spans, newest, strict=True):
        after = max(after, overlapping)
        slots.append(RingSlot(begin, end, after))
    return slots


def _newest_overlapping(spans: Sequence[tuple[int, int]], number: int) -> int:
    """Of the reads before read ``number``, return the number of the last one that uses some of the same bytes of the ring.
    The result is negative for a read of the previous step."""
    begin, end = spans[number]
    earlier = number - 1
    while spans[earlier][0] >= end or spans[earlier][1] <= begin:
        earlier -= 1
    return earlier
