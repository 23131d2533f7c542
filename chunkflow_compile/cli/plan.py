"""``chunkflow plan``: a plan without weights and without a GPU, and its predicted cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.curve import Point, on_grid, plans_along
from chunkflow_compile.passes.plan import chunk_count
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.pictures import check_picture, draw_curve
from chunkflow_compile.report.plan_tables import (
    answer,
    blocks_table,
    packing_sentence,
    peers_sentence,
    summary_table,
    weights_table,
)
from chunkflow_compile.report.record import fitted, prose, seconds
from chunkflow_compile.units import size
from chunkflow_compile.weights.progress import Progress

from .output import say, write_json
from .target import Target, load_and_plan, load_target, note_rates


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
    say(arguments, summary_table(plan, target.problem, target.forwards, target.hoisted))
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
    if arguments.hoist != "no":
        raise ChunkflowError("--curve plans the whole model for each budget: leave out --hoist.")
    progress = Progress(2)
    target = load_target(arguments, progress)
    with progress.phase("planning for each budget"):
        note_rates(target)
        points = _points(target, target.raw)
        said = {"packed": packing_sentence(target.problem), "in pieces": peers_sentence(target.problem)}
        form = ", ".join(name for name, sentence in said.items() if sentence)
        others = _points(target, target.problem) if form else []
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


def _points(target: Target, problem: Problem) -> list[Point]:
    """The curve of one form of the problem."""
    chunk_bytes = target.settings.chunk_bytes
    plans = plans_along(problem, target.hardware, chunk_bytes)
    chunks = sum(chunk_count(w.nbytes, chunk_bytes) for w in problem.weights if w.keep is None)
    progress = tqdm(plans, unit="plan", total=2 * chunks, leave=False, disable=None)  # an upper bound
    return on_grid(progress, chunk_bytes)


def _cells(step_s: float, points: list[Point]) -> list[str]:
    """A forward, and how many times as long it takes as one with all weights resident and raw."""
    return [seconds(step_s), f"{step_s / points[-1].resident_step_s:.3f}"]


def _few(points: list[Point]) -> Iterator[Point]:
    """About thirty points, with the first and the last, to read as a table; the picture shows them all."""
    step = max(1, len(points) // 30)
    yield from points[:-1:step]
    yield points[-1]
