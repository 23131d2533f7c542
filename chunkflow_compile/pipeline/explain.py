"""``explain``: what a compiled model did, compared with what its plan predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch._dynamo.utils import compilation_time_metrics

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.program.cycle import block_of
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.placed.packing_notes import packing_notes
from chunkflow_compile.report.calls import call_figures
from chunkflow_compile.report.explain import Explanation, explain_plan
from chunkflow_compile.report.first_step import first_step_phases
from chunkflow_compile.report.phases import PipelineFigures
from chunkflow_compile.report.record import seconds
from chunkflow_compile.runtime.measurement import Measured, as_one, measured
from chunkflow_compile.runtime.order import Solo


def explain(compiled: nn.Module | Any) -> Explanation | PipelineFigures:
    """Compare prediction and measurement of the newest program on a compiled or placed model; print the result.

    Of a pipeline that was applied: its components, what each has on the device, and how long its calls take.

    If the model's programs run as a cycle, that is explained instead: times are for one pass over its calls.  Before, if they
    are several, the one that takes longest is explained; the report says so, and what one call of each takes together.
    Raises ChunkflowError if no program of the model runs.
    """
    if (budget := budget_of(compiled)) is not None and not isinstance(compiled, nn.Module):
        return budget.figures()
    if not isinstance(compiled, nn.Module):
        raise ChunkflowError(
            f"This {type(compiled).__name__} is not applied: call chunkflow_compile.apply(pipe) first."
        )
    ran = [p for p in programs(compiled) if p.measurements]
    if not ran:
        raise ChunkflowError(
            "No program of this model has run yet: compile it with ChunkFlow and call it first, also after restore."
        )
    first_step = first_step_phases(compilation_time_metrics)
    running = cycles(compiled)
    bound = next((r for r in running if r.measurements), None)
    if bound is not None:
        plan = bound.plan
        explanation = explain_plan(plan, measured(plan, bound.measurements), f"a pass over {len(bound.calls)} calls")
        notes = dict.fromkeys((*(note for program in ran for note in program.notes), *packing_notes(compiled)))
        calls = tuple(call_figures(bound.cycle))
        return replace(explanation, calls=calls, jumps=bound.jumps, notes=tuple(notes), first_step=first_step)
    # of the newest size, and outside cycles
    parts = {p.call.reads: (p, measured(p.plan, [*map(as_one, passes)])) for p in ran if (passes := p.passes)}
    if not parts:
        raise ChunkflowError(
            "The programs of this model run as a cycle of which no pass was measured yet: call the model again."
        )
    newest, times = [*parts.values()][-1]
    if not newest.call.part or len(parts) == 1:
        explanation = explain_plan(newest.plan, times)
    else:
        newest, times = max(parts.values(), key=lambda part: part[1].step_s)
        explanation = explain_plan(newest.plan, times, f"a call of {_name(newest)}")
        explanation = replace(explanation, part=_part(newest, [*parts.values()], bool(running)))
    return replace(explanation, notes=(*newest.notes, *packing_notes(compiled)), first_step=first_step)


def _name(part: Solo) -> str:
    """The block or the layer of a part."""
    weight = next((buffer.name for buffer in part.buffers.values()), "")
    return block_of(weight) or weight.rpartition(".")[0] or "a part without large weights"


def _part(chosen: Solo, parts: Sequence[tuple[Solo, Measured]], planned: bool) -> str:
    """What a part is one of.  ``planned``: whether there is a cycle of them already."""
    predicted = [p.plan.predicted.step_s for p, _ in parts if p.plan.predicted is not None]
    together = f"{seconds(sum(predicted))} as predicted and {seconds(sum(m.step_s for _, m in parts))} as measured"
    text = (
        f"{_name(chosen)} takes longest of the {len(parts)} parts of this model, and is explained here. A call of each takes "
        f"{together}."
    )
    if chosen.call.key is None:  # cycles are disabled, or the user chose its placement
        return text
    when = "is measured" if planned else "runs as one cycle, from the third on"
    return f"{text} Once a pass over all of them {when}, that is explained."
