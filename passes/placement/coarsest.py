"""Coarsest: finds the coarsest cut whose plan is about as good as the plan of the finest cut.

Contract
    On entry: the finest Cut, and a function that plans its problem and the problems of coarser cuts.
    On exit: the groups of regions (graph/coarsen.py) that form the coarsest cut whose predicted step is at most ``AS_GOOD``
    times as long as with the finest cut.  If the finest cut does not fit in the budget, the result is the coarsest cut
    that fits; a coarser cut may fit, because its activations can be smaller.  If plans are made for a step time, the memory
    is limited, too: the plan of the result may exceed the device bytes of the finest cut's plan by at most ``AS_GOOD - 1``
    times the bytes of all weights.  For a block that is compiled separately, the plans cover several repetitions of the
    block, with at most ``MOST_REGIONS`` regions.
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

# A plan is about as good as another plan if its predicted step is at most 0.5 % longer.  This margin is a tenth of the
# typical prediction error.
AS_GOOD = 1.005
# The limits to try for the bytes of streamed weights per region, from the coarsest cut to the finest.  None means that each
# block is one region; the other two limits divide large blocks into about two and four regions.
_MOST = (None, 256 << 20, 128 << 20)
# The maximum number of regions in a plan of several repetitions.  Planning 72 regions takes a third of a second on a slow
# core.
MOST_REGIONS = 72


class MakePlan(Protocol):
    """Plans a problem for a goal.  Raises ChunkflowError if there is no plan.  ``ends``: as in Plan.check_problem."""

    def __call__(self, problem: Problem, *, goal: Goal, ends: Sequence[int] | None = None) -> Plan: ...


def judged(finest: Problem, repeats: Repeats | None, goal: Goal, plan: MakePlan) -> Callable[[Problem], Plan]:
    """Return a function that plans the problem of any cut of a graph, so that cuts can be compared by their plans.  If the
    graph is a block that is compiled separately, the plan covers several repetitions of the block, and is made for the common
    goal of these blocks.  Otherwise the plan covers the graph alone, and is made for ``goal``.

    ``finest``: problem of the finest cut.  ``repeats``: the blocks that the graph stands for, or None for a whole model.
    ``plan``: function that plans a problem for a goal.
    """
    if repeats is None:
        return partial(plan, goal=goal)
    return partial(_in_turns, plan, repeats, finest)


def coarsest(finest: Cut, budget: bool, planned: Callable[[Problem], Plan]) -> Groups:
    """Return the groups of the coarsest cut that is about as good as the finest cut.

    ``planned``: function that plans a problem, see :func:`judged`.  ``budget``: whether plans are made for a budget; then
    only step times are compared.
    """
    best: Plan | None = None
    for groups in candidates(finest):
        if groups == apart(finest):
            break
        problem = merged(finest, groups)
        try:
            best = best or planned(finest.problem)
        except ChunkflowError:  # a coarser cut may still fit in the budget if its activations are smaller
            if problem.live_bytes >= finest.problem.live_bytes:
                break
        with contextlib.suppress(ChunkflowError):  # the weights of a region of this size may not fit in the budget
            plan = planned(problem)
            if best is None or _as_good(plan, best, budget):
                return groups
    return apart(finest)


def candidates(finest: Cut) -> Iterator[Groups]:
    """Yield the groups of regions to try, coarsest first."""
    yield from dict.fromkeys(grouped(finest, most) for most in _MOST)


def _as_good(plan: Plan, best: Plan, budget: bool) -> bool:
    assert plan.predicted is not None and best.predicted is not None
    total = sum(weight.nbytes for weight in plan.weights)
    smaller = budget or plan.device_bytes <= best.device_bytes + (AS_GOOD - 1) * total
    return smaller and plan.predicted.step_s <= AS_GOOD * best.predicted.step_s


def _in_turns(plan: MakePlan, repeats: Repeats, finest: Problem, problem: Problem) -> Plan:
    """Return the plan for several repetitions of a block that run one after the other.  ``problem``: problem of a single
    repetition."""
    count, goal = max(1, min(repeats.count, MOST_REGIONS // len(finest.regions))), repeats.goal
    if goal.memory is not None:
        # the plan covers only ``count`` of all repetitions, so it gets only the fraction ``count / repeats.count`` of the
        # memory for resident weights.  The memory for activations and for streamed weights does not depend on the number of
        # repetitions
        through, live = 2 * max(streamed_bytes(finest)), problem.live_bytes
        memory = through + max(0, repeats.weights(live) - through) * count // repeats.count
        goal = replace(goal, memory=min(goal.memory, goal.counted(live) + memory))
    size = len(problem.regions)
    return plan(repeated(problem, count), goal=goal, ends=range(size, count * size + 1, size))
