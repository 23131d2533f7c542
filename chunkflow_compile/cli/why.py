"""``chunkflow why``: one weight's story."""

from __future__ import annotations

import argparse

from chunkflow_compile.cli import target
from chunkflow_compile.passes.pipeline import make_plan
from chunkflow_compile.report.story import alternatives, changed, find_weight, tell

from .output import Progress, say, write_json


def run(arguments: argparse.Namespace) -> int:
    progress = Progress(3)
    found = target.load_target(arguments, progress)
    name = find_weight(found.problem, arguments.param)
    with progress.phase("planning"):
        target.note_rates(found)
        plan = found.plan()
    weight = next(w for w in found.problem.weights if w.name == name)
    changes = []
    with progress.phase("planning alternatives"):
        # No plan moves a weight that must stay; its reason says why it must.
        for what, settings in alternatives(found.settings, weight.drive) if weight.keep is None else ():
            changes.append(changed(name, what, lambda s=settings: make_plan(found.problem, s, inside=found.regional)))  # type: ignore[misc]
    story = tell(found.problem, plan, name, changes)
    say(arguments, f"{found.heading}\n\n{story}")
    write_json(arguments, story)
    return 0
