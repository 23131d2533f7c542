"""``explain``: report how a compiled model ran, compared with the predictions of its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkflow_compile.hardware.profiles import is_of_machine
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.cycle import block_of
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.placed.notes import activation_note, hoisting_notes, packing_notes, splitting_notes
from chunkflow_compile.placed.offload import cycles, programs, why_nothing_streams
from chunkflow_compile.placed.placement import Placement, placements_of
from chunkflow_compile.private_torch.dynamo import compilation_time_metrics
from chunkflow_compile.report.comparison import explain_plan
from chunkflow_compile.report.cycle_calls import call_figures
from chunkflow_compile.report.explanation import Explanation
from chunkflow_compile.report.first_step import first_step_phases
from chunkflow_compile.report.phases import PipelineFigures
from chunkflow_compile.report.record import seconds
from chunkflow_compile.runtime.measurement import Measured, as_one, measured
from chunkflow_compile.runtime.single_call import SingleCall


def explain(compiled: nn.Module | Any, details: bool = False) -> Explanation | PipelineFigures:
    """Explain how the newest program of a compiled or placed model ran, or how a compiled pipeline ran.

    Printing the result shows five lines: the time per step, the stalls per step, device memory, host memory, and advice on
    how to make steps faster.  Predictions are shown only if the plan was made for a profile of this machine.

    If the programs of the model run as a cycle, the report explains the cycle, and times are for one pass over its calls.  If
    the model has several programs that do not run as a cycle yet, the report explains the slowest program.  In this case, the
    report names the program and also shows the total time for one call of each program.

    ``details``: whether to print more.  For a model, this adds predicted and measured times, the longest stalls and their
    causes, the windows, and the phases of compilation.  For a pipeline, this adds a table with the bytes of each component on
    the device and its call times.
    Raises ChunkflowError if no program of the model has run, or if the argument is neither a model nor a compiled pipeline.
    """
    if (budget := budget_of(compiled)) is not None and not isinstance(compiled, nn.Module):
        return replace(budget.figures(), details=details)
    if not isinstance(compiled, nn.Module):
        raise ChunkflowError(
            f"This {type(compiled).__name__} is neither a model nor a compiled pipeline: call "
            "chunkflow_compile.compile(pipe) first."
        )
    ran = [p for p in programs(compiled) if p.measurements]
    if not ran:
        raise ChunkflowError(
            "No program of this model has run yet: compile it with ChunkFlow and call it first, also after restore."
        )
    of_model = partial(_of_model, compiled, details)
    running = cycles(compiled)
    bound = next((r for r in running if r.measurements), None)
    if bound is not None:
        plan, what = bound.plan, f"a pass over {len(bound.calls)} calls"
        profiled = is_of_machine(plan.hardware, bound.arena.device)
        explanation = explain_plan(plan, measured(plan, bound.measurements), what, profiled)
        explanation = replace(explanation, calls=tuple(call_figures(bound.cycle)), jumps=bound.jumps)
        notes = dict.fromkeys(note for program in ran for note in program.notes)
        return of_model(explanation, notes, [call.cut.problem for call in bound.calls])
    # the programs that ran outside cycles: for each part of the model, only the newest program of this part
    parts = {p.call.reads: (p, measured(p.plan, [*map(as_one, passes)])) for p in ran if (passes := p.passes)}
    if not parts:
        raise ChunkflowError(
            "The programs of this model run as a cycle of which no pass was measured yet: call the model again."
        )
    newest, times = [*parts.values()][-1]
    profiled = is_of_machine(newest.plan.hardware, newest.arena.device)
    if not newest.call.part or len(parts) == 1:
        explanation = explain_plan(newest.plan, times, profiled=profiled)
    else:
        newest, times = max(parts.values(), key=lambda part: part[1].step_s)
        explanation = explain_plan(newest.plan, times, f"a call of {_name(newest)}", profiled)
        part = _part(newest, [*parts.values()], bool(running), profiled)
        explanation = replace(explanation, part=part)
    return of_model(explanation, newest.notes, [program.program.problem for program, _ in parts.values()])


def _of_model(
    model: nn.Module, details: bool, explanation: Explanation, notes: Iterable[str], problems: Iterable[Problem]
) -> Explanation:
    """Add the figures that belong to the whole model, such as its host memory, to an explanation.

    ``notes``: the notes of the model's programs.  ``problems``: the scheduling problems of these programs.
    """
    peak, rows = _peak(placements_of(model)), sum(placement.row_bytes for placement in placements_of(model))
    measured = None if peak is None else max(0, peak - explanation.device_bytes - rows)
    activations = activation_note(max(problem.live_bytes for problem in problems), measured)
    return replace(
        explanation,
        details=details,
        peak_bytes=peak,
        row_bytes=rows,
        host_bytes=sum(placement.store.held_bytes for placement in placements_of(model)),
        unstreamed=why_nothing_streams(model),
        notes=(*notes, activations, *splitting_notes(model), *packing_notes(model), *hoisting_notes(model)),
        first_step=first_step_phases(compilation_time_metrics),
    )


def _peak(placements: Iterable[Placement]) -> int | None:
    """Return the peak number of bytes that this process has allocated on a model's GPU; None if the model is on a CPU."""
    device = next((placement.store.device for placement in placements), None)
    return torch.cuda.max_memory_allocated(device) if device is not None and device.type == "cuda" else None


def _name(part: SingleCall) -> str:
    """Return the name of the block or layer that a part of a model computes."""
    weight = next((buffer.name for buffer in part.buffers.values()), "")
    return block_of(weight) or weight.rpartition(".")[0] or "a part without large weights"


def _part(chosen: SingleCall, parts: Sequence[tuple[SingleCall, Measured]], planned: bool, profiled: bool) -> str:
    """Return a text that says which part of a model the report explains, and how long all parts take together.

    ``chosen``: the program of the explained part.  ``parts``: the programs of all parts, with their measurements.
    ``planned``: whether the parts already run as a cycle.  ``profiled``: whether the text contains predicted times.
    """
    predicted = [p.plan.predicted.step_s for p, _ in parts if p.plan.predicted is not None]
    together = f"{seconds(sum(m.step_s for _, m in parts))} as measured"
    if profiled:
        together = f"{seconds(sum(predicted))} as predicted and {together}"
    text = (
        f"{_name(chosen)} takes longest of the {len(parts)} parts of this model, and is explained here. A call of each takes "
        f"{together}."
    )
    if chosen.key is None:  # the program cannot join a cycle: cycles are disabled, or the user has chosen its plan
        return text
    when = "is measured" if planned else "runs as one cycle, from the third on"
    return f"{text} Once a pass over all of them {when}, that is explained."
