"""A step or a generation as Chrome trace events, which can be opened in Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from chunkflow_compile.units import size

from .generation import Generation
from .lanes import Lanes, lanes_of

# Two steps, so that copies that one step starts for the next are shown whole.
TRACE_STEPS = 2
_PROCESS = 0
_THREADS = {"compute": 0, "collective": 1, "copy": 2, "stall": 3, "read": 4, "phase": 5, "pull": 6}


def trace_events(lanes: Lanes, title: str) -> str:
    """A step as JSON in the Trace Event Format: one thread per lane, complete events in microseconds, arena bytes as a
    counter."""
    return _trace_json(title, (*lanes.shown, "stall"), _events(lanes, TRACE_STEPS))


def generation_events(phases: Generation, title: str) -> str:
    """A generation in the same format.  One thread shows the phases, with bytes on the device as a counter.  The other
    threads show the first two calls of each phase that has a plan."""
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
    """The first ``calls`` calls, from ``at`` seconds on."""
    call_s = round(lanes.step_s * 1e9) / 1e9  # whole nanoseconds, so that two calls do not overlap
    last = at + calls * call_s
    for call in range(calls + 1):  # of the call after the last, only the copies that start before it
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
    """Seconds as microseconds, rounded to the nanosecond and at least 0."""
    return max(0, round(seconds * 1e9)) / 1e3
