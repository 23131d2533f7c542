"""``chunkflow simulate``: the policies side by side on a machine, without weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import Policy
from chunkflow_compile.passes.placement.place import BUDGETED
from chunkflow_compile.passes.plan import Plan, Prediction
from chunkflow_compile.report.plan_tables import packing_sentence, peers_sentence
from chunkflow_compile.report.record import ArmRecord, ComparisonRecord, seconds, table

from .degrees import sweep
from .output import Progress, say, write_json
from .parsers import SIMULATED
from .target import Target, load_target, note_rates


def run(arguments: argparse.Namespace) -> int:
    if arguments.sweep_ulysses is not None:
        return sweep(arguments)
    if arguments.policy == "layerwise-prefix" and not arguments.memory:
        raise ChunkflowError("Policy layerwise-prefix keeps what fits a budget: give --memory.")
    if arguments.policy == "resident" and arguments.pack != "no":
        raise ChunkflowError("--pack with policy resident, which copies nothing: leave out one of the two.")
    if arguments.policy == "resident" and arguments.peers != "no":
        raise ChunkflowError("--peers with policy resident, which copies nothing: leave out one of the two.")
    progress = Progress(2)
    target = load_target(arguments, progress)
    able = [p for p in SIMULATED if p != "layerwise-prefix" or arguments.memory]  # it has no plan without a budget
    policies = able if arguments.policy == "all" else [arguments.policy]
    with progress.phase("planning"):
        note_rates(target)
        plans = {policy: _plan(target, policy) for policy in policies}
    predicted = {policy: plan.predicted for policy, plan in plans.items() if plan.predicted is not None}
    record = ComparisonRecord(
        model=f"{target.title}, simulated on {target.machine}",
        degree=target.degree,
        cfg_parallel=target.cfg_parallel,
        arms={
            policy: ArmRecord.predicted(plans[policy], step, _total(plans[policy]), target.forwards)
            for policy, step in predicted.items()
        },
    )
    packed = f"; packed, but for policy resident: {packing}" if (packing := packing_sentence(target.problem)) else ""
    pieces = f"; in pieces, but for policy resident: {peers}" if (peers := peers_sentence(target.problem)) else ""
    say(arguments, f"{record.model}; {target.parallel}, {target.calls}{packed}{pieces}\n")
    say(arguments, table(record, _policy_columns(predicted, target.forwards)))
    write_json(arguments, record.body)
    return 0


def _total(plan: Plan) -> int:
    return sum(weight.nbytes for weight in plan.weights)


def _plan(target: Target, policy: Policy) -> Plan:
    """The plan of a policy, for the goal of the command if it has one; without copies, no weight is packed or in pieces."""
    goal = target.settings
    return target.plan(
        problem=target.raw if policy == "resident" else target.problem,
        policy=policy,
        memory=goal.memory if policy in BUDGETED else None,
        slowdown=goal.slowdown if policy == "chunkflow" else None,
        yields=goal.yields if policy == "chunkflow" else "auto",
    )


def _policy_columns(predicted: Mapping[str, Prediction], forwards: int) -> dict[str, dict[str, object]]:
    columns: dict[str, dict[str, object]] = {
        "collectives slowed by": {name: seconds(p.inflation_s * forwards) for name, p in predicted.items()}
    }
    if "layerwise" in predicted:
        base = predicted["layerwise"].step_s
        columns["step to layerwise"] = {name: f"{p.step_s / base:.3f}" for name, p in predicted.items()}
    return columns
