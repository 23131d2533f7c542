"""``chunkflow plan``: a plan without weights and without a GPU, and its predicted cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.curve import Point, on_grid, plans_along
from chunkflow_compile.passes.placement.place import DEFAULT_SLOWDOWN
from chunkflow_compile.passes.plan import chunk_count
from chunkflow_compile.report.pictures import check_picture, draw_curve
from chunkflow_compile.report.plan_tables import blocks_table, summary_table, weights_table
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size

from .output import Progress, say, write_json
from .target import load_and_plan, load_target, note_rates


def run(arguments: argparse.Namespace) -> int:
    if arguments.curve is not None:
        return _curve(arguments)
    target, plan = load_and_plan(arguments, Progress(2))
    say(arguments, f"{target.heading}\n")
    if target.settings.memory is not None:
        goal = f"the fastest within {size(target.settings.memory)}"
    else:
        goal = f"the smallest within {target.settings.slowdown or DEFAULT_SLOWDOWN:g} times the resident step"
    say(arguments, f"goal: {goal}\n\n{summary_table(plan, target.problem, target.forwards)}")
    say(arguments, f"\n{blocks_table(plan, target.problem)}")
    if arguments.weights:
        say(arguments, f"\n{weights_table(plan.weights)}")
    write_json(arguments, plan.to_json())
    if arguments.json:
        say(arguments, f"\nplan {plan.digest}: {arguments.json}")
    return 0


def _curve(arguments: argparse.Namespace) -> int:
    picture = arguments.curve
    if picture:
        check_picture(picture)
    if arguments.weights or arguments.memory or arguments.slowdown or arguments.yields != "auto":
        raise ChunkflowError("--curve covers all budgets: leave out --memory, --slowdown, --yield and --weights.")
    target = load_target(arguments, Progress(1))
    note_rates(target)
    problem, chunk_bytes = target.problem, target.settings.chunk_bytes
    plans = plans_along(problem, target.hardware, chunk_bytes)
    chunks = sum(chunk_count(w.nbytes, chunk_bytes) for w in problem.weights if w.keep is None)
    progress = tqdm(plans, unit="plan", total=2 * chunks, leave=False, disable=None)  # an upper bound
    points = on_grid(progress, chunk_bytes)
    say(arguments, f"{target.heading}\n")
    rows = [
        (size(p.memory), seconds(p.step_s * target.forwards), f"{p.step_s / points[-1].resident_step_s:.3f}")
        for p in _few(points)
    ]
    say(arguments, tabulate(rows, headers=("weights on the device", "step", "of resident"), disable_numparse=True))
    write_json(arguments, {"model": target.heading, "points": points})
    if picture:
        draw_curve(points, target.forwards, f"{target.title}, {target.parallel}, {target.machine}", Path(picture))
        say(arguments, f"\npicture: {picture}")
    return 0


def _few(points: list[Point]) -> Iterator[Point]:
    """About thirty points, with the first and the last, to read as a table; the picture shows them all."""
    step = max(1, len(points) // 30)
    yield from points[:-1:step]
    yield points[-1]
