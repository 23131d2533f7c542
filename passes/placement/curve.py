"""Curve: the predicted step time as a function of the weight memory.  Points of the curve are one chunk of memory apart.

The points come from two series of candidates (placements of all chunks).  In the first series, no chunk is resident, and the
memory limit for streamed chunks decreases.  In the second series, the number of resident chunks increases, and there is no
limit for the other chunks.  Each candidate is simulated, and its slots are assigned.  Each point of the curve is the shortest
step time of all plans that fit in its memory, so the curve never rises.  At the last point, all weights are resident.
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
    """A point of the curve.  ``memory``: weight bytes on the device.  ``step_s``: predicted step time with this memory.
    ``resident_step_s``: predicted step time with all weights resident."""

    memory: int
    step_s: float
    resident_step_s: float


def plans_along(problem: Problem, hardware: Hardware, chunk_bytes: int, arena: int = 0) -> Iterator[Point]:
    """Yield a point for each plan that is tried, so that a caller can show progress.  The points are in no particular
    order.  ``arena``: see :func:`place`."""
    external_bytes = problem.unpacked_bytes  # as in place
    planner = Planner(problem, Simulator(problem, hardware, chunk_bytes), external_bytes=external_bytes, arena=arena)
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
    yield Point(problem.total_bytes + problem.piece_bytes + external_bytes + arena, resident, resident)


def on_grid(plans: Iterable[Point], chunk_bytes: int) -> list[Point]:
    """Return the points of the curve.  ``plans``: points from :func:`plans_along`."""
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
