"""``chunkflow diff``: two plans side by side."""

from __future__ import annotations

import argparse

from chunkflow_compile.options import read_plan
from chunkflow_compile.report.plan_diff import diff_plans

from .output import say, write_json


def run(arguments: argparse.Namespace) -> int:
    found = diff_plans(read_plan(arguments.before), read_plan(arguments.after))
    say(arguments, str(found))
    write_json(arguments, found)
    return 0 if found.equal else 1
