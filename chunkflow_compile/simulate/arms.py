"""Arms: one model on one machine under several policies, everything else the same; and a program, played as it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunkflow_compile.passes.discover import collective_kind, is_wait_tensor
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.ops import EVICT, WAIT, prefetch_of
from chunkflow_compile.passes.place import Policy, place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.rewrite import SOURCE, Program
from chunkflow_compile.passes.schedule import Await, Collect, Compute, Evict, Item, Wait
from chunkflow_compile.passes.timeline import Simulator, Timeline
from chunkflow_compile.report.record import ArmRecord


def arm_record(plan: Plan, problem: Problem, forwards: int) -> ArmRecord:
    """What a plan is expected to cost, in the terms of every other record: a denoising step of ``forwards`` calls."""
    predicted = plan.predicted
    assert predicted is not None
    return ArmRecord(
        step_s=predicted.step_s * forwards,
        exposed_h2d_s=predicted.exposed_s * forwards,
        collective_s=predicted.collective_s * forwards,
        weights_device_bytes=plan.device_bytes,
        weights_total_bytes=problem.total_bytes,
        moved_bytes_per_step=plan.moved_bytes * forwards,
        equal_to_resident=None,
    )


def plan_arms(
    problem: Problem,
    hardware: Hardware,
    policies: Sequence[Policy],
    *,
    chunk_bytes: int,
    memory: int | None = None,
    slowdown: float | None = None,
) -> dict[Policy, Plan]:
    """A plan for each policy; the goal is chunkflow's, the others have no choice.  Raises what ``place`` raises."""
    return {
        policy: place(
            problem,
            hardware,
            policy=policy,
            chunk_bytes=chunk_bytes,
            memory=memory if policy == "chunkflow" else None,
            slowdown=slowdown if policy == "chunkflow" else None,
        )
        for policy in policies
    }


def play_program(program: Program, hardware: Hardware) -> Timeline:
    """Plays a program node by node: what it says, whatever its plan expected."""
    simulator = Simulator(program.problem, hardware, program.plan.chunk_bytes)
    return simulator.play(tuple(_items(program)))


def _items(program: Program) -> Iterator[Item]:
    regions = {r.name: r.index for r in program.problem.regions}
    collectives = {c.name: i for i, c in enumerate(program.problem.collectives)}
    waits: list[str] = []
    for node in program.module.graph.nodes:
        if node.target is WAIT:
            waits.append(str(node.args[0]))
            continue
        yield from (Wait(weight, barrier=collective_kind(node) is not None) for weight in waits)
        waits.clear()
        if (prefetch := prefetch_of(node)) is not None:
            yield prefetch
        elif node.target is EVICT:
            yield Evict(str(node.args[0]))
        elif node.op == "call_module":
            yield Compute(regions[node.name])
        elif collective_kind(node) is not None:
            yield Collect(collectives[str(node.meta.get(SOURCE, node.name))])
        elif is_wait_tensor(node):
            started = node.all_input_nodes[0]
            started = started if collective_kind(started) is not None else started.all_input_nodes[0]
            yield Await(collectives[str(started.meta.get(SOURCE, started.name))])
