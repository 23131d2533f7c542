"""The number of groups of heads: chosen by the predicted step, or by a plan that is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import UlyssesStack, fake_ranks, plan_of

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut, groups_for, make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.exchanges import groups_of
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.placement.exchanging import GroupChoice, choose_groups
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, make_plan

PLAN = plan_of(make_cut(trace(torch.nn.Sequential(torch.nn.Linear(8, 8)), {"input": torch.randn(4, 8)}, 0)).problem)


@pytest.fixture(scope="module")
def whole() -> Traced:
    """Four heads on each of two ranks."""
    with fake_ranks():
        return trace(UlyssesStack(1, 32, 8), {"x": torch.randn(4, 32)}, 0)


def chosen(whole: Traced, resident: Mapping[int, float], planned: Mapping[int, float]) -> GroupChoice:
    """The choice if a step takes these seconds by the number of groups.  ``planned``: those that fit the goal."""

    def plan(graph: Traced) -> Plan:
        if (count := groups_of(graph.graph.graph.nodes)) not in planned:
            raise ChunkflowError("too little memory")
        assert PLAN.predicted is not None
        return replace(PLAN, predicted=replace(PLAN.predicted, step_s=planned[count]))

    return choose_groups(whole, lambda graph: resident[groups_of(graph.graph.graph.nodes)], plan)


@pytest.mark.parametrize(
    ("resident", "planned", "groups", "why"),
    [
        ({1: 1.0, 2: 0.9, 4: 0.8}, {1: 1.0, 4: 0.85}, 4, "4 groups are predicted to take 85.0% of the step"),
        ({1: 1.0, 2: 0.8, 4: 0.9}, {1: 1.0, 2: 0.99}, 1, "2 groups are predicted to take 99.0% of the step"),
        ({1: 1.0, 2: 0.98, 4: 1.1}, {}, 1, "2 groups are predicted to take 98.0% of the step"),
        ({1: 1.0, 2: 0.9, 4: 0.9}, {1: 1.0}, 1, "2 groups do not fit the budget"),
        ({1: 1.0, 2: 0.9, 4: 0.9}, {2: 1.0}, 2, "whole exchanges do not fit the budget"),
    ],
)
def test_the_shortest_predicted_step(
    whole: Traced, resident: dict[int, float], planned: dict[int, float], groups: int, why: str
) -> None:
    assert chosen(whole, resident, planned) == GroupChoice(groups, why)


def test_a_plan_decides(whole: Traced) -> None:
    """The groups are those with which the graph is the plan's problem."""
    settings = Settings(hardware=load_profile("cpu"), goal=Goal(exchange_groups=2))
    cut = choose_cut(whole, settings)
    plan = make_plan(cut.problem, settings)
    given = replace(settings, goal=Goal(exchange_groups="auto"), plan=plan)
    assert groups_for(whole, given) == GroupChoice(2, "the given plan or times are for them")
    assert choose_cut(whole, given).problem.digest == cut.problem.digest
    other = replace(given, plan=make_plan(make_cut(whole).problem, Settings(hardware=load_profile("cpu"))))
    assert choose_cut(whole, other).problem.exchange_groups == 1


def test_explicit_groups_that_exchange_nothing() -> None:
    alone = trace(torch.nn.Sequential(torch.nn.Linear(8, 8)), {"input": torch.randn(4, 8)}, 0)
    settings = Settings(hardware=load_profile("cpu"))
    for wanted in (False, 1, 2, "auto"):
        cut = choose_cut(alone, replace(settings, goal=Goal(exchange_groups=wanted)))  # type: ignore[arg-type]
        assert cut.problem.exchange_groups == 1
    assert groups_for(alone, settings).why == "the ranks exchange no heads, or one head each"


# The step with groups, as a share of the step with whole exchanges, that must be reached at most; None if groups must not be
# chosen.
FIGURES: list[tuple[str, int, str, dict[str, Any], float | None]] = [
    ("wan2.2-ti2v-5b", 2, "h100-pcie-x2", {}, 0.90),
    ("wan2.2-t2v-a14b", 4, "l40s-pcie", {"height": 720, "width": 1280}, 0.96),
    ("wan2.2-ti2v-5b", 2, "h100-nvlink", {}, None),
    ("wan2.2-t2v-a14b", 8, "h100-nvlink", {"height": 720, "width": 1280}, None),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "degree", "machine", "sizes", "most"), FIGURES)
def test_presets(name: str, degree: int, machine: str, sizes: dict[str, int], most: float | None) -> None:
    """Of four blocks, to which all others are equal, with all weights on the device."""
    known = PRESETS[name]
    known = replace(known, config={**known.config, "num_layers": 4})
    traced = known.trace(degree, replace(known.sizes, **sizes))
    settings = Settings(hardware=load_profile(machine), goal=Goal(policy="resident"))
    choice = groups_for(traced, settings)
    assert (choice.groups > 1) == (most is not None), choice
    if most is not None:
        steps = []
        for graph in (traced, in_head_groups(traced, choice.groups)):
            predicted = make_plan(choose_cut(graph, settings).problem, settings).predicted
            assert predicted is not None
            steps.append(predicted.step_s)
        assert steps[1] <= most * steps[0], (choice, steps[1] / steps[0])
