"""The ring: host memory that the bytes of weights on the drive pass through, from the read to the copy.

Reads and copies have one order.  Each read goes after the one before it, or to the beginning where no room is left; it waits
until the copies that use its bytes have ended.  So where each read goes depends on the sizes alone, never on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# What is read beside the page cache is read in whole blocks of the file.
BLOCK = 4096
# Most bytes that are read from the drive ahead of their copies: some tens of milliseconds of a fast drive.
MOST_READ_AHEAD = 128 << 20


def room(nbytes: int) -> int:
    """The bytes of the ring that a read takes: all blocks that it can touch, because a weight begins anywhere in a file."""
    return (-(-nbytes // BLOCK) + 1) * BLOCK


def ring_bytes(reads: Sequence[int]) -> int:
    """The bytes of the ring in host memory for reads of so many bytes in a step: room for one that is copied, and for those
    ahead of it, a quarter of the step and one at least."""
    rooms = [room(nbytes) for nbytes in reads]
    largest = max(rooms, default=0)
    return largest + max(largest, min(MOST_READ_AHEAD, sum(rooms) // 4))


@dataclass(frozen=True)
class RingSlot:
    """Where a read goes: bytes ``[begin, end)`` of the ring.  ``after``: how many reads, from the first on, must have been
    copied before it begins."""

    begin: int
    end: int
    after: int


class Ring:
    """The slots of reads, given one after the other."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: bytes; at least the :func:`room` of the largest read."""
        self._capacity = capacity
        self._used: deque[tuple[int, int]] = deque()
        self._after = 0

    def slot(self, nbytes: int) -> RingSlot:
        """The slot of the next read, from a block on."""
        taken = room(nbytes)
        while (begin := self._place(taken)) is None:
            self._used.popleft()
            self._after += 1
        self._used.append((begin, begin + taken))
        return RingSlot(begin, begin + taken, self._after)

    def _place(self, taken: int) -> int | None:
        if not self._used:
            return 0
        oldest, newest = self._used[0][0], self._used[-1][1]
        if newest <= oldest:  # the newest are at the beginning of the ring again
            return newest if newest + taken <= oldest else None
        if newest + taken <= self._capacity:
            return newest
        return 0 if taken <= oldest else None
