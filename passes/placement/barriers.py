"""Barriers: where compute waits for copies before a collective, so that copies do not overlap with collectives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chunkflow_compile.passes.plan import Barrier
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.step import Step, copies


def barriers(problem: Problem, step: Step, lanes: Sequence[Collection[str]]) -> tuple[Barrier, ...]:
    """Return the barriers of a step, at most one per collective.  At a barrier, compute waits, in each lane, for the newest
    copy that was issued since the previous barrier.  The copies of a lane run in order, so all copies before the newest one
    have then ended, too.

    ``lanes``: weights of each lane.  For the first collective of a step, the newest copy may be from the previous step.
    """
    lane_of = {name: lane for lane, names in enumerate(lanes) for name in names}
    moved = [(copy.window or 0, copy.weight) for copy in copies(step) if copy.weight in lane_of]
    last = max((c.before for c in problem.collectives), default=0)
    newest = {lane_of[weight]: weight for window, weight in moved if window >= last}
    placed, at = list[Barrier](), 0
    for collective in sorted(problem.collectives, key=lambda c: c.before):
        # Copies of later windows are issued only after this collective has started.
        while at < len(moved) and moved[at][0] < collective.before:
            newest[lane_of[moved[at][1]]] = moved[at][1]
            at += 1
        if newest:
            weights = tuple(newest[lane] for lane in sorted(newest))
            placed.append(Barrier(collective=collective.name, weights=weights))
            newest = {}
    return tuple(placed)
