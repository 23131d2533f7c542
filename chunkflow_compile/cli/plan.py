"""``chunkflow plan``: makes a plan and predicts the time and memory of a step, without weights and without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.curve import Point, on_grid, plans_along
from chunkflow_compile.passes.plan import chunk_count
from chunkflow_compile.report.pictures import check_picture, draw_curve
from chunkflow_compile.report.plan_tables import (
    answer,
    blocks_table,
    hoisting_sentence,
    packing_sentence,
    peers_sentence,
    summary_table,
    weights_table,
)
from chunkflow_compile.report.record import fitted, prose, seconds
from chunkflow_compile.units import size
from chunkflow_compile.weights.progress import Progress

from .output import say, write_json
from .planned_model import PlannedModel
from .planning_arguments import load_and_plan, load_target, note_rates


def run(arguments: argparse.Namespace) -> int:
    if arguments.curve is not None:
        return _curve(arguments)
    target, plan = load_and_plan(arguments, Progress(2))
    goal = target.settings.goal
    said = f"the smallest plan that takes at most {goal.longest:g} times as long as all-resident"
    if goal.memory is not None:
        what = "weights and activations" if goal.activations else "weights"
        said = f"the fastest plan within {size(goal.memory)} of {what}"
    say(
        arguments,
        f"{answer(plan, target.problem, target.forwards, target.hoisted)}\n\n{target.heading}\ngoal: {said}\n",
    )
    say(arguments, summary_table(plan, target.problem, target.forwards, target.hoisted, target.why_groups))
    if arguments.weights:
        named = {w.name for w in target.problem.weights if w.source.compressed}
        say(arguments, f"\n{blocks_table(plan, target.problem)}\n\n{weights_table(plan.weights, named)}")
    write_json(arguments, plan.to_json())
    if arguments.json:
        say(arguments, f"\nplan {plan.digest}: {arguments.json}")
    return 0


def _curve(arguments: argparse.Namespace) -> int:
    picture = arguments.curve
    if picture:
        check_picture(picture)
    goal = arguments.memory or arguments.weight_memory or arguments.slowdown
    if goal or arguments.weights or arguments.yields != "auto":
        raise ChunkflowError(
            "--curve covers all budgets: leave out --memory, --weight-memory, --slowdown, --yield and --weights."
        )
    if arguments.hoist == "auto":
        raise ChunkflowError(
            "--hoist auto decides for one budget, but --curve covers all budgets: use --hoist or remove it."
        )
    progress = Progress(2)
    target = load_target(arguments, progress)
    with progress.phase("planning for each budget"):
        note_rates(target)
        points = _points(target, plans_along(target.raw, target.hardware, target.settings.chunk_bytes))
        said = {
            "packed": packing_sentence(target.problem),
            "in pieces": peers_sentence(target.problem),
            "hoisted": "" if target.hoisted is None else hoisting_sentence(target.hoisted),
        }
        form = ", ".join(name for name, sentence in said.items() if sentence)
        others = _points(target, _plans_of_step(target)) if form else []
    say(arguments, f"{target.heading}\n")
    headers = ["weights on the GPU", "forward", "of resident"]
    rows = [[size(p.memory), *_cells(p.step_s, points)] for p in _few(points)]
    if others:
        say(arguments, "".join(prose(f"{name}: {sentence}") + "\n" for name, sentence in said.items() if sentence))
        headers += [form, "of resident"]
        for row, point in zip(rows, _few(points), strict=True):
            within = [p.step_s for p in others if p.memory <= point.memory]
            row += _cells(min(within), points) if within else ["-", "-"]
    say(arguments, fitted(rows, headers))
    write_json(arguments, {"model": target.heading, "points": points, **({form: others} if others else {})})
    if picture:
        title = f"{target.title}; {target.where}"
        draw_curve(points, others, form, title, Path(picture))
        say(arguments, f"\npicture: {picture}")
    return 0


def _plans_of_step(target: PlannedModel) -> Iterator[Point]:
    """Yield the points of plans for the program that runs in every step.  If products are hoisted, memory includes the
    rows, and the time includes a forward's share of computing the rows."""
    settings, hoisted = target.settings_of_step, target.hoisted
    for point in plans_along(target.problem, target.hardware, settings.chunk_bytes, settings.arena):
        if hoisted is None:
            yield point
        else:
            step_s = point.step_s + hoisted.seconds_per_call
            yield replace(point, memory=hoisted.budget_for(point.memory), step_s=step_s)


def _points(target: PlannedModel, plans: Iterator[Point]) -> list[Point]:
    """Return the points of the curve of memory against step time.  ``plans``: the points of all plans."""
    chunk_bytes = target.settings.chunk_bytes
    chunks = sum(chunk_count(w.nbytes, chunk_bytes) for w in target.raw.weights if w.keep is None)
    progress = tqdm(
        plans, unit="plan", total=2 * chunks, leave=False, disable=None
    )  # an upper bound of the number of plans
    return on_grid(progress, chunk_bytes)


def _cells(step_s: float, points: list[Point]) -> list[str]:
    """Return the cells with the time of a forward, and with its ratio to the time of a forward with all weights resident
    and uncompressed."""
    return [seconds(step_s), f"{step_s / points[-1].resident_step_s:.3f}"]


def _few(points: list[Point]) -> Iterator[Point]:
    """Yield about thirty points for the table, including the first and the last point.  The picture shows all points."""
    step = max(1, len(points) // 30)
    yield from points[:-1:step]
    yield points[-1]
