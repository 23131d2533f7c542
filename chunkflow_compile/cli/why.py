"""``chunkflow why``: one weight's story."""

from __future__ import annotations

import argparse
from functools import partial

from chunkflow_compile.passes.pipeline import make_plan
from chunkflow_compile.report.story import changes, find_weight, tell
from chunkflow_compile.weights.progress import Progress

from .output import say, write_json
from .target import load_target, note_rates


def run(arguments: argparse.Namespace) -> int:
    progress = Progress(3)
    target = load_target(arguments, progress)
    weight = find_weight(target.problem, arguments.param)
    with progress.phase("planning"):
        note_rates(target)
        plan = target.plan()
    with progress.phase("planning alternatives"):
        plan_for = partial(make_plan, target.problem, inside=target.regional)
        story = tell(weight, plan, changes(weight, target.problem.ranks, target.settings, plan_for))
    say(arguments, f"{target.heading}\n\n{story}")
    write_json(arguments, story)
    return 0
