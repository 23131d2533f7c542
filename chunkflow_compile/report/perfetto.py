"""Export a step or a generation as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from chunkflow_compile.units import size

from .generation_tables import Generation
from .lanes import Lanes, lanes_of

# Show two steps, because the copies that the first step starts for the second step would otherwise be cut off.
TRACE_STEPS = 2
_PROCESS = 0
_THREADS = {"compute": 0, "collective": 1, "copy": 2, "stall": 3, "read": 4, "phase": 5, "pull": 6}


def trace_events(lanes: Lanes, title: str) -> str:
    """Return a step as JSON in the Trace Event Format.

    Each lane is shown as a thread.  Times are in microseconds.  A counter shows the bytes of the arena that are in use.
    """
    return _trace_json(title, (*lanes.shown, "stall"), _events(lanes, TRACE_STEPS))


def generation_events(phases: Generation, title: str) -> str:
    """Return a generation as JSON in the Trace Event Format.

    One thread shows the phases, and a counter shows the bytes on the device.  The other threads show the first two calls of
    each phase that has a plan.
    """
    return _trace_json(title, _THREADS, _generation(phases))


def _trace_json(title: str, threads: Iterable[str], events: Iterable[dict[str, Any]]) -> str:
    named = sorted((_THREADS[name], name) for name in threads)
    all_events = [
        _metadata_event("process_name", 0, title),
        *(_metadata_event("thread_name", number, name) for number, name in named),
    ]
    all_events += sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": all_events}, indent=0) + "\n"


def _generation(phases: Generation) -> Iterator[dict[str, Any]]:
    at = 0.0
    for phase in phases:
        begin, end = at + phase.loading_s, at + phase.loading_s + phase.calls * phase.seconds
        said = {"weights": size(phase.weights), "activations": size(phase.activations)}
        if phase.loading_s:
            yield _event("phase", f"{phase.name} loads", at, begin, said)
        yield _event("phase", phase.name, begin, end, {**said, "calls": phase.calls})
        yield _counter("on the device", phase.bytes, at)
        if phase.plan is not None:
            yield from _events(lanes_of(phase.plan), min(TRACE_STEPS, phase.calls), begin)
            yield _counter("arena", 0, end)
        at = end
    yield _counter("on the device", 0, at)


def _events(lanes: Lanes, calls: int, at: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the events of the first ``calls`` calls.  ``at``: the time at which the first call begins, in seconds."""
    call_s = round(lanes.step_s * 1e9) / 1e9  # Round to whole nanoseconds, so that two calls do not overlap.
    last = at + calls * call_s
    for call in range(calls + 1):  # one more call, because some of its copies start during the call before it
        offset = at + call * call_s
        for bar in lanes.bars:
            start, end = max(at, bar.start + offset), min(last, bar.end + offset)
            if end > start:
                said = {"block": bar.block, "what": bar.label, "detail": bar.detail, "call": call}
                yield _event(bar.lane, bar.name, start, end, said)
        for stall in lanes.stalls if call < calls else ():
            said = {"weights": ", ".join(stall.weights), "why": stall.why, "call": call}
            yield _event("stall", f"{stall.before} waits", stall.start + offset, stall.end + offset, said)
        for time, level in lanes.occupancy() if call < calls else ():
            yield _counter("arena", level, time + offset)


def _counter(name: str, nbytes: int, at: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "ts": _us(at), "args": {"bytes": nbytes}}


def _event(lane: str, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    # The start and the end are rounded, not the duration, so that adjacent events stay adjacent.
    begin, stop = _us(start), _us(end)
    return {
        "ph": "X",
        "cat": lane,
        "name": name,
        "pid": _PROCESS,
        "tid": _THREADS[lane],
        "ts": begin,
        "dur": round(stop - begin, 3),
        "args": args,
    }


def _metadata_event(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    """Convert seconds to microseconds, rounded to whole nanoseconds.  The result is at least 0."""
    return max(0, round(seconds * 1e9)) / 1e3
