"""``chunkflow plan``: a plan without weights and without a GPU, and what it is expected to cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.cli import target
from chunkflow_compile.passes.curve import Point, on_grid, plans_along
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.place import DEFAULT_SLOWDOWN, place
from chunkflow_compile.passes.plan import Plan, WeightPlan, chunk_count, runs
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.pictures import draw_curve
from chunkflow_compile.report.record import check_writable, seconds, size


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan a model for a machine, without weights",
        description="Traces a model without weights for any Ulysses degree and decides, for a machine and a goal, where each "
        "weight lives and when its copies start.",
        epilog="example: chunkflow plan wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --memory 4GiB --json plan.json",
    )
    target.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the plan there")
    parser.add_argument("--weights", action="store_true", help="a line for every weight, with the reason")
    parser.add_argument(
        "--curve",
        nargs="?",
        const="",
        metavar="PNG",
        help="memory against predicted step time; as a picture to PNG too",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for path in (arguments.json, arguments.curve):
        if path:
            check_writable(Path(path))
    if arguments.curve is not None and (arguments.json or arguments.weights or arguments.memory or arguments.slowdown):
        raise ChunkflowError("--curve is of all budgets: it goes without --memory, --slowdown, --weights and --json.")
    found = target.load(arguments)
    problem, options = found.cut.problem, found.options
    if arguments.curve is not None:
        return _curve(found, arguments.curve)
    plan = place(
        problem,
        found.hardware,
        chunk_bytes=options.chunk_bytes,
        memory=options.memory_bytes(),
        slowdown=options.slowdown,
    )
    print(f"{found.title}; Ulysses degree {found.degree} on {found.hardware.name}, {found.forwards} forwards a step\n")
    if options.memory is not None:
        goal = f"the fastest within {size(options.memory_bytes())}"
    else:
        goal = f"the smallest within {options.slowdown or DEFAULT_SLOWDOWN:g} times the resident step"
    print(_summary(plan, problem, found.forwards, goal))
    print(f"\n{_blocks(plan, problem)}")
    if arguments.weights:
        print(f"\n{_weights(plan)}")
    if arguments.json:
        Path(arguments.json).write_text(plan.to_json())
        print(f"\nplan {plan.digest}: {arguments.json}")
    return 0


def _summary(plan: Plan, problem: Problem, forwards: int, goal: str) -> str:
    predicted = plan.predicted
    assert predicted is not None
    ratio = predicted.step_s / (predicted.resident_step_s or 1.0)
    rows = [
        ("goal", goal),
        ("step", f"{seconds(predicted.step_s * forwards)}, {ratio:.3f} times that with all weights resident"),
        ("  of it compute", seconds(predicted.compute_s * forwards)),
        (
            "  collectives",
            f"{seconds(predicted.collective_s * forwards)}, {seconds(predicted.inflation_s * forwards)} by copies",
        ),
        ("  waiting for weights", seconds(predicted.exposed_s * forwards)),
        ("copies, most of them hidden", seconds(predicted.copy_s * forwards)),
        ("weights on the device", f"{size(plan.device_bytes)} of {size(problem.total_bytes)}"),
        ("  arena", size(plan.arena_bytes)),
        ("moved a step", size(plan.moved_bytes * forwards)),
        ("regions, collectives", f"{len(problem.regions)}, {len(problem.collectives)}"),
    ]
    return tabulate(rows, tablefmt="plain")


def _blocks(plan: Plan, problem: Problem) -> str:
    """A row a block, equal neighbours as one."""
    block = {k: r.block for k, r in enumerate(problem.regions)}
    rows: dict[str, list[WeightPlan]] = {}
    for weight in plan.weights:
        rows.setdefault(block.get(weight.first_use, "") or "outside blocks", []).append(weight)
    ordered = sorted(rows, key=lambda name: min(w.first_use for w in rows[name]))
    cells = [(name, _row(plan, rows[name])) for name in ordered]
    lines = []
    for row, group in groupby(cells, key=lambda c: c[1]):
        names = [name for name, _ in group]
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rpartition('.')[2]}"
        lines.append((label, *row))
    return tabulate(lines, headers=("block", "weights", "streamed", "resident", "least slack"), tablefmt="simple")


def _row(plan: Plan, weights: list[WeightPlan]) -> tuple[str, ...]:
    total = sum(w.nbytes for w in weights)
    streamed = sum(_streamed_bytes(plan, w) for w in weights)
    slacks = [w.slack_s for w in weights if w.slack_s is not None]
    slack = (
        "-"
        if not slacks
        else f"{min(slacks) * 1e3:.1f} ms"
        if min(slacks) >= 0
        else f"waits {-min(slacks) * 1e3:.1f} ms"
    )
    return size(total), size(streamed), size(total - streamed), slack


def _streamed_bytes(plan: Plan, weight: WeightPlan) -> int:
    spans = (plan.span(weight, r.first, r.end) for r in runs(weight.windows) if r.window is not None)
    return sum(end - begin for begin, end in spans)


def _weights(plan: Plan) -> str:
    rows = [(w.name, size(w.nbytes), w.home, w.why) for w in plan.weights]
    return tabulate(rows, headers=("weight", "size", "home", "why"), tablefmt="simple")


def _curve(found: target.Target, picture: str) -> int:
    problem, options = found.cut.problem, found.options
    plans = plans_along(problem, found.hardware, options.chunk_bytes)
    chunks = sum(chunk_count(w.nbytes, options.chunk_bytes) for w in problem.weights if w.keep is None)
    progress = tqdm(plans, unit="plan", total=2 * chunks, leave=False, disable=None)  # fewer if the copies hide sooner
    points = on_grid(progress, options.chunk_bytes)
    print(f"{found.title}; Ulysses degree {found.degree} on {found.hardware.name}\n")
    rows = [
        (size(p.memory), seconds(p.step_s * found.forwards), f"{p.step_s / points[-1].resident_step_s:.3f}")
        for p in _few(points)
    ]
    print(tabulate(rows, headers=("weights on the device", "step", "of resident"), disable_numparse=True))
    if picture:
        draw_curve(
            points, found.forwards, f"{found.title}, degree {found.degree}, {found.hardware.name}", Path(picture)
        )
        print(f"\npicture: {picture}")
    return 0


def _few(points: list[Point]) -> Iterator[Point]:
    """At most some thirty points, first and last among them: the table is read, the picture has them all."""
    step = max(1, len(points) // 30)
    yield from points[:-1:step]
    yield points[-1]
