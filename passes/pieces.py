"""Pieces: how a weight is sharded over the devices of N ranks, as ranges of bytes.

A weight is divided into stripes, and each stripe into N parts of equal size, one per rank.  The *piece* of a rank consists
of its parts from all stripes, one after the other.  So if a chunk consists of whole stripes, a rank pulls equal parts of the
chunk from all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# The size of a stripe in bytes, equal to the default size of a chunk.  With eight ranks, a part has 2 MiB.  Each rank starts
# with a different part, so that the ranks do not all pull from the same device at the same time.  Smaller parts would need
# more copies.  With larger parts, a rank would pull from one device for longer.
STRIPE = 16 << 20
# The alignment of parts in bytes.  Copies of an odd number of bytes are much slower, and kernels expect an alignment of 256.
_ALIGNMENT = 256


class PiecePart(NamedTuple):
    """A part of a stripe, or some of its bytes.  ``owner``: index of the rank in whose piece the part is stored.
    ``begin``: offset in the weight.  ``offset``: offset in the piece."""

    owner: int
    begin: int
    offset: int
    nbytes: int


def piece_bytes(nbytes: int, ranks: int) -> int:
    """Return the size of each rank's piece of a weight in bytes; a multiple of 256."""
    part = _part(ranks)
    stripes, rest = divmod(nbytes, ranks * part)
    return stripes * part + _aligned(-(-rest // ranks))


def parts(begin: int, end: int, nbytes: int, ranks: int, first: int = 0) -> Iterator[PiecePart]:
    """Yield the parts of bytes ``[begin, end)`` of a weight.  In each stripe, the part of rank ``first`` comes first; the
    part of rank 0 follows the part of the last rank."""
    part = _part(ranks)
    stripe = ranks * part
    for start in range(begin // stripe * stripe, end, stripe):
        length = min(part, _aligned(-(-(nbytes - start) // ranks)))
        for i in range(ranks):
            owner = (first + i) % ranks
            lowest = start + owner * length
            low, high = max(begin, lowest), min(end, lowest + length, nbytes)
            if low < high:
                yield PiecePart(owner, low, start // ranks + low - lowest, high - low)


def from_others(begin: int, end: int, nbytes: int, ranks: int) -> int:
    """Return the number of bytes of ``[begin, end)`` that a rank pulls from other ranks.  The number is computed for the rank
    that holds the fewest of these bytes."""
    own = [0] * ranks
    for part in parts(begin, end, nbytes, ranks):
        own[part.owner] += part.nbytes
    return end - begin - min(own)


def _part(ranks: int) -> int:
    """Return the size of a part in bytes; the parts of the last stripe may be smaller."""
    return _aligned(-(-STRIPE // ranks))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
