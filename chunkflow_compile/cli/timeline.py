"""``chunkflow timeline``: draws a step as a picture, or writes a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from chunkflow_compile.options import read_plan
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hoisting import HoistingFigures
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.lanes import Lanes, lanes_of
from chunkflow_compile.report.perfetto import trace_events
from chunkflow_compile.report.pictures import check_picture
from chunkflow_compile.report.plan_tables import exchange_sentence, held
from chunkflow_compile.report.record import fine, prose, seconds
from chunkflow_compile.report.timeline_picture import draw_timeline
from chunkflow_compile.units import size
from chunkflow_compile.weights.progress import Progress

from .planning_arguments import load_and_plan, refuse_options


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if arguments.blocks < 1:
        raise ChunkflowError("--blocks must be at least 1.")
    check_picture(out, ".json")
    progress = Progress(1 if arguments.model.endswith(".json") else 3)
    title, plan, hoisted = _plan_shown(arguments, progress)
    lanes = lanes_of(plan)
    said = f"{title}: {held(plan, hoisted)} of weights on the GPU, {size(plan.moved_bytes)} copied per forward"
    with progress.phase("drawing"):
        if out.suffix == ".json":
            out.write_text(trace_events(lanes, said))
        else:
            draw_timeline(lanes, said, out, block=arguments.block, blocks=arguments.blocks)
    print(prose(f"{seconds(lanes.step_s)} per forward; {_stalls_sentence(lanes)}"))
    print(f"\n{prose(said)}\n\nwritten: {out}")
    return 0


def _stalls_sentence(lanes: Lanes) -> str:
    """Return a sentence on the stalls.  By default, the picture enlarges the middle of the step, but stalls are often at
    its ends, so the picture may not show them clearly."""
    if not lanes.stalls:
        return "compute waits for no weight"
    waited = sum(s.end - s.start for s in lanes.stalls)
    blocks = {b.name: b.block for b in lanes.lane("compute")}
    worst = sorted(lanes.stalls, key=lambda s: s.start - s.end)[:3]
    named = ", ".join(f"{s.before} ({blocks.get(s.before) or 'outside blocks'}) {fine(s.end - s.start)}" for s in worst)
    count = len(lanes.stalls)
    return f"compute waits {count} time{'s' * (count != 1)}, {fine(waited)} in all; longest before {named}"


def _plan_shown(arguments: argparse.Namespace, progress: Progress) -> tuple[str, Plan, HoistingFigures | None]:
    """Return the title of the picture, the plan, and the figures of hoisting or None.  The figures are printed, because
    the picture does not show hoisted weights."""
    if arguments.model.endswith(".json"):
        refuse_options(arguments)
        plan = read_plan(arguments.model)
        return f"{plan.model or Path(arguments.model).name}; policy {plan.policy} on {plan.hardware}", plan, None
    target, plan = load_and_plan(arguments, progress)
    hoisted = target.hoisted
    without = "" if hoisted is None else f"; without {size(hoisted.nbytes)} of hoisted weights"
    if exchanged := exchange_sentence(target.problem, target.why_groups):
        without += f"; exchanges: {exchanged}"
    return f"{target.title}; {target.where}{without}", plan, hoisted
