"""A program, simulated node by node; and the step of a way that has no program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.ops import Prefetch
from chunkflow_compile.passes.placement import schedule
from chunkflow_compile.passes.placement.schedule import ScheduleItem
from chunkflow_compile.passes.placement.timeline import Simulator, Timeline
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.rewrite import Program, program_items
from chunkflow_compile.passes.step import Copy, Evict, Finish, Op, Run, Start, Wait, joined
from chunkflow_compile.report.record import ArmRecord


def play_program(program: Program, hardware: Hardware, timings: Timings | None = None) -> Timeline:
    """Simulate a program node by node, independently of what its plan predicts."""
    simulator = Simulator(program.problem, hardware, program.plan.chunk_bytes, timings)
    step = tuple(op for _, item in program_items(program) for op in _op(item, program.plan))
    return simulator.play(joined(step) if program.plan.joins else step)


def _op(item: ScheduleItem | None, plan: Plan) -> Iterator[Op]:
    if isinstance(item, Prefetch):
        yield Copy(plan.lane(item.weight), *astuple(item))
    elif isinstance(item, schedule.Wait):
        yield Wait("compute", 0, (item.weight,))
    elif isinstance(item, schedule.Evict):
        yield Evict(item.weight)
    elif isinstance(item, schedule.Compute):
        yield Run(item.region)
    elif isinstance(item, schedule.Collect):
        yield Start(item.collective)
    elif isinstance(item, schedule.Await):
        yield Finish(item.collective)


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """A call, predicted.  ``timeline``: ``exposed_s`` is what compute waits for weights, as copied or gathered;
    ``collective_s`` counts gathers too.  ``device_bytes``: of weights, on each rank's device.  ``moved_bytes``: that it takes
    in."""

    timeline: Timeline
    device_bytes: int
    moved_bytes: int

    def record(self, total_bytes: int, calls: int) -> ArmRecord:
        """Of a step of so many calls.  ``total_bytes``: of all weights."""
        return ArmRecord(
            step_s=self.timeline.step_s * calls,
            exposed_h2d_s=self.timeline.exposed_s * calls,
            collective_s=self.timeline.collective_s * calls,
            weights_device_bytes=self.device_bytes,
            weights_total_bytes=total_bytes,
            moved_bytes_per_step=self.moved_bytes * calls,
        )
