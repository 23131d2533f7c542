"""``chunkflow why``: one weight's story."""

from __future__ import annotations

import argparse

from chunkflow_compile.cli import target
from chunkflow_compile.passes.pipeline import make_plan
from chunkflow_compile.report.story import alternatives, changed, find_weight, tell

from .output import Progress, add_json, check_json, say, write_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "why",
        help="explain why a weight is where it is, and what would change it",
        description="One weight's story: home, chunks, slot, when it is copied and read, slack, and what limits it.\n"
        "Plans again with one setting changed at a time, to show what would change it.",
        epilog="examples:\n"
        "  chunkflow why wan2.2-ti2v-5b blocks.3.ffn.net.2.weight --ulysses 2\n"
        "  chunkflow why wan2.2-ti2v-5b time_proj.weight --ulysses 2      # a part of the name, if only one has it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_arguments(parser, or_blocks=True)
    parser.add_argument("param", metavar="PARAM", help="name of the weight, or a part of it that no other name has")
    add_json(parser, "the story")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    progress = Progress(3)
    found = target.load(arguments, progress)
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
    write_json(arguments, story.to_json())
    return 0
