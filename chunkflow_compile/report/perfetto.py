"""A step as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .lanes import Lanes, around

# Two steps, so that copies that one step starts for the next are shown whole.
STEPS = 2
_PROCESS = 0
_THREADS = {"compute": 0, "collective": 1, "copy": 2, "stall": 3, "read": 4}


def trace_events(lanes: Lanes, title: str) -> str:
    """JSON in the Trace Event Format: a thread per lane, complete events in microseconds, arena bytes as a counter."""
    events = [_name("process_name", 0, title), *(_name("thread_name", _THREADS[n], n) for n in (*lanes.shown, "stall"))]
    events += sorted(_events(lanes), key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=0) + "\n"


def _events(lanes: Lanes) -> Iterator[dict[str, Any]]:
    whole = STEPS * round(lanes.step_s * 1e9) / 1e9
    for step in range(STEPS):
        offset = step * round(lanes.step_s * 1e9) / 1e9  # whole nanoseconds, so that two calls do not overlap
        for bar in lanes.bars:
            start, end = max(0.0, bar.start + offset), min(whole, bar.end + offset)
            if end > start:
                said = {"block": bar.block, "what": bar.label, "detail": bar.detail, "call": step}
                yield _event(bar.lane, bar.name, start, end, said)
        for stall in lanes.stalls:
            said = {"weights": ", ".join(stall.weights), "why": stall.why, "call": step}
            yield _event("stall", f"{stall.before} waits", stall.start + offset, stall.end + offset, said)
        for time, level in lanes.occupancy():
            values = {"bytes": level}
            yield {"ph": "C", "name": "arena", "pid": _PROCESS, "ts": _us(time + offset), "args": values}
    # Copies that the last step shown starts for the one after it, cut at the end of the trace.
    for bar in lanes.bars:
        if bar.start < 0:
            begin, end = next(around(bar.start, bar.end, lanes.step_s))
            said = {"block": bar.block, "what": bar.label, "detail": bar.detail, "call": STEPS}
            yield _event(bar.lane, bar.name, begin + whole - lanes.step_s, end + whole - lanes.step_s, said)


def _event(lane: str, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    # Both ends are rounded, not the length, so that adjacent events stay adjacent.
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


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    """Microseconds, rounded to the nanosecond and at least 0."""
    return max(0, round(seconds * 1e9)) / 1e3
