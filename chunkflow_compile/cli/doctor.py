"""``chunkflow doctor``: this machine, what is missing, and how to get it."""

from __future__ import annotations

import argparse

from chunkflow_compile.caches import settle
from chunkflow_compile.hardware.machine import look
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.lowering.tensorrt import why_not_tensorrt
from chunkflow_compile.models.presets import PRESETS, weight_bytes
from chunkflow_compile.report.health import engines, findings, health_json, health_table, room_for

from .output import add_json, check_json, say, write_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: what is missing, and how to get it",
        description="Checks torch, CUDA, the GPUs and their links, NUMA, host memory and how much of it can be pinned,\n"
        "gloo and NCCL, compilers and libraries.  With a model, also whether its weights fit into host memory.\n"
        "Exit code 1 if something that a run needs is missing.",
        epilog="example: chunkflow doctor wan2.2-ti2v-5b --ranks 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"what its weights take: {', '.join(PRESETS)}")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes of this machine that share them (default 1)"
    )
    add_json(parser, "the findings")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    machine = look()
    settle()
    found = (*findings(machine), engines(why_not_tensorrt()))
    if arguments.model is not None:
        read_time = ReadTime.here(weight_bytes(arguments.model))
        found += (room_for(arguments.model, read_time, arguments.ranks, machine),)
    say(arguments, health_table(found))
    write_json(arguments, health_json(found))
    return 1 if any(f.verdict == "missing" for f in found) else 0
