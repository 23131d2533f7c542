"""``chunkflow why``: explains what a plan does with one weight, and why."""

from __future__ import annotations

import argparse
from functools import partial

from chunkflow_compile.passes.planning import make_plan
from chunkflow_compile.report.story import Story, changes, find_weight, story_of
from chunkflow_compile.weights.progress import Progress

from .output import say, write_json
from .planned_model import PlannedModel
from .planning_arguments import load_target, note_rates


def run(arguments: argparse.Namespace) -> int:
    progress = Progress(3)
    target = load_target(arguments, progress)
    name = find_weight(target.problem if target.hoisted is None else target.raw, arguments.param).name
    hoisted = all(weight.name != name for weight in target.problem.weights)
    story = (_in_preamble if hoisted else _in_step)(target, name, progress)
    say(arguments, f"{target.heading_of(preamble=hoisted)}\n\n{story}")
    write_json(arguments, story)
    return 0


def _in_step(target: PlannedModel, name: str, progress: Progress) -> Story:
    """Return the story of a weight that is read in every step."""
    weight = find_weight(target.problem, name)
    with progress.phase("planning"):
        note_rates(target)
        plan = target.plan()
    with progress.phase("planning alternatives"):
        plan_for = partial(make_plan, target.problem, residents_in_arena=target.regional)
        return story_of(weight, plan, changes(weight, target.problem.ranks, target.settings_of_step, plan_for))


def _in_preamble(target: PlannedModel, name: str, progress: Progress) -> Story:
    """Return the story of a hoisted weight, which only the preamble reads."""
    with progress.phase("planning"):
        hoisting = target.hoisting
    assert hoisting is not None
    return story_of(find_weight(hoisting.preamble_cut.problem, name), hoisting.preamble_plan, ())
