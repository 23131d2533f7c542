"""``chunkflow simulate``: compares the policies on a machine, without weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import HOST_YIELD, ONLY_PREDICTED, SHARDED, OnlyPredicted, Policy
from chunkflow_compile.passes.placement.place import BUDGETED
from chunkflow_compile.passes.placement.timeline import Timeline
from chunkflow_compile.passes.plan import Plan, Prediction
from chunkflow_compile.report.plan_tables import (
    exchange_sentence,
    hoisting_sentence,
    packing_sentence,
    part_of,
    peers_sentence,
)
from chunkflow_compile.report.record import ArmRecord, ComparisonRecord, prose, seconds, table
from chunkflow_compile.simulate.group_offload import play_group_offload
from chunkflow_compile.simulate.sharded import play_sharded, why_not
from chunkflow_compile.units import size
from chunkflow_compile.weights.progress import Progress

from .degrees import sweep
from .output import say, write_json
from .parsers import SIMULATED
from .planned_model import PlannedModel
from .planning_arguments import load_target, note_rates

# The policies that support neither packed weights nor weights sharded over peers (--peers).
_RAW = ("resident", *ONLY_PREDICTED)


def run(arguments: argparse.Namespace) -> int:
    if arguments.sweep_ulysses is not None:
        return sweep(arguments)
    if arguments.policy == "layerwise-prefix" and not (arguments.memory or arguments.weight_memory):
        raise ChunkflowError("Policy layerwise-prefix keeps what fits a budget: give --memory or --weight-memory.")
    for name in ("pack", "peers", "hoist"):
        if arguments.policy in _RAW and getattr(arguments, name) != "no":
            what = "copies nothing" if arguments.policy == "resident" else "has weights as they are"
            raise ChunkflowError(f"--{name} with policy {arguments.policy}, which {what}: leave out one of the two.")
    if arguments.policy in SHARDED and arguments.ulysses < 2:
        raise ChunkflowError(f"Policy {arguments.policy} splits each block among ranks: give --ulysses 2 or more.")
    progress = Progress(2)
    target = load_target(arguments, progress)
    policies = _able(target) if arguments.policy == "all" else [arguments.policy]
    with progress.phase("planning"):
        note_rates(target)
        predicted = {policy: _arm(target, policy) for policy in policies}
    record = ComparisonRecord(
        model=f"{target.title}, simulated on {target.hardware.name}",
        degree=target.degree,
        cfg_parallel=target.cfg_parallel,
        arms={policy: arm for policy, (arm, _) in predicted.items()},
    )
    raw = ", ".join(policy for policy in policies if _is_raw(target, policy))
    others = f", but for policy {raw}" if raw else ""
    packed = f"; packed{others}: {packing}" if (packing := packing_sentence(target.problem)) else ""
    pieces = f"; in pieces{others}: {peers}" if (peers := peers_sentence(target.problem)) else ""
    if target.hoisted is not None:
        pieces += f"; hoisted{others}: {hoisting_sentence(target.hoisted)}"
    if exchanged := exchange_sentence(target.problem, target.why_groups):
        pieces += f"; exchanges: {exchanged}"
    calls = {policy: call for policy, (_, call) in predicted.items()}
    shown = replace(record, arms={p: _per_forward(arm, target.forwards) for p, arm in record.arms.items()})
    memory = target.settings.goal.memory
    fits: dict[str, bool] = {}
    if memory is not None:
        fits = {policy: _taken(target, policy, arm) <= memory for policy, (arm, _) in predicted.items()}
    say(arguments, f"{prose(_answer(shown, fits, memory))}\n\n{prose(f'{target.heading}{packed}{pieces}')}\n")
    say(arguments, table(shown, _policy_columns(calls, fits, memory), per="forward"))
    write_json(arguments, record.body)
    return 0


def _able(target: PlannedModel) -> list[Policy | OnlyPredicted]:
    """Return the policies in :data:`SIMULATED` that are available for this model, number of ranks and goal.  The policy
    host-yield is left out, because its prediction is the same as for layerwise."""
    budget = target.settings.goal.memory is not None
    without = {HOST_YIELD, *(() if budget else ("layerwise-prefix",))}  # layerwise-prefix needs a budget
    return [p for p in SIMULATED if p not in (without | set(SHARDED if why_not(target.raw, target.degree) else ()))]


def _arm(target: PlannedModel, policy: Policy | OnlyPredicted) -> tuple[ArmRecord, Prediction | Timeline]:
    """Return the predicted record of a step with a policy, and the prediction for a call."""
    if policy == "distributed-layerwise" or policy == "fsdp" or policy == "group-offload":
        step = (
            play_group_offload(target.raw, target.hardware)
            if policy == "group-offload"
            else play_sharded(policy, target.raw, target.hardware, target.degree)
        )
        return step.record(target.raw.total_bytes, target.forwards), step.timeline
    # Predict host-yield like layerwise: its flag delays only copies that the host has not issued yet, and a host that runs
    # ahead has issued all of them.
    plan = _plan(target, "layerwise" if policy == "host-yield" else policy)
    assert plan.predicted is not None
    total, hoisted = sum(weight.nbytes for weight in plan.weights), target.hoisted
    arm = ArmRecord.predicted(plan, plan.predicted, total, target.forwards)
    if hoisted is not None and not _is_raw(target, policy):
        arm = replace(
            arm,
            step_s=(arm.step_s or 0.0) + hoisted.seconds_per_call * target.forwards,
            weights_device_bytes=plan.device_bytes + hoisted.external_bytes,
            weights_total_bytes=total + hoisted.nbytes,
        )
    return arm, plan.predicted


def _is_raw(target: PlannedModel, policy: Policy | OnlyPredicted) -> bool:
    """Whether a policy is planned without hoisting and with uncompressed and unsharded weights."""
    return policy in _RAW or (target.hoisted is not None and policy != "chunkflow")


def _plan(target: PlannedModel, policy: Policy) -> Plan:
    """Return the plan of a policy.  It is made for the command's goal if the policy has a goal."""
    goal = target.settings.goal
    if policy != "chunkflow":
        memory = goal.memory if policy in BUDGETED else None
        goal = replace(goal, policy=policy, memory=memory, slowdown=None, yields="auto", hoist=False)
    return target.plan(problem=target.raw if _is_raw(target, policy) else target.problem, goal=goal)


def _per_forward(arm: ArmRecord, forwards: int) -> ArmRecord:
    """Convert the record of a step to a record per forward.  ``forwards``: the number of forwards per step."""
    return replace(
        arm,
        step_s=(arm.step_s or 0.0) / forwards,
        exposed_h2d_s=(arm.exposed_h2d_s or 0.0) / forwards,
        collective_s=(arm.collective_s or 0.0) / forwards,
        moved_bytes_per_step=(arm.moved_bytes_per_step or 0) // forwards,
    )


def _answer(record: ComparisonRecord, fits: Mapping[str, bool], memory: int | None) -> str:
    """Return the result in a sentence that compares chunkflow, or the only simulated policy, with the baseline.

    ``record``: the times and bytes per forward.  ``fits``: for each policy, whether it fits in the budget ``memory``;
    empty without a budget.
    """
    name = "chunkflow" if "chunkflow" in record.arms else next(iter(record.arms))
    arm, resident = record.arms[name], record.arms.get("resident")
    text = f"{name}: {seconds(arm.step_s)} per forward"
    if resident is not None and resident is not arm:
        text += f", {(arm.step_s or 0.0) / (resident.step_s or 1.0):.3f} times all-resident"
    text += f"; {part_of(arm.weights_device_bytes or 0, arm.weights_total_bytes or 0)} of weights on the GPU"
    if not fits.get("resident", True):
        text += f"; all of them do not fit {size(memory)}"
    return text


def _taken(target: PlannedModel, policy: Policy | OnlyPredicted, arm: ArmRecord) -> int:
    """Return the bytes that a policy needs within the budget, counted as in place.py.  They include activations if the
    budget covers activations."""
    problem = target.raw if _is_raw(target, policy) else target.problem
    live = target.settings.goal.counted(problem.live_bytes)
    return (arm.weights_device_bytes or 0) + problem.unpacked_bytes + live


def _policy_columns(
    calls: Mapping[str, Prediction | Timeline], fits: Mapping[str, bool], memory: int | None
) -> dict[str, dict[str, object]]:
    """Return additional columns of the table.  ``fits``, ``memory``: see :func:`_answer`."""
    columns: dict[str, dict[str, object]] = {}
    base = "resident" if "resident" in calls else "layerwise"
    if base in calls:
        base_s = calls[base].step_s
        columns[f"to {base}"] = {name: f"{p.step_s / base_s:.3f}" for name, p in calls.items()}
    if fits:
        columns[f"fits {size(memory)}"] = {name: "yes" if fitting else "NO" for name, fitting in fits.items()}
    slowed = {name: seconds(round(p.inflation_s, 9) + 0.0) for name, p in calls.items()}
    columns["collectives slowed by"] = dict(slowed)
    return columns
