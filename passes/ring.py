"""The ring: a buffer in host memory for weights on the SSD.  Reads fill it, and copies to the device take their bytes from
it.

Reads and copies are in the same order, and each read uses the same slot of the ring in every step.  The reads of a step
go round the ring in laps of about the same size, and each lap begins at byte 0.  A read waits until the copies that the
previous lap made from the same bytes have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Direct I/O, which bypasses the page cache, reads whole blocks of the file.
BLOCK = 4096
# The maximum number of bytes that are read from the SSD ahead of their copies: some tens of milliseconds with a fast SSD.
MOST_READ_AHEAD = 128 << 20


def slot_bytes(nbytes: int) -> int:
    """Return the bytes that a read occupies in the ring.  They cover all blocks that the read may touch, because a
    weight can begin anywhere in a file."""
    return (-(-nbytes // BLOCK) + 1) * BLOCK


def lap_bytes(reads: Sequence[int]) -> int:
    """Return the minimum size of a lap in bytes.  A lap has space for one read that is being copied, and for the reads
    ahead of it: a quarter of the step's reads, but at least one.  ``reads``: sizes of the reads of a step in bytes.  A
    lap may be larger, so that all laps have about the same size."""
    sizes = [slot_bytes(nbytes) for nbytes in reads]
    largest = max(sizes, default=0)
    return largest + max(largest, min(MOST_READ_AHEAD, sum(sizes) // 4))


@dataclass(frozen=True)
class RingSlot:
    """The bytes ``[begin, end)`` of the ring that a read uses in every step.  ``after``: number of the copy that must have
    ended before the read; negative numbers count from the end of the previous step."""

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
    # reads are in order, so each read waits at least for the copy that the read before it waits for
    slots, after = list[RingSlot](), max((n - count for n in newest), default=0)
    for (begin, end), overlapping in zip(spans, newest, strict=True):
        after = max(after, overlapping)
        slots.append(RingSlot(begin, end, after))
    return slots


def _newest_overlapping(spans: Sequence[tuple[int, int]], number: int) -> int:
    """Return the number of the latest earlier read whose slot overlaps with the slot of read ``number``.  It may be the
    same read in the previous step."""
    begin, end = spans[number]
    earlier = number - 1
    while spans[earlier][0] >= end or spans[earlier][1] <= begin:
        earlier -= 1
    return earlier
