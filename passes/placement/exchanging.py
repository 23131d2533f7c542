"""Exchanging: into how many groups of heads the exchanges around attention are divided, by the predicted step.

Contract
    On entry: a Traced, and how it is cut and planned.
    On exit: the number of groups, the same for all blocks, and why it is that one in a sentence.  More groups than one are
    chosen only if they make the predicted step shorter by :data:`LEAST_GAIN`.

Which numbers are worth a plan is found with all weights resident, where a step takes a moment to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        numbers = [count for count in possible_groups(traced) if count <= MOST_GROUPS]
        if not numbers:
            return GroupChoice(1, "the ranks exchange no heads, or one head each")
        divided = {count: in_head_groups(traced, count) for count in numbers}
    except NoGroups as error:
        return GroupChoice(1, f"{str(error)[:1].lower()}{str(error)[1:].removesuffix('.')}")
    whole_s = resident_s(traced)
    steps = {count: resident_s(graph) for count, graph in divided.items()}
    best = min(steps, key=lambda count: (steps[count], count))
    if steps[best] > (1 - LEAST_GAIN) * whole_s:
        return GroupChoice(1, f"{best} groups are predicted to take {_relative(steps[best], whole_s)} of the step")
    return _compared(traced, divided[best], best, planned)


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


def given_groups(traced: Traced) -> Iterator[tuple[int, Traced]]:
    """The graph with each number of groups that it may have, whole exchanges first."""
    yield 1, traced
    for count in possible_groups(traced):
        yield count, in_head_groups(traced, count)
