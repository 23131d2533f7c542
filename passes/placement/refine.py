"""Refine: hill climbing over single chunks, for short programs, where one chunk is a large share of the step.

At a local optimum it restarts from a random neighbour of a neighbour, a few times, with a fixed seed.  Long programs
are left as the search found them: their chunks are many, and small beside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random

from .search import ROUNDING, SAME_STEP, Candidate, Planner

# Each move plays the timeline; with more chunks than this, planning takes longer than it gains.
MOST_CHUNKS = 16
_MOST_PLAYS = 1600
_KICKS = 12

Cost = Callable[[Candidate], tuple[float, ...]]
# The least that a candidate costs, by its bytes before slots are assigned and the least seconds of its step.
Bound = Callable[[int, float], tuple[float, ...]]
Improve = Callable[[Planner, Candidate, Cost, Bound], Candidate]


def refine(planner: Planner, found: Candidate, cost: Cost, bound: Bound) -> Candidate:
    """The cheapest candidate, by ``cost``, that climbing from ``found`` reaches.

    ``bound``: spares most candidates the timeline and the assignment of slots.
    """
    if not 0 < len(planner.chunks) <= MOST_CHUNKS:
        return found
    climber = _Climber(planner, cost, bound)
    best, best_cost = climber.climb(found)
    numbers = Random(0)
    for _ in range(_KICKS):
        if climber.plays == _MOST_PLAYS or climber.enough(best_cost):
            break
        kicked = best
        for _ in range(2):
            kicked = planner.play(numbers.choice(list(_neighbours(planner, kicked))), best.hard)
        tried, tried_cost = climber.climb(kicked)
        if tried_cost < best_cost:
            best, best_cost = tried, tried_cost
    return best


def unrefined(planner: Planner, found: Candidate, cost: Cost, bound: Bound) -> Candidate:
    """``found``, unchanged: replaces refine where it is disabled."""
    return found


class _Climber:
    def __init__(self, planner: Planner, cost: Cost, bound: Bound) -> None:
        self.planner = planner
        self.cost = cost
        self.bound = bound
        self.plays = 0
        # No copy makes a step shorter.
        self.least_s = planner.resident.step_s * (1 - ROUNDING)
        # Climbs meet.
        self.played: dict[tuple[int | None, ...], Candidate] = {}
        self.costs: dict[tuple[int | None, ...], tuple[float, ...]] = {}

    def climb(self, best: Candidate) -> tuple[Candidate, tuple[float, ...]]:
        """The first candidate that no neighbour beats, or the best after _MOST_PLAYS plays, and its cost."""
        best_cost = self.cost(best)
        improved = True
        while improved and not self.enough(best_cost):
            improved = False
            for placed in _neighbours(self.planner, best):
                if self.plays == _MOST_PLAYS:
                    return best, best_cost
                self.plays += 1
                tried = self.beats(placed, best.hard, best_cost)
                if tried is not None:
                    (best, best_cost), improved = tried, True
                    break
        return best, best_cost

    def enough(self, cost: tuple[float, ...]) -> bool:
        """Whether nothing can be better: the goal is met, with the least bytes and the shortest step.

        The goal that comes last may be missed by what counts as nothing.
        """
        least, resident = self.planner.floor(), self.planner.resident.step_s
        best, same = self.bound(least, resident * (1 + ROUNDING)), self.bound(least, resident * (1 + SAME_STEP))
        return cost[0] <= best[0] and cost[1] <= best[1] and cost[2] <= same[2]

    def beats(
        self, placed: list[int | None], hard: bool, best_cost: tuple[float, ...]
    ) -> tuple[Candidate, tuple[float, ...]] | None:
        """The placement and its cost, None if it does not cost less than ``best_cost``."""
        key = tuple(placed)
        tried = self.played.get(key)
        if tried is None:
            if self.bound(self.planner.nbytes(placed), self.least_s) >= best_cost:
                return None
            tried = self.played[key] = self.planner.play(placed, hard)
        if self.bound(tried.nbytes, tried.step_s) >= best_cost:
            return None
        if key not in self.costs:
            self.costs[key] = self.cost(tried)
        return (tried, self.costs[key]) if self.costs[key] < best_cost else None


def _neighbours(planner: Planner, best: Candidate) -> Iterator[list[int | None]]:
    for i, (chunk, window) in enumerate(zip(planner.chunks, best.placed, strict=True)):
        earliest = chunk.last + 1 - planner.count
        for other in (None, *range(chunk.first, earliest - 1, -1)):
            if other != window:
                yield [*best.placed[:i], other, *best.placed[i + 1 :]]
    kept = [i for i, w in enumerate(best.placed) if w is None]
    streamed = [i for i, w in enumerate(best.placed) if w is not None]
    ahead = [max(c.first - 1, c.last + 1 - planner.count) for c in planner.chunks]
    # Swaps: one chunk becomes streamed or starts late, another becomes resident or starts early.
    for i in (*kept, *streamed):
        late = [planner.chunks[i].first, *([ahead[i]] if i in kept else [])]
        for j in streamed:
            early = [None, *([ahead[j]] if i in streamed else [])]
            for window, other in product(late, early) if i != j else ():
                swapped = list(best.placed)
                swapped[i], swapped[j] = window, other
                yield swapped
