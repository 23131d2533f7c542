"""Residency: the order in which chunks should become resident, by the stall that each saves.

A resident weight shortens its region's stall by the weight's copy time.  If the stall is longer than all copies of the
region's own weights, the rest is charged to the regions before it, whose copies hold up the queue.  Weights that save
equally are ordered by a golden-ratio sequence over the step, so every prefix is spread evenly over the blocks.  Weights in
host memory come before those on the devices of the ranks: they save more seconds of the queue of copies for each byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from .windows import Chunk

# frac(i * this) is the sequence whose prefixes leave the most even gaps (three-distance theorem).
_GOLDEN = 0.6180339887498949


def rank(chunks: Sequence[Chunk], stalls: Mapping[int, float]) -> list[int]:
    """Indices of ``chunks``, the first to become resident first; the chunks of one weight are adjacent.

    ``chunks``: in order of use.  ``stalls``: region -> seconds that it waits for its weights when little is fetched
    ahead.
    """
    share = _useful_share(chunks, stalls)
    keyed: list[tuple[bool, float, list[int]]] = []
    for i, (_, group) in enumerate(groupby(range(len(chunks)), key=lambda j: chunks[j].weight)):
        members = list(group)
        q, r = (i * _GOLDEN) % 1.0, share.get(chunks[members[0]].first, 0.0)
        key = q / r if q < r else 1 + (q - r) / (1 - r + 1e-9)
        keyed.append((chunks[members[0]].use == "pull", key, members))
    return [j for *_, members in sorted(keyed) for j in members]


def _useful_share(chunks: Sequence[Chunk], stalls: Mapping[int, float]) -> dict[int, float]:
    """Region -> share of its weights' copy time that would save stall if they were resident."""
    copy: dict[int, float] = {}
    for chunk in chunks:
        copy[chunk.first] = copy.get(chunk.first, 0.0) + chunk.seconds
    useful, owed = dict.fromkeys(copy, 0.0), 0.0
    for _ in range(2):  # twice around the step, so that what is left at its first region reaches its last
        for k in sorted(copy, reverse=True):
            owed += stalls.get(k, 0.0) if useful[k] == 0.0 else 0.0
            taken = min(owed, copy[k] - useful[k])
            useful[k] += taken
            owed -= taken
    return {k: min(1.0, useful[k] / copy[k]) for k in copy}
