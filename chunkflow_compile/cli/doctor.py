"""``chunkflow doctor``: describes this machine, what is missing on it, and how to get it."""

from __future__ import annotations

import argparse

from chunkflow_compile import __version__
from chunkflow_compile.catalog.presets import weight_bytes
from chunkflow_compile.hardware.machine import Machine, look
from chunkflow_compile.hardware.profiles import MEASURED, load_profile, profile_of_card
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.lowering.tensorrt import why_not_tensorrt
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.report.health import Finding, copy_rates, engines, findings, health_table, host_memory_for

from .output import called, say, write_json


def run(arguments: argparse.Namespace) -> int:
    if arguments.ranks < 1:
        raise ChunkflowError("--ranks must be at least 1.")
    machine = look()
    rates = copy_rates(_profile(machine), max(arguments.ranks, len(machine.gpus)), called())
    ours = Finding("chunkflow-compile", __version__)
    listed = (ours, *findings(machine, called()), rates, engines(why_not_tensorrt()))
    if arguments.model is not None:
        ranks = arguments.ranks
        read_time = ReadTime.here(weight_bytes(arguments.model))
        listed += (host_memory_for(arguments.model, read_time, ranks, machine.memory, machine.host_copies(ranks)),)
    say(arguments, health_table(listed))
    write_json(arguments, listed)
    return 1 if any(f.verdict == "missing" for f in listed) else 0


def _profile(machine: Machine) -> Hardware | None:
    """Return the profile of the first GPU or, without a GPU, the profile that was measured on this machine; None if
    neither exists, or if its file is damaged."""
    try:
        name = profile_of_card(machine.gpus[0].name) if machine.gpus else MEASURED if machine.profile else None
        return None if name is None else load_profile(name)
    except ChunkflowError:
        return None
