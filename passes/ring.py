"""The ring: host memory that the bytes of weights on the drive pass through, from the read to the copy.

Reads and copies have one order, and each read has the same slot in every step.  The reads of a step go round the ring in
laps of about the same size, and each lap begins at its first byte.  A read waits until the copies out of its bytes have
ended, which are those of the lap before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What is read beside the page cache is read in whole blocks of the file.
BLOCK = 4096
# Most bytes that are read from the drive ahead of their copies: some tens of milliseconds of a fast drive.
MOST_READ_AHEAD = 128 << 20


def room(nbytes: int) -> int:
    """The bytes of the ring that a read takes: all blocks that it can touch, because a weight begins anywhere in a file."""
    return (-(-nbytes // BLOCK) + 1) * BLOCK


def lap_bytes(reads: Sequence[int]) -> int:
    """The bytes of a lap, for reads of so many bytes in a step: room for one that is copied, and for those ahead of it, a
    quarter of the step and one at least.  A lap may be larger, so that all have about the same size."""
    rooms = [room(nbytes) for nbytes in reads]
    largest = max(rooms, default=0)
    return largest + max(largest, min(MOST_READ_AHEAD, sum(rooms) // 4))


@dataclass(frozen=True)
class RingSlot:
    """Where a read goes in each step: bytes ``[begin, end)`` of the ring.  ``after``: the number of the copy that must have
    ended before; if negative, of the step before, counted from its end."""

    begin: int
    end: int
    after: int


def ring_slots(reads: Sequence[int]) -> list[RingSlot]:
    """The slots of the reads of a step, from a block on.  ``reads``: their bytes, in the order of their copies."""
    rooms, count = [room(nbytes) for nbytes in reads], len(reads)
    total = sum(rooms)
    laps = max(1, total // max(1, lap_bytes(reads)))
    spans, lap, begin, passed = list[tuple[int, int]](), 0, 0, 0
    for taken in rooms:
        if (now := passed * laps // total) != lap:
            lap, begin = now, 0
        spans.append((begin, begin + taken))
        begin, passed = begin + taken, passed + taken
    newest = [_newest_overlapping(spans, number) for number in range(count)]
    # reads keep their order, so each waits at least as long as those before it
    slots, after = list[RingSlot](), max((n - count for n in newest), default=0)
    for (begin, end), overlapping in zip(spans, newest, strict=True):
        after = max(after, overlapping)
        slots.append(RingSlot(begin, end, after))
    return slots


def _newest_overlapping(spans: Sequence[tuple[int, int]], number: int) -> int:
    """The newest read before one that has some of its bytes; its own of the step before, at the latest."""
    begin, end = spans[number]
    earlier = number - 1
    while spans[earlier][0] >= end or spans[earlier][1] <= begin:
        earlier -= 1
    return earlier
