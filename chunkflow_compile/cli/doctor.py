"""``chunkflow doctor``: this machine, what is missing, and how to get it."""

from __future__ import annotations

import argparse

from chunkflow_compile.catalog.presets import weight_bytes
from chunkflow_compile.hardware.caches import settle
from chunkflow_compile.hardware.machine import look
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.lowering.tensorrt import why_not_tensorrt
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.health import engines, findings, health_table, room_for

from .output import called, say, write_json


def run(arguments: argparse.Namespace) -> int:
    if arguments.ranks < 1:
        raise ChunkflowError("--ranks must be at least 1.")
    machine = look()
    settle()
    listed = (*findings(machine, called()), engines(why_not_tensorrt()))
    if arguments.model is not None:
        read_time = ReadTime.here(weight_bytes(arguments.model))
        listed += (room_for(arguments.model, read_time, arguments.ranks, machine.memory),)
    say(arguments, health_table(listed))
    write_json(arguments, listed)
    return 1 if any(f.verdict == "missing" for f in listed) else 0
