"""``chunkflow timeline``: a step as a picture, or as a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from chunkflow_compile.options import read_plan
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.lanes import Lanes, lanes_of
from chunkflow_compile.report.perfetto import trace_events
from chunkflow_compile.report.pictures import check_picture
from chunkflow_compile.report.record import fine, seconds
from chunkflow_compile.report.timeline_picture import draw_timeline
from chunkflow_compile.units import size

from .output import Progress
from .target import load_and_plan, refuse_options


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if arguments.blocks < 1:
        raise ChunkflowError("--blocks must be at least 1.")
    check_picture(out, ".json")
    title, plan = _plan_shown(arguments)
    lanes = lanes_of(plan)
    total = sum(w.nbytes for w in plan.weights)
    held = f"{size(plan.device_bytes)} of {size(total)} of weights on the device"
    said = f"{title}: {held}, {size(plan.moved_bytes)} copied a call"
    if out.suffix == ".json":
        out.write_text(trace_events(lanes, said))
    else:
        draw_timeline(lanes, said, out, block=arguments.block, blocks=arguments.blocks)
    print(f"{said}\none call {seconds(lanes.step_s)}; {_stalls_sentence(lanes)}\n\nwritten: {out}")
    return 0


def _stalls_sentence(lanes: Lanes) -> str:
    """The stalls in a sentence: the picture enlarges the middle by default, and stalls are often at the ends."""
    if not lanes.stalls:
        return "compute waits for no weight"
    waited = sum(s.end - s.start for s in lanes.stalls)
    blocks = {b.name: b.block for b in lanes.lane("compute")}
    worst = sorted(lanes.stalls, key=lambda s: s.start - s.end)[:3]
    named = ", ".join(f"{s.before} ({blocks.get(s.before) or 'outside blocks'}) {fine(s.end - s.start)}" for s in worst)
    count = len(lanes.stalls)
    return f"compute waits {count} time{'s' * (count != 1)}, {fine(waited)} in all; longest before {named}"


def _plan_shown(arguments: argparse.Namespace) -> tuple[str, Plan]:
    if arguments.model.endswith(".json"):
        refuse_options(arguments)
        plan = read_plan(arguments.model)
        return f"{Path(arguments.model).name}, policy {plan.policy} on {plan.hardware}", plan
    target, plan = load_and_plan(arguments, Progress(2))
    return f"{target.title}; {target.parallel} on {target.machine}", plan
