"""A program, simulated node by node."""

from __future__ import annotations

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.schedule import Join
from chunkflow_compile.passes.placement.timeline import Simulator, Timeline
from chunkflow_compile.passes.program.rewrite import Program, program_items


def play_program(program: Program, hardware: Hardware, timings: Timings | None = None) -> Timeline:
    """Simulate a program node by node, independently of what its plan predicts."""
    simulator = Simulator(program.problem, hardware, program.plan.chunk_bytes, timings)
    items = [item for _, item in program_items(program) if item is not None]
    return simulator.play([*items, Join()] if program.plan.joins else items)
