"""Arms: one model on one machine under several policies, all else equal; and a program, simulated node by node."""

from __future__ import annotations

from collections.abc import Sequence

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import Policy, Yield
from chunkflow_compile.passes.placement.place import BUDGETED, place
from chunkflow_compile.passes.placement.timeline import Simulator, Timeline
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.rewrite import Program, program_items
from chunkflow_compile.report.record import ArmRecord


def arm_record(plan: Plan, problem: Problem, forwards: int) -> ArmRecord:
    """The predicted cost of a plan as a record, per denoising step of ``forwards`` calls."""
    predicted = plan.predicted
    assert predicted is not None
    return ArmRecord(
        step_s=predicted.step_s * forwards,
        exposed_h2d_s=predicted.exposed_s * forwards,
        collective_s=predicted.collective_s * forwards,
        weights_device_bytes=plan.device_bytes,
        weights_total_bytes=problem.total_bytes,
        moved_bytes_per_step=plan.moved_bytes * forwards,
    )


def plan_arms(
    problem: Problem,
    hardware: Hardware,
    policies: Sequence[Policy],
    *,
    chunk_bytes: int,
    memory: int | None = None,
    slowdown: float | None = None,
    yields: Yield = "auto",
) -> dict[Policy, Plan]:
    """A plan for each policy.  Policies that accept no goal ignore it.  Raises what ``place`` raises."""
    return {
        policy: place(
            problem,
            hardware,
            policy=policy,
            chunk_bytes=chunk_bytes,
            memory=memory if policy in BUDGETED else None,
            slowdown=slowdown if policy == "chunkflow" else None,
            yields=yields if policy == "chunkflow" else "auto",
        )
        for policy in policies
    }


def play_program(program: Program, hardware: Hardware, timings: Timings | None = None) -> Timeline:
    """Simulate a program node by node, independently of what its plan predicts."""
    simulator = Simulator(program.problem, hardware, program.plan.chunk_bytes, timings)
    return simulator.play([item for _, item in program_items(program) if item is not None])
