"""Pieces: how a weight is sharded over the devices of N ranks, as ranges of bytes.

A weight is divided into stripes, and each stripe into N parts, one per rank.  The piece of a rank consists of its parts
from all stripes, one after the other.  So a chunk of whole stripes comes from all ranks in equal parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# The size of a stripe in bytes.  It is the default size of a chunk, so a chunk comes from N ranks in N equal parts, which
# are 2 MiB each for eight ranks.  Each rank starts with a different part, so that not all pull from the same device at the
# same time (DWDP: 1.08 times the rate).  Smaller parts would need more copies; with larger parts, a rank would pull from
# the same device for longer.
STRIPE = 16 << 20
# The alignment of parts in bytes: copies of an odd number of bytes are much slower, and kernels expect an alignment of 256.
_ALIGNMENT = 256


class PiecePart(NamedTuple):
    """Consecutive bytes of a weight that are stored in one piece.  ``owner``: index of the rank with this piece.
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
    """Yield the parts of bytes ``[begin, end)`` of a weight.  In each stripe, the order starts with rank ``first`` and
    wraps around."""
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
    """Return the maximum number of bytes in ``[begin, end)`` that any rank pulls from other ranks.  The maximum belongs
    to the rank that holds the fewest of these bytes."""
    own = [0] * ranks
    for part in parts(begin, end, nbytes, ranks):
        own[part.owner] += part.nbytes
    return end - begin - min(own)


def _part(ranks: int) -> int:
    """Return the size of a part of a whole stripe in bytes."""
    return _aligned(-(-STRIPE // ranks))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
