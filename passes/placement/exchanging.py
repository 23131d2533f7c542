"""Exchanging: chooses, by the predicted step time, the number of groups of heads into which the exchanges (all-to-alls)
around attention are divided.

Contract
    On entry: a Traced, and functions that cut and plan it.
    On exit: the number of groups, which is the same for all blocks, and the reason as a clause.  Exchanges are divided
    only if this shortens the predicted step by at least the share :data:`LEAST_GAIN`.

First, steps with all weights resident are predicted for each number of groups, because this prediction is fast.  Then only
two plans are made and compared: one with the best number of groups, and one with undivided exchanges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.exchanges import NoGroups
from chunkflow_compile.passes.graph.head_groups import in_head_groups, possible_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.plan import Plan

# The minimum share of the step time that groups must be predicted to save.  Predictions have errors of this size.
LEAST_GAIN = 0.03
# The maximum number of groups.  With 8 groups, all exchanges can be hidden except one eighth.  With 16 groups, all except one
# sixteenth could be hidden, but each attention kernel would compute only a few heads.
MOST_GROUPS = 8


@dataclass(frozen=True)
class GroupChoice:
    """A number of groups and the reason for it.  ``groups``: 1 if the exchanges are not divided.  ``why``: reason, as a
    clause."""

    groups: int
    why: str


def choose_groups(
    traced: Traced, resident_s: Callable[[Traced], float], planned: Callable[[Traced], Plan]
) -> GroupChoice:
    """Choose the number of groups for a graph.

    ``resident_s``: function that predicts the step time of a graph, in seconds, with all weights resident.
    ``planned``: function that cuts and plans a graph; it raises ChunkflowError if no plan meets the goal.
    """
    try:
        possible = possible_groups(traced)
        if not possible:
            return GroupChoice(1, "the ranks exchange no heads, or one head each")
        numbers = [count for count in possible if count <= MOST_GROUPS]
        if not numbers:
            return GroupChoice(1, f"no number from 2 to {MOST_GROUPS} divides the heads of each rank")
        divided = ((count, in_head_groups(traced, count)) for count in numbers)
        best, graph, step_s, whole_s = _best(traced, divided, resident_s)
    except NoGroups as error:
        return GroupChoice(1, f"{str(error)[:1].lower()}{str(error)[1:].removesuffix('.')}")
    if step_s > (1 - LEAST_GAIN) * whole_s:
        return GroupChoice(1, f"{best} groups are predicted to take {_relative(step_s, whole_s)} of the step")
    return _compared(traced, graph, best, planned)


def _best(
    traced: Traced, divided: Iterable[tuple[int, Traced]], resident_s: Callable[[Traced], float]
) -> tuple[int, Traced, float, float]:
    """Find the number of groups with the shortest step.  Return this number, the graph with this number of groups, its step
    time, and the step time with undivided exchanges, in seconds.

    ``divided``: numbers of groups, ascending, each with its graph.  The search ends at the first number whose step is longer
    than with undivided exchanges, because more groups would make kernels even smaller.
    """
    whole_s, found = resident_s(traced), list[tuple[float, int, Traced]]()
    for count, graph in divided:
        found.append((resident_s(graph), count, graph))
        if found[-1][0] > whole_s:
            break
    step_s, count, graph = min(found, key=lambda each: each[:2])
    return count, graph, step_s, whole_s


def _compared(traced: Traced, divided: Traced, groups: int, planned: Callable[[Traced], Plan]) -> GroupChoice:
    """Choose between undivided exchanges and ``groups`` groups by the step times of their plans."""
    found = dict[int, float]()
    for count, graph in ((1, traced), (groups, divided)):
        try:
            plan = planned(graph)
        except ChunkflowError:  # the other graph may fit in the budget
            continue
        assert plan.predicted is not None
        found[count] = plan.predicted.step_s
    if groups not in found:
        return GroupChoice(1, f"{groups} groups do not fit the budget")
    if 1 not in found:
        return GroupChoice(groups, "whole exchanges do not fit the budget")
    said = f"{groups} groups are predicted to take {_relative(found[groups], found[1])} of the step"
    return GroupChoice(groups if found[groups] <= (1 - LEAST_GAIN) * found[1] else 1, said)


def _relative(step_s: float, whole_s: float) -> str:
    return f"{step_s / whole_s:.1%}" if whole_s else "100.0%"


def groups_of_problem(traced: Traced, problem: str, digest: Callable[[Traced], str]) -> GroupChoice:
    """Return the number of groups for which a plan or timings were made.  Return 1 if the plan or the timings do not match
    the graph with any number of groups.

    ``problem``: digest of the problem that the plan or timings contain.  ``digest``: function that returns the digest of a
    graph's problem; the exchanges of the graph have already been divided.
    """
    with contextlib.suppress(NoGroups):
        for count in possible_groups(traced):
            if digest(in_head_groups(traced, count)) == problem:
                return GroupChoice(count, "the given plan or times are for them")
    return GroupChoice(1, "the given plan or times are for whole exchanges")
