"""``explain``: what a compiled model did, compared with what its plan predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch._dynamo.utils import compilation_time_metrics

from chunkflow_compile.model.offload import cycles, programs
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.report.calls import call_figures
from chunkflow_compile.report.explain import Explanation, explain_plan
from chunkflow_compile.report.first_step import first_step_phases
from chunkflow_compile.report.phases import PipelineFigures
from chunkflow_compile.runtime.measurement import measured


def explain(compiled: nn.Module | Any) -> Explanation | PipelineFigures:
    """Compare prediction and measurement of the newest program on a compiled or placed model; print the result.

    Of a pipeline that was applied: its components, what each has on the device, and how long its calls take.

    If the model's programs run as a cycle, that is explained instead.  Times are for one call of the model, or one pass
    over the cycle.  Raises ChunkflowError if the model has not run yet.
    """
    if (budget := budget_of(compiled)) is not None and not isinstance(compiled, nn.Module):
        return budget.figures()
    if not isinstance(compiled, nn.Module):
        raise ChunkflowError(
            f"This {type(compiled).__name__} is not applied: call chunkflow_compile.apply(pipe) first."
        )
    found = [p for p in programs(compiled) if p.measurements]
    if not found:
        raise ChunkflowError("No program of this model has run yet: compile it with ChunkFlow and call it first.")
    first_step = first_step_phases(compilation_time_metrics)
    bound = next((r for r in cycles(compiled) if r.measurements), None)
    if bound is not None:
        plan = bound.cycle.plan
        explanation = explain_plan(plan, measured(plan, bound.measurements))
        notes = dict.fromkeys(note for session in found for note in session.code.notes)
        calls = tuple(call_figures(bound.cycle))
        return replace(explanation, calls=calls, jumps=bound.jumps, notes=tuple(notes), first_step=first_step)
    alone = [p for p in found if p.alone.measurements]
    if not alone:
        raise ChunkflowError(
            "The programs of this model run as a cycle of which no pass was measured yet: call the model again."
        )
    newest = alone[-1]
    explanation = explain_plan(newest.plan, measured(newest.plan, newest.alone.measurements))
    return replace(explanation, notes=newest.code.notes, first_step=first_step)
