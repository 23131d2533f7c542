"""Exchanging: into how many groups of heads the exchanges around attention are divided, by the predicted step.

Contract
    On entry: a Traced, and how it is cut and planned.
    On exit: the number of groups, the same for all blocks, and why it is that one in a sentence.  More groups than one are
    chosen only if they make the predicted step shorter by :data:`LEAST_GAIN`.

Which numbers are worth a plan is found with all weights resident, where a step takes a moment to predict.
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

# Share of the step that groups must be predicted to save.  Predictions are off by as much.
LEAST_GAIN = 0.03
# More groups than these hide at most a sixteenth more of the exchanges, and their attention is in kernels of few heads.
MOST_GROUPS = 8


@dataclass(frozen=True)
class GroupChoice:
    """``groups``: the number, 1 if exchanges stay whole.  ``why``: a clause."""

    groups: int
    why: str


def choose_groups(
    traced: Traced, resident_s: Callable[[Traced], float], planned: Callable[[Traced], Plan]
) -> GroupChoice:
    """The number of groups for a graph.

    ``resident_s``: predicts the step of a graph with all weights resident.  ``planned``: cuts and plans a graph; raises
    ChunkflowError if no plan meets the goal.
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
    """The number of groups with the shortest step, its graph and step, and the step with whole exchanges.

    A number with a longer step than whole exchanges ends the search: with more groups, kernels are smaller still.
    """
    whole_s, found = resident_s(traced), list[tuple[float, int, Traced]]()
    for count, graph in divided:
        found.append((resident_s(graph), count, graph))
        if found[-1][0] > whole_s:
            break
    step_s, count, graph = min(found, key=lambda each: each[:2])
    return count, graph, step_s, whole_s


def _compared(traced: Traced, divided: Traced, groups: int, planned: Callable[[Traced], Plan]) -> GroupChoice:
    """The choice between whole exchanges and groups, under the goal."""
    found = dict[int, float]()
    for count, graph in ((1, traced), (groups, divided)):
        try:
            plan = planned(graph)
        except ChunkflowError:  # the other may fit
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
    """The number of groups with which a graph is the problem with the digest ``problem``; 1 if there is none.

    ``digest``: returns the digest of the problem of a graph.
    """
    with contextlib.suppress(NoGroups):
        for count in possible_groups(traced):
            if digest(in_head_groups(traced, count)) == problem:
                return GroupChoice(count, "the given plan or times are for them")
    return GroupChoice(1, "the given plan or times are for whole exchanges")
