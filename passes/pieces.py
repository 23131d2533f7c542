"""Pieces: how a weight is dealt out to the devices of N ranks, as ranges of bytes.

A weight is dealt out in stripes, each of N parts in the order of the ranks; the parts of one rank lie in its piece one after
the other.  So a chunk of whole stripes comes from all ranks in equal parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Bytes of a stripe: a chunk of the usual size, so a chunk comes from N ranks in N equal parts, of 2 MiB for eight.  Each
# rank takes another part first, so not all pull from one device at a time (DWDP: 1.08 times the rate).  Smaller parts would
# start more copies, larger ones would lie on one device for longer.
STRIPE = 16 << 20
# Parts begin and end at multiples of this many bytes: copies of an odd number of bytes are much slower, and kernels want 256.
_ALIGNMENT = 256


class Part(NamedTuple):
    """Bytes of a weight that lie in one piece.  ``owner``: its rank's place.  ``begin``: in the weight.  ``offset``: in the
    piece."""

    owner: int
    begin: int
    offset: int
    nbytes: int


def piece_bytes(nbytes: int, ranks: int) -> int:
    """Bytes of each rank's piece of a weight; a multiple of 256."""
    part = _part(ranks)
    stripes, rest = divmod(nbytes, ranks * part)
    return stripes * part + _aligned(-(-rest // ranks))


def parts(begin: int, end: int, nbytes: int, ranks: int, first: int = 0) -> Iterator[Part]:
    """What bytes ``[begin, end)`` of a weight consist of: in each stripe from rank ``first`` on, and round."""
    part = _part(ranks)
    stripe = ranks * part
    for start in range(begin // stripe * stripe, end, stripe):
        length = min(part, _aligned(-(-(nbytes - start) // ranks)))
        for i in range(ranks):
            owner = (first + i) % ranks
            lowest = start + owner * length
            low, high = max(begin, lowest), min(end, lowest + length, nbytes)
            if low < high:
                yield Part(owner, low, start // ranks + low - lowest, high - low)


def from_others(begin: int, end: int, nbytes: int, ranks: int) -> int:
    """How many of bytes ``[begin, end)`` a rank pulls from the others: the rank that has the fewest of them itself."""
    own = [0] * ranks
    for part in parts(begin, end, nbytes, ranks):
        own[part.owner] += part.nbytes
    return end - begin - min(own)


def _part(ranks: int) -> int:
    """Bytes of a part of a whole stripe."""
    return _aligned(-(-STRIPE // ranks))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
