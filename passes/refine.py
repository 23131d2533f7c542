"""Refine: hill climbing over single chunks, for short programs, where one chunk more or less is a large share.

Long programs are left as the search has them: their chunks are many and small beside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .search import Candidate, Planner

# Each move plays the timeline; programs of more chunks than this would take longer than they gain.
MOST_CHUNKS = 24
_MOST_PLAYS = 600


def refine(planner: Planner, found: Candidate, cost: Callable[[Candidate], tuple[Any, ...]]) -> Candidate:
    """The best neighbour of the best neighbour ... of ``found``, by ``cost``: window by window, chunk by chunk."""
    if len(planner.chunks) > MOST_CHUNKS:
        return found
    best, best_cost, plays = found, cost(found), 0
    improved = True
    while improved and plays < _MOST_PLAYS:
        improved = False
        for placed in _neighbours(planner, best):
            plays += 1
            tried = planner.play(placed, best.hard)
            if (tried_cost := cost(tried)) < best_cost:
                best, best_cost, improved = tried, tried_cost, True
                break
            if plays >= _MOST_PLAYS:
                break
    return best


def _neighbours(planner: Planner, best: Candidate) -> Iterator[list[int | None]]:
    for i, (chunk, window) in enumerate(zip(planner.chunks, best.placed, strict=True)):
        earliest = chunk.last + 1 - planner.count
        for other in (None, *range(chunk.first, earliest - 1, -1)):
            if other != window:
                yield [*best.placed[:i], other, *best.placed[i + 1 :]]
    kept = [i for i, w in enumerate(best.placed) if w is None]
    streamed = [i for i, w in enumerate(best.placed) if w is not None]
    for i in (*kept, *streamed):  # one chunk leaves or comes late, another stays or comes early in its place
        for j in streamed:
            if i != j:
                chunk, other = planner.chunks[i], planner.chunks[j]
                late = chunk.first if i in streamed else max(chunk.first - 1, chunk.last + 1 - planner.count)
                early = max(other.first - 1, other.last + 1 - planner.count) if i in streamed else None
                swapped = list(best.placed)
                swapped[i], swapped[j] = late, early
                yield swapped
