"""Goals: what users give becomes one, and nothing below takes its fields one by one."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from chunkflow_compile.option_parsing import parse_options
from chunkflow_compile.options import Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import DEFAULT_GOAL, Goal

ROOT = Path(__file__).parents[2]


def test_the_options_make_one_goal() -> None:
    given = {"memory": "8GiB", "yield": "hard", "pack": "auto"}
    assert parse_options(given).goal == Goal(memory=8 << 30, activations=True, yields="hard", pack="auto")
    assert parse_options(given).settings().goal == parse_options(given).goal
    assert Options().goal == DEFAULT_GOAL and Goal(slowdown=1.3).longest == 1.3 and DEFAULT_GOAL.longest == 1.02


def test_a_budget_is_for_weights_and_activations_or_for_weights_alone() -> None:
    both, alone = Options(memory="8GiB").goal, Options(weight_memory="8GiB").goal
    assert (both.memory, both.option, both.counted(5)) == (8 << 30, "memory", 5)
    assert (alone.memory, alone.option, alone.counted(5)) == (8 << 30, "weight_memory", 0)
    assert alone == Goal(memory=8 << 30) and alone.aimed_at(both) == both == replace(alone, activations=True)
    with pytest.raises(
        ChunkflowError, match="Give memory, for weights and activations, or weight_memory, for weights "
    ):
        Options(memory="8GiB", weight_memory="4GiB")
    with pytest.raises(ChunkflowError, match=r"^weight_memory='much' is not a size"):
        Options(weight_memory="much")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"memory": 100, "slowdown": 2.0}, r"memory or slowdown, not both"),  # and not that 100 has no unit
        ({"slowdown": 0.5}, "slowdown=0.5 is below 1"),
        (
            {"policy": "resident", "yields": "hard"},
            "Policy resident has one plan only: yield=hard would change nothing",
        ),
        ({"policy": "layerwise", "slowdown": 1.5}, "Policy layerwise has one plan only: slowdown=1.5 would change"),
    ],
)
def test_there_is_no_goal_that_contradicts_itself(fields: dict[str, object], said: str) -> None:
    for make in (Goal, Options):
        with pytest.raises(ChunkflowError, match=said):
            make(**fields)  # type: ignore[arg-type]


def test_another_aim_keeps_what_the_user_wants_of_weights() -> None:
    goal = Goal(slowdown=1.5, yields="hard", pack=frozenset({"a"}), peers="auto")
    assert goal.aimed_at(None) is goal
    assert goal.aimed_at(Goal(memory=5)) == replace(goal, slowdown=None, memory=5)
    layerwise = goal.aimed_at(Goal(policy="layerwise"))
    assert layerwise == Goal(policy="layerwise", pack=goal.pack, peers="auto"), "such a plan depends on no yield"
    assert layerwise.aimed_at(DEFAULT_GOAL) == replace(DEFAULT_GOAL, pack=goal.pack, peers="auto")


def test_a_goal_is_passed_on_whole() -> None:
    """Only what users call takes its fields, and what makes a goal of them."""
    fields, found = {"memory", "weight_memory", "slowdown", "policy", "yields"}, set[str]()
    for path in (path for package in ("chunkflow_compile", "passes") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                names = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                if len(fields & names) > 1:
                    found.add(getattr(node, "name", f"lambda in {path.name}, line {node.lineno}"))
    assert found == {"given", "replan"}
