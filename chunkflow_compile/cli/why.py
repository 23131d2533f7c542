"""``chunkflow why``: one weight's story."""

from __future__ import annotations

import argparse
from functools import partial

from chunkflow_compile.cli import target
from chunkflow_compile.passes.pipeline import make_plan
from chunkflow_compile.report.story import changes, find_weight, tell

from .output import Progress, say, write_json


def run(arguments: argparse.Namespace) -> int:
    progress = Progress(3)
    found = target.load_target(arguments, progress)
    weight = find_weight(found.problem, arguments.param)
    with progress.phase("planning"):
        target.note_rates(found)
        plan = found.plan()
    with progress.phase("planning alternatives"):
        plan_for = partial(make_plan, found.problem, inside=found.regional)
        story = tell(weight, plan, changes(weight, found.settings, plan_for))
    say(arguments, f"{found.heading}\n\n{story}")
    write_json(arguments, story)
    return 0
