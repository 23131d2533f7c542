"""``spans``: OpenTelemetry spans for the calls of placed models.  The spans are created after the calls, from the
measurements of the calls."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from chunkflow_compile.hardware.machine import install_line
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.metrics import models_of
from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.runtime.bound_cycle import BoundCycle
from chunkflow_compile.runtime.measurement import as_one

# The beginning and the end of a step, in seconds of time.monotonic(), and the attributes of the step's span.
_Step = tuple[float, float, dict[str, Any]]


@contextlib.contextmanager
def spans(pipe_or_model: Any, tracer: Any = None) -> Iterator[None]:
    """Measure all calls within a ``with`` statement, and create spans for these calls when the statement ends.

    Each component that ran gets a span, which is a child of the current span.  Each call of a program, or each pass over a
    cycle, gets a span, which is a child of the component's span.  A pass that was interrupted by a jump gets no span.  At the
    end of the ``with`` statement, this function waits for the calls in flight.

    ``tracer``: an OpenTelemetry tracer; by default a tracer from the global provider.
    Raises ChunkflowError if opentelemetry-api is not installed, or if ``tracer`` is not a tracer.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ChunkflowError(f"Spans need opentelemetry-api: {install_line('metrics')}.") from error
    chosen = trace.get_tracer("chunkflow_compile") if tracer is None else tracer
    if not hasattr(chosen, "start_span"):
        raise ChunkflowError(f"tracer={tracer!r} is no tracer: pass that of opentelemetry.trace.get_tracer(name).")
    begun, wall = time.monotonic(), time.time_ns()

    def ns(at: float) -> int:
        return wall + round((at - begun) * 1e9)

    devices = {s.arena.streams for model in models_of(pipe_or_model).values() for s in programs(model) if not s.closed}
    for device in devices:
        device.measure(sys.maxsize)
    try:
        yield
    finally:
        for device in devices:
            device.measure(None)
        shown = set[BoundCycle]()
        for name, model in models_of(pipe_or_model).items():
            bound = [s for s in (*cycles(model), *programs(model)) if s not in shown]
            shown.update(bound)
            if steps := sorted(_steps(bound, begun), key=lambda step: step[0]):
                _make(chosen, trace.set_span_in_context, name, steps, ns)


def _make(tracer: Any, below: Callable[[Any], Any], name: str, steps: list[_Step], ns: Callable[[float], int]) -> None:
    phase = tracer.start_span(
        f"chunkflow {name}", start_time=ns(steps[0][0]), attributes={"chunkflow.steps": len(steps)}
    )
    for begin, end, attributes in steps:
        tracer.start_span("chunkflow step", below(phase), start_time=ns(begin), attributes=attributes).end(ns(end))
    phase.end(ns(max(end for _, end, _ in steps)))


def _steps(bound: Iterable[BoundCycle], begun: float) -> Iterator[_Step]:
    """Yield those steps of the programs and cycles in ``bound`` that ended after ``begun``.

    ``begun``: a time in seconds of time.monotonic().
    """
    for cycle, calls in ((s, calls) for s in bound for calls in s.passes):
        plan, zero, whole, last = cycle.plan, cycle.arena.streams.zero, as_one(calls), calls[-1]
        begin, end = zero + whole.begin_s, zero + last.begin_s + last.step_s
        if end <= begun:
            continue
        attributes: dict[str, Any] = {
            "chunkflow.plan": whole.plan,
            "chunkflow.calls": len(calls),
            "chunkflow.measured_s": whole.step_s,
            "chunkflow.stalled_s": whole.exposed_h2d_s,
            "chunkflow.collective_s": whole.collective_s,
            "chunkflow.moved_bytes": whole.moved_bytes + whole.primed_bytes,
        }
        if plan.predicted is not None and plan.digest == whole.plan:
            attributes["chunkflow.predicted_s"] = plan.predicted.step_s
        yield begin, end, attributes
