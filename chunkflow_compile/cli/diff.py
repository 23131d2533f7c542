"""``chunkflow diff``: two plans side by side."""

from __future__ import annotations

import argparse

from chunkflow_compile.options import read_plan
from chunkflow_compile.report.plan_diff import diff_plans

from .output import add_json, check_json, say, write_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "diff",
        help="compare two plans",
        description="Weights that changed home or window, and step time and memory before and after.  Exit code 1 if\n"
        "the plans differ, as in diff.",
        epilog="example:\n"
        "  chunkflow plan wan2.2-ti2v-5b --ulysses 2 --json a.json\n"
        "  chunkflow plan wan2.2-ti2v-5b --ulysses 2 --memory 4GiB --json b.json\n"
        "  chunkflow diff a.json b.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A.json", help="a plan")
    parser.add_argument("after", metavar="B.json", help="another plan")
    add_json(parser, "the difference")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    found = diff_plans(read_plan(arguments.before), read_plan(arguments.after))
    say(arguments, str(found))
    write_json(arguments, found.to_json())
    return 0 if found.equal else 1
