"""``chunkflow doctor``: this machine, what is missing, and how to get it."""

from __future__ import annotations

import argparse

from chunkflow_compile.hardware.machine import look
from chunkflow_compile.report.health import findings, health_json, health_table

from .output import add_json, check_json, say, write_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: what is missing, and how to get it",
        description="Checks torch, CUDA, the GPUs and their links, NUMA, host memory and how much of it can be pinned,\n"
        "gloo and NCCL, compilers and libraries.  Exit code 1 if something that a run needs is missing.",
        epilog="example: chunkflow doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser, "the findings")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    found = findings(look())
    say(arguments, health_table(found))
    write_json(arguments, health_json(found))
    return 1 if any(f.verdict == "missing" for f in found) else 0
