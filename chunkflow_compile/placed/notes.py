"""Sentences for the user about the compressed weights, hoisted weights, split blocks, and activations of a placed model."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from chunkflow_compile.passes.cutting import goal_of_cut
from chunkflow_compile.passes.graph.split import why_whole
from chunkflow_compile.passes.placement.coarsest import AS_GOOD
from chunkflow_compile.placed.offload import programs
from chunkflow_compile.placed.placement import placements_of
from chunkflow_compile.report.plan_tables import block_type, slices_notes
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.units import size
from chunkflow_compile.weights.weight_memory import Form


def packing_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a sentence on how many weights of a placed model are compressed, and why the other weights are not compressed.
    The result is empty if no weight is compressed."""
    buffers = [buffer for placement in placements_of(model) for buffer in placement.store.buffers]
    packed = [buffer for buffer in buffers if buffer.compressed]
    if not packed:
        return ()
    values, stored = sum(b.host.nbytes for b in packed), sum(b.nbytes for b in packed)
    said = [f"{len(packed)} of {len(buffers)} weights are packed, {size(values)} of them in {size(stored)}"]
    raw = [buffer for buffer in buffers if not buffer.compressed]
    kinds = Counter(str(b.host.dtype).removeprefix("torch.") for b in raw if b.host.dtype is not torch.bfloat16)
    others = [f"{count} of {dtype}" for dtype, count in sorted(kinds.items())]
    if full := sum(b.host.dtype is torch.bfloat16 and b.form is Form.RAW for b in raw):
        others.append(f"{full} of bfloat16 that would not be smaller, or that a program needs raw")
    return ("; ".join([*said, f"raw are {', '.join(others)}"] if others else said),)


def hoisting_notes(model: nn.Module) -> tuple[str, ...]:
    """Return one sentence per preamble of a placed model.  The sentence says how many weights are hoisted, and how many calls
    found their row in a table.

    The result is empty if no weights are hoisted.
    """
    notes = list[str]()
    for placement in placements_of(model):
        for preamble in placement.preambles:
            if programs := [program for each, program in placement.tables if each is preamble]:
                notes.append(preamble.note(programs))
    return tuple(notes)


def splitting_notes(model: nn.Module) -> tuple[str, ...]:
    """Return, for each block type of a placed model that is split into slices, one sentence with the number of slices.

    If the user or the budget requires slices, the result also contains one sentence for each block type that is not split,
    with the reason.
    """
    notes = dict[str, None]()
    for program in programs(model):
        cut = program.variant.cut
        notes |= dict.fromkeys(slices_notes(cut.problem))
        if (wanted := _slices_wanted(program)) == 1:
            continue
        split = {block_type(region.block, cut.problem) for region in cut.problem.regions if region.repeat > 1}
        named = any(region.block for region in cut.problem.regions)
        for region in {r.info.key: r for r in (cut.whole or cut).regions}.values():
            if named and not region.info.block:
                continue  # a region outside of blocks is never split
            blocks = block_type(region.info.block, cut.problem)
            if blocks not in split and (blocks or cut.traced.repeats) and (why := why_whole(region, wanted)):
                notes[f"{blocks or 'the blocks'} are not split: {why}"] = None
    return tuple(notes)


def _slices_wanted(program: SingleCall) -> int:
    """Return the number of slices into which the user or the budget requires blocks to be split; 1 if neither does."""
    settings, predicted = program.variant.settings, program.program.plan.predicted
    if isinstance(settings.goal.split, int):
        return settings.goal.split
    if (most := max(region.repeat for region in program.variant.cut.problem.regions)) > 1:
        return most
    goal = goal_of_cut(program.variant.cut.traced, settings)
    if not goal.activations or goal.memory is None or predicted is None:
        return 1
    return 2 if predicted.step_s > AS_GOOD * predicted.resident_step_s else 1


def activation_note(predicted: int, measured: int | None) -> str:
    """Return a note on the maximum bytes of activations.  ``predicted``: the predicted bytes.  ``measured``: the measured
    bytes, or None if the bytes were not measured."""
    return f"activations: {size(predicted)} predicted" + ("" if measured is None else f", {size(measured)} measured")
