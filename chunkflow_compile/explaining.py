"""``explain``: what a compiled model did, compared with what its plan predicted."""

from __future__ import annotations

from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placing import programs
from chunkflow_compile.report.explain import Explanation, explain_plan
from chunkflow_compile.runtime.measurement import measured


def explain(compiled: nn.Module) -> Explanation:
    """Compare prediction and measurement of the newest program on a compiled or placed model; print the result.

    Times are for one call of the model.  Raises ChunkflowError if the model has not run yet.
    """
    found = [p for p in programs(compiled) if p.measurements]
    if not found:
        raise ChunkflowError("No program of this model has run yet: compile it with ChunkFlow and call it first.")
    newest = found[-1]
    return explain_plan(newest.plan, measured(newest.plan, newest.measurements))
