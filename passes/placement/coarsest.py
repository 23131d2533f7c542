"""Coarsest: how coarse a cut may be before its plan gets worse.

Contract
    On entry: a Cut at its finest, and how its problems are planned.
    On exit: the groups of regions (coarsen.py) of the coarsest cut whose predicted step is at most ``AS_GOOD`` times that of
    the finest one.  If the finest one does not fit, the coarsest cut that fits with fewer activations.  Where no budget was
    given, so that a plan is the smallest for its step, its bytes on the device may also be no more than that share of the
    weights above the finest one's.
    A part of a model is judged as its blocks in turns, at most ``MOST_REGIONS`` regions of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.coarsen import Groups, apart, grouped, merged, repeated, streamed_bytes
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Repeats
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem

# A tenth of what predictions are off by.
AS_GOOD = 1.005
# Bytes of streamed weights in a region, coarse first: a block whole, then halves and quarters of the large ones.
_MOST = (None, 256 << 20, 128 << 20)
# Planning them takes a third of a second on a slow core.
MOST_REGIONS = 72


class MakePlan(Protocol):
    """Plans a problem for a goal.  Raises ChunkflowError if there is no plan.  ``ends``: see Plan.check_problem."""

    def __call__(self, problem: Problem, *, goal: Goal, ends: Sequence[int] | None = None) -> Plan: ...


def judged(finest: Problem, repeats: Repeats | None, goal: Goal, plan: MakePlan) -> Callable[[Problem], Plan]:
    """Plans a problem of the cuts of a graph as it is going to run: by itself, or in turns with others of its kind.

    ``finest``: the problem of the finest cut.  ``repeats``: of a program that runs in turns, which is planned for the goal of
    all of them; any other is planned for ``goal``.
    """
    if repeats is None:
        return partial(plan, goal=goal)
    return partial(_in_turns, plan, repeats, finest)


def coarsest(finest: Cut, budget: bool, planned: Callable[[Problem], Plan]) -> Groups:
    """The groups of the coarsest cut that is about as good as the finest one.

    ``planned``: see :func:`judged`.  ``budget``: whether there is one.
    """
    best: Plan | None = None
    for groups in candidates(finest):
        if groups == apart(finest):
            break
        problem = merged(finest, groups)
        try:
            best = best or planned(finest.problem)
        except ChunkflowError:  # fewer activations may leave enough memory for larger regions
            if problem.live_bytes >= finest.problem.live_bytes:
                break
        with contextlib.suppress(ChunkflowError):  # too little memory for regions of this size
            plan = planned(problem)
            if best is None or _as_good(plan, best, budget):
                return groups
    return apart(finest)


def candidates(finest: Cut) -> Iterator[Groups]:
    """The cuts that are tried, coarse first."""
    yield from dict.fromkeys(grouped(finest, most) for most in _MOST)


def _as_good(plan: Plan, best: Plan, budget: bool) -> bool:
    assert plan.predicted is not None and best.predicted is not None
    total = sum(weight.nbytes for weight in plan.weights)
    smaller = budget or plan.device_bytes <= best.device_bytes + (AS_GOOD - 1) * total
    return smaller and plan.predicted.step_s <= AS_GOOD * best.predicted.step_s


def _in_turns(plan: MakePlan, repeats: Repeats, finest: Problem, problem: Problem) -> Plan:
    """The plan of programs of this problem in turns."""
    count, goal = max(1, min(repeats.count, MOST_REGIONS // len(finest.regions))), repeats.goal
    if goal.memory is not None:
        # activations, and what weights stream through, do not grow with their number
        through, live = 2 * max(streamed_bytes(finest)), problem.live_bytes
        memory = through + max(0, repeats.weights(live) - through) * count // repeats.count
        goal = replace(goal, memory=min(goal.memory, goal.counted(live) + memory))
    size = len(problem.regions)
    return plan(repeated(problem, count), goal=goal, ends=range(size, count * size + 1, size))
