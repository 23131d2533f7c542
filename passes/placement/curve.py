"""Curve: predicted step time against memory, one point per chunk of memory.

There are two series of candidates.  In the first series, the number of resident chunks varies, and there is no limit on
the memory for the other chunks.  In the second series, no chunks are resident, and the limit becomes smaller and
smaller.  Each candidate is simulated, and its slots are assigned.  A plan that fits in a budget also fits in every
larger budget.  So each point of the curve is the shortest step time of all plans that fit, and the curve never rises.
At the end of the curve, all weights are resident.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import Problem

from .place import PlanBuilder
from .search import ROUNDING, Planner
from .timeline import Simulator


@dataclass(frozen=True, order=True)
class Point:
    """A point of the curve.  ``memory``: bytes of weights on the device.  ``step_s``: step time with this memory.
    ``resident_step_s``: step time with all weights resident."""

    memory: int
    step_s: float
    resident_step_s: float


def plans_along(problem: Problem, hardware: Hardware, chunk_bytes: int, arena: int = 0) -> Iterator[Point]:
    """Yield the points of all plans tried, in arbitrary order, so that a caller can show progress.  ``arena``: see place."""
    outside = problem.unpacked_bytes  # as in place
    planner = Planner(problem, Simulator(problem, hardware, chunk_bytes), outside=outside, arena=arena)
    builder = PlanBuilder(planner, arena=arena)
    resident = planner.resident.step_s
    natural = planner.candidate(0, None)
    assert natural is not None
    room = natural.nbytes
    tried = [natural, planner.play([c.first for c in planner.chunks])]
    while (room := room - chunk_bytes) >= planner.floor():
        tried += [c for hard in (False, True) if (c := planner.within(room, 0, hard)) is not None]
    for candidate in tried:
        yield Point(builder.slots(candidate, quick=True), candidate.step_s, resident)
    for residents in range(1, len(planner.chunks)):
        both = [c for hard in (False, True) if (c := planner.candidate(residents, None, hard)) is not None]
        for candidate in both:
            yield Point(builder.slots(candidate, quick=True), candidate.step_s, resident)
        if both[-1].step_s <= resident * (1 + ROUNDING):
            break
    yield Point(problem.total_bytes + problem.piece_bytes + outside + arena, resident, resident)


def on_grid(plans: Iterable[Point], chunk_bytes: int) -> list[Point]:
    """Return the curve as points one chunk of memory apart, beginning with the minimum memory.  Each point has the
    shortest step time for its memory.  At the last point, all weights are resident."""
    ordered = sorted(plans, key=lambda p: (p.memory, -p.step_s))  # in the last plan, all weights are resident
    points, best, i = [], ordered[0].step_s, 0
    memory, end = ordered[0].memory, ordered[-1]
    while memory < end.memory:
        while i < len(ordered) and ordered[i].memory <= memory:
            best = min(best, ordered[i].step_s)
            i += 1
        points.append(Point(memory, max(best, end.step_s), end.resident_step_s))
        memory += chunk_bytes
    return [*points, end]
