"""Residency: orders chunks by the stall time that each saves if it becomes resident.

A resident weight shortens the stall of its first reader by the copy time of the weight.  If compute stalls before a region
for longer than the copies of the region's weights take, copies for earlier regions cause the rest of the stall.  This rest is
attributed to these earlier regions.  Weights that save the same stall time are ordered by a golden-ratio sequence over the
step, so that every prefix of the order is spread evenly over the blocks.  Weights that are copied from host memory come
before sharded weights, because they save more copy time per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from .windows import Chunk

# The sequence frac(i * _GOLDEN) has the most evenly spread prefixes (three-distance theorem).
_GOLDEN = 0.6180339887498949


def rank(chunks: Sequence[Chunk], stalls: Mapping[int, float]) -> list[int]:
    """Return the indices of ``chunks`` in the order in which they should become resident.  The chunks of a weight are
    adjacent in this order.

    ``chunks``: chunks in order of first use.  ``stalls``: for each region, the seconds for which compute waits for the
    region's weights if copies are hardly ahead of compute.
    """
    share = _useful_share(chunks, stalls)
    keyed: list[tuple[bool, float, list[int]]] = []
    for i, (_, group) in enumerate(groupby(range(len(chunks)), key=lambda j: chunks[j].weight)):
        members = list(group)
        q, r = (i * _GOLDEN) % 1.0, share.get(chunks[members[0]].first, 0.0)
        key = q / r if q < r else 1 + (q - r) / (1 - r + 1e-9)
        keyed.append((chunks[members[0]].lane == "pull", key, members))
    return [j for *_, members in sorted(keyed) for j in members]


def _useful_share(chunks: Sequence[Chunk], stalls: Mapping[int, float]) -> dict[int, float]:
    """Map each region to the stall time that disappears if the weights of the region are resident, as a share of their
    copy time."""
    copy: dict[int, float] = {}
    for chunk in chunks:
        copy[chunk.first] = copy.get(chunk.first, 0.0) + chunk.seconds
    useful, owed = dict.fromkeys(copy, 0.0), 0.0
    for _ in range(2):  # the second round attributes stall time that is left at the first region to the last regions
        for k in sorted(copy, reverse=True):
            owed += stalls.get(k, 0.0) if useful[k] == 0.0 else 0.0
            taken = min(owed, copy[k] - useful[k])
            useful[k] += taken
            owed -= taken
    return {k: min(1.0, useful[k] / copy[k]) for k in copy}
