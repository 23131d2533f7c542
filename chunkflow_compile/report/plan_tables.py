"""Tables and sentences that describe a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from chunkflow_compile.passes.hoisting import STEPS, HoistingFigures
from chunkflow_compile.passes.plan import Plan, WeightPlan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.cycle import block_of
from chunkflow_compile.units import size

from .record import fitted, prose, seconds


def answer(plan: Plan, problem: Problem, forwards: int, hoisted: HoistingFigures | None = None) -> str:
    """Return a sentence that states the result of planning.

    The sentence states the time per forward, the ratio of this time to the time with all weights resident, and the GPU
    memory for weights.  ``forwards``: the number of forwards per denoising step.  ``hoisted``: the figures of products that
    are computed once for many steps, or None if there are no such products.  The time and the memory include the products.
    """
    predicted = plan.predicted
    assert predicted is not None
    forward_s = forward_seconds(plan, hoisted)
    ratio = forward_s / (predicted.resident_step_s or 1.0)
    step = f"; {forwards} forwards per step, {seconds(forward_s * forwards)}" if forwards > 1 else ""
    return prose(
        f"{seconds(forward_s)} per forward, {ratio:.3f} times all-resident; {held(plan, hoisted)} of weights on the GPU{step}"
    )


def forward_seconds(plan: Plan, hoisted: HoistingFigures | None) -> float:
    """Return the seconds per forward, including a share of the time in which hoisted products are computed."""
    assert plan.predicted is not None
    return plan.predicted.step_s + (0.0 if hoisted is None else hoisted.seconds_per_call)


def held(plan: Plan, hoisted: HoistingFigures | None = None) -> str:
    """Return, as text, the size of the weights and rows on the GPU, and the size of all weights including hoisted weights."""
    outside, elsewhere = (0, 0) if hoisted is None else (hoisted.external_bytes, hoisted.nbytes)
    return part_of(plan.device_bytes + outside, sum(weight.nbytes for weight in plan.weights) + elsewhere)


def part_of(part: int, whole: int) -> str:
    """Return two sizes as text, such as ``"9.28 of 22.17 GiB"``.  A unit that both sizes share is written once."""
    small, large = size(part), size(whole)
    value, _, unit = small.partition(" ")
    return f"{value if large.endswith(f' {unit}') else small} of {large}"


def summary_table(
    plan: Plan, problem: Problem, forwards: int, hoisted: HoistingFigures | None = None, why_groups: str = ""
) -> str:
    """Return a table of the predicted costs per forward.

    ``forwards``, ``hoisted``: see :func:`answer`.  ``why_groups``: the reason for the number of groups of attention heads;
    empty if the user has given this number.
    """
    predicted = plan.predicted
    assert predicted is not None
    outside = problem.unpacked_bytes + (0 if hoisted is None else hoisted.external_bytes)
    rows = [
        ("forward", seconds(forward_seconds(plan, hoisted))),
        ("all-resident forward", seconds(predicted.resident_step_s)),
        ("compute", seconds(predicted.compute_s)),
        ("waiting for weights", seconds(predicted.exposed_s)),
        ("copies in total", seconds(predicted.copy_s)),
        ("weights on the GPU", held(plan, hoisted)),
        ("of which arena", size(plan.arena_bytes)),
        ("activations", size(problem.live_bytes)),
        ("in total on the GPU", size(plan.device_bytes + outside + problem.live_bytes)),
        ("copied per forward", size(plan.moved_bytes)),
    ]
    if forwards > 1:
        rows.insert(
            1, ("forwards per step", f"{forwards}, {seconds(forward_seconds(plan, hoisted) * forwards)} per step")
        )
    if problem.collectives:
        added = seconds(predicted.inflation_s)
        count = f"{len(problem.collectives)} of them"
        rows.insert(-7, ("collectives", f"{seconds(predicted.collective_s)} in {count}, {added} added by copies"))
    if hoisted is not None:
        rows.append(("hoisted", hoisting_sentence(hoisted)))
        rows.append(("rows", f"{hoisted.rows} at most, {size(hoisted.rows * hoisted.row_bytes)} on the GPU"))
        share = f" per generation, {seconds(hoisted.seconds_per_call)} per forward of {STEPS}"
        rows.append(("computing rows", f"{seconds(hoisted.fill_s)}{share if hoisted.seconds_per_call else ', once'}"))
    if packed := packing_sentence(problem):
        rows.append(("packed", packed))
    if peers := peers_sentence(problem):
        rows.append(("in pieces on all GPUs", peers))
        rows.append(("pulled from other ranks", f"{size(plan.pulled_bytes)} per forward"))
    drive = {w.name: w.nbytes for w in problem.weights if w.source.file}
    if drive:
        read = sum(plan.streamed_bytes(w) for w in plan.weights if w.name in drive)
        rows.append(("read from the SSD", f"{size(read)} per forward, of {size(sum(drive.values()))} stored there"))
    if exchanged := exchange_sentence(problem, why_groups):
        rows.append(("exchanges", exchanged))
    rows.append(("regions", str(len(problem.regions))))
    return fitted(rows, tablefmt="plain")


def exchange_sentence(problem: Problem, why: str = "") -> str:
    """Return a text that says into how many groups of heads the exchanges of attention are divided.

    The text is empty if the exchanges are not divided and ``why`` is empty.  ``why``: the reason for the number of groups;
    empty if the user has given this number.
    """
    count = problem.exchange_groups
    if count == 1:
        return f"whole: {why}" if why else ""
    attention = sum(region.groups > 1 for region in problem.regions) // count
    said = f"{attention} attention{'s' * (attention > 1)} in {count} groups of heads each"
    return f"{said}: {why}" if why else said


def packing_sentence(problem: Problem) -> str:
    """Return a text with the number of compressed weights, and their sizes before and after compression.

    The text is empty if no weight is compressed.
    """
    packed = [w for w in problem.weights if w.source.compressed]
    if not packed:
        return ""
    before, after = sum(w.source.values for w in packed), sum(w.nbytes for w in packed)
    return (
        f"{len(packed)} of {len(problem.weights)} weights, {size(before)} in {size(after)}, "
        f"{size(problem.unpacked_bytes)} of values at a time"
    )


def hoisting_sentence(hoisted: HoistingFigures) -> str:
    """Return a text on the products that are computed once for many steps."""
    inputs = "1 small input" if hoisted.slow == 1 else f"{hoisted.slow} small inputs"
    return (
        f"{hoisted.weights} weights, {size(hoisted.nbytes)}, by {inputs} alone; {hoisted.values} values, "
        f"{size(hoisted.row_bytes)} per row"
    )


def slices_notes(problem: Problem) -> tuple[str, ...]:
    """Return one sentence for each block type whose blocks are split: it states the number of slices per block."""
    slices = dict[str, int]()
    for region in problem.regions:
        blocks = block_type(region.block, problem)
        slices[blocks] = max(slices.get(blocks, 1), region.repeat)
    return tuple(
        f"{blocks or 'the blocks'} run in {count} slices of the tokens" for blocks, count in slices.items() if count > 1
    )


def block_type(block: str, problem: Problem) -> str:
    """Return the name of the list that contains a block, such as ``blocks`` for the block ``blocks.3``.

    The regions of a separately compiled block have no block name.  The name of such a block is taken from the name of one of
    its weights.
    """
    block = block or block_of(next((weight.name for weight in problem.weights), ""))
    name, _, number = block.rpartition(".")
    return name if number.isdecimal() else block


def peers_sentence(problem: Problem) -> str:
    """Return a text with the number and the size of the weights that are sharded over the GPUs of the ranks.

    The text is empty if no weight is sharded.
    """
    pieces = [w for w in problem.weights if w.source.sharded]
    if not pieces:
        return ""
    total = sum(w.nbytes for w in pieces)
    return (
        f"{len(pieces)} of {len(problem.weights)} weights, {size(total)} in pieces on {pieces[0].source.ranks} GPUs, "
        f"{size(problem.piece_bytes)} on each"
    )


def blocks_table(plan: Plan, problem: Problem) -> str:
    """Return a table with one row per block.  Consecutive blocks with equal figures share a row."""
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
    return fitted(lines, ("block", "weights", "streamed", "resident", "least slack"))


def _row(plan: Plan, weights: list[WeightPlan]) -> tuple[str, ...]:
    total = sum(w.nbytes for w in weights)
    streamed = sum(map(plan.streamed_bytes, weights))
    slacks = [w.slack_s for w in weights if w.slack_s is not None]
    slack = f"{'waits ' * (min(slacks) < 0)}{seconds(abs(min(slacks)))}" if slacks else "-"
    return size(total), size(streamed), size(total - streamed), slack


def weights_table(weights: Iterable[WeightPlan], packed: Collection[str] = ()) -> str:
    """Return a table with one row per weight.  A row shows where the weight is stored, and why.

    ``packed``: the names of the compressed weights.
    """
    rows = [(w.name, size(w.nbytes), f"{w.home}{', packed' * (w.name in packed)}", w.why) for w in weights]
    return fitted(rows, ("weight", "size", "home", "why"))
