"""Simulate the program of a plan, and record the predicted step of a method that has no program."""

from __future__ import annotations

from dataclasses import dataclass

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.forms import joined
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.timeline import Simulator, Timeline
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.report.record import ArmRecord


def play_program(program: Program, hardware: Hardware, timings: Timings | None = None) -> Timeline:
    """Simulate a program operation by operation, independently of the prediction in its plan."""
    simulator = Simulator(program.problem, hardware, program.plan.chunk_bytes, timings)
    step = program.ops
    return simulator.play(joined(step) if program.plan.joins else step)


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """A predicted call.  ``timeline``: the simulated times.  In it, ``exposed_s`` is the time in which compute waits for
    weights that are copied or gathered, and ``collective_s`` includes the gathers of weights.  ``device_bytes``: the
    maximum bytes of weights on the device of each rank.  ``moved_bytes``: the bytes of weights that are copied or
    gathered to each device."""

    timeline: Timeline
    device_bytes: int
    moved_bytes: int

    def record(self, total_bytes: int, calls: int) -> ArmRecord:
        """Return the record of a step.  ``total_bytes``: the bytes of all weights.  ``calls``: the number of calls per
        step."""
        return ArmRecord(
            step_s=self.timeline.step_s * calls,
            exposed_h2d_s=self.timeline.exposed_s * calls,
            collective_s=self.timeline.collective_s * calls,
            weights_device_bytes=self.device_bytes,
            weights_total_bytes=total_bytes,
            moved_bytes_per_step=self.moved_bytes * calls,
        )
