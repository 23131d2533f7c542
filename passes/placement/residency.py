"""Residency: in which order chunks should stay on the device, by the stall that each saves.

A region that waits for its weights would wait less by the copy time of each of them that stays.  What is more than its
own weights can save is owed to the regions before it, whose copies hold up the queue.  Among weights that save alike
the order is a golden-ratio sequence over the step: every prefix of it is spread evenly over the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from .windows import Chunk

# frac(i * this): of all sequences the one whose prefixes leave the most even gaps (three-distance theorem).
_GOLDEN = 0.6180339887498949


def rank(chunks: Sequence[Chunk], stalls: Mapping[int, float]) -> list[int]:
    """Indices of ``chunks`` (in order of use), the ones to keep first in front; whole weights at a time.

    ``stalls``: region -> seconds that it waits for its weights when little is fetched ahead.
    """
    share = _useful_share(chunks, stalls)
    keyed: list[tuple[float, list[int]]] = []
    for i, (_, group) in enumerate(groupby(range(len(chunks)), key=lambda j: chunks[j].weight)):
        members = list(group)
        q, r = (i * _GOLDEN) % 1.0, share.get(chunks[members[0]].first, 0.0)
        keyed.append((q / r if q < r else 1 + (q - r) / (1 - r + 1e-9), members))
    return [j for _, members in sorted(keyed) for j in members]


def _useful_share(chunks: Sequence[Chunk], stalls: Mapping[int, float]) -> dict[int, float]:
    """Region -> the part of its weights' copy time that would save stall."""
    copy: dict[int, float] = {}
    for chunk in chunks:
        copy[chunk.first] = copy.get(chunk.first, 0.0) + chunk.seconds
    useful, owed = dict.fromkeys(copy, 0.0), 0.0
    for _ in range(2):  # twice around, so that what the first regions owe reaches the last
        for k in sorted(copy, reverse=True):
            owed += stalls.get(k, 0.0) if useful[k] == 0.0 else 0.0
            taken = min(owed, copy[k] - useful[k])
            useful[k] += taken
            owed -= taken
    return {k: min(1.0, useful[k] / copy[k]) for k in copy}
