"""Tables of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from tabulate import tabulate

from chunkflow_compile.passes.plan import Plan, WeightPlan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.units import size

from .record import seconds


def summary_table(plan: Plan, problem: Problem, forwards: int) -> str:
    """The predicted cost of a plan, per denoising step of ``forwards`` calls."""
    predicted = plan.predicted
    assert predicted is not None
    ratio = predicted.step_s / (predicted.resident_step_s or 1.0)
    inflation = seconds(predicted.inflation_s * forwards)
    rows = [
        ("step", f"{seconds(predicted.step_s * forwards)}, {ratio:.3f} times that with all weights resident"),
        ("compute", seconds(predicted.compute_s * forwards)),
        ("collectives", f"{seconds(predicted.collective_s * forwards)}, {inflation} added by copies"),
        ("waiting for weights", seconds(predicted.exposed_s * forwards)),
        ("copies, beside the rest", seconds(predicted.copy_s * forwards)),
        ("weights on the device", f"{size(plan.device_bytes)} of {size(problem.total_bytes)}"),
        ("of which arena", size(plan.arena_bytes)),
        ("moved a step", size(plan.moved_bytes * forwards)),
        ("regions, collectives", f"{len(problem.regions)}, {len(problem.collectives)}"),
    ]
    if packed := packing_sentence(problem):
        rows.insert(-1, ("packed", packed))
    if peers := peers_sentence(problem):
        pulled = size(plan.pulled_bytes * forwards)
        rows.insert(-1, ("on the ranks' devices", peers))
        rows.insert(-1, ("pulled from other ranks", f"{pulled} a step"))
    drive = {w.name: w.nbytes for w in problem.weights if w.drive}
    if drive:
        read = sum(plan.streamed_bytes(w) for w in plan.weights if w.name in drive)
        total = size(sum(drive.values()))
        rows.insert(-1, ("read from the drive", f"{size(read * forwards)}, of {total} that are there"))
    return tabulate(rows, tablefmt="plain")


def packing_sentence(problem: Problem) -> str:
    """How many weights are packed, and their bytes before and after; empty if none is."""
    packed = [w for w in problem.weights if w.packed]
    if not packed:
        return ""
    before, after = sum(w.packed for w in packed), sum(w.nbytes for w in packed)
    return (
        f"{len(packed)} of {len(problem.weights)} weights, {size(before)} in {size(after)}, "
        f"{size(problem.unpacked_bytes)} of values at a time"
    )


def peers_sentence(problem: Problem) -> str:
    """How many weights lie in pieces on the devices of the ranks, and their bytes; empty if none does."""
    pieces = [w for w in problem.weights if w.peers]
    if not pieces:
        return ""
    total = sum(w.nbytes for w in pieces)
    return (
        f"{len(pieces)} of {len(problem.weights)} weights, {size(total)} in pieces on {pieces[0].peers} devices, "
        f"{size(problem.piece_bytes)} on each"
    )


def blocks_table(plan: Plan, problem: Problem) -> str:
    """One row per block; consecutive equal blocks share one."""
    block = {k: r.block for k, r in enumerate(problem.regions)}
    rows: dict[str, list[WeightPlan]] = {}
    for weight in plan.weights:
        rows.setdefault(block.get(weight.first_use, "") or "outside blocks", []).append(weight)
    ordered = sorted(rows, key=lambda name: min(w.first_use for w in rows[name]))
    cells = [(name, _row(plan, rows[name])) for name in ordered]
    lines = []
    for row, group in groupby(cells, key=lambda c: c[1]):
        names = [name for name, _ in group]
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rpartition('.')[2]}"
        lines.append((label, *row))
    return tabulate(lines, headers=("block", "weights", "streamed", "resident", "least slack"))


def _row(plan: Plan, weights: list[WeightPlan]) -> tuple[str, ...]:
    total = sum(w.nbytes for w in weights)
    streamed = sum(map(plan.streamed_bytes, weights))
    slacks = [w.slack_s for w in weights if w.slack_s is not None]
    slack = f"{'waits ' * (min(slacks) < 0)}{seconds(abs(min(slacks)))}" if slacks else "-"
    return size(total), size(streamed), size(total - streamed), slack


def weights_table(weights: Iterable[WeightPlan], packed: Collection[str] = ()) -> str:
    """One row per weight: its home and the reason.  ``packed``: the names of those that are."""
    rows = [(w.name, size(w.nbytes), f"{w.home}{', packed' * (w.name in packed)}", w.why) for w in weights]
    return tabulate(rows, headers=("weight", "size", "home", "why"))
