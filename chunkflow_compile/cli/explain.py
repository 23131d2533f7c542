"""``chunkflow explain``: after a run, predicted beside measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from chunkflow_compile.options import read_plan
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.explain import explain_plan
from chunkflow_compile.report.stages import PLAN_FILE
from chunkflow_compile.runtime.measurement import MEASURED_FILE, Measured

from .output import add_json, check_json, say, write_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "explain",
        help="after a run: predicted beside measured, the worst stalls and why",
        description="Explains a run of a model that was compiled with options={'dump': DIR}: the step, waits, collectives\n"
        "and copies, predicted beside measured; the worst stalls with their reasons; what limits the step.  In\n"
        "Python: print(chunkflow_compile.explain(compiled)).",
        epilog="examples:\n"
        "  chunkflow demo --dump run\n"
        "  chunkflow explain run/contention    # the newest program of the first rank\n"
        "  chunkflow explain run/contention/rank1_3 --windows",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="folder of the dump, or of one program in it")
    parser.add_argument("--windows", action="store_true", help="list every window")
    add_json(parser, "the explanation")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    folder = _program(Path(arguments.folder))
    try:
        text = (folder / MEASURED_FILE).read_text()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ChunkflowError(
            f"{folder} holds no measurement ({cause}): compile with options={{'dump': DIR}} and call the model."
        ) from error
    explanation = explain_plan(read_plan(folder / PLAN_FILE), Measured.from_json(text))
    say(arguments, f"{folder}\n\n{explanation.report(arguments.windows)}")
    write_json(arguments, explanation.to_json())
    return 0


def _program(folder: Path) -> Path:
    """The folder itself if it holds a plan, else its newest measured program of the lowest rank."""
    if not folder.is_dir():
        raise ChunkflowError(f"There is no folder {folder}: use the one that options={{'dump': DIR}} names.")
    if (folder / PLAN_FILE).exists():
        return folder
    found = [p.parent for p in folder.glob(f"rank*_*/{MEASURED_FILE}")]
    if not found:
        inside = sorted({p.parent.parent for p in folder.glob(f"*/rank*_*/{MEASURED_FILE}")})
        fix = f"use {' or '.join(map(str, inside))}" if inside else "call the compiled model first"
        raise ChunkflowError(f"{folder} holds no measured program: {fix}.")
    return min(found, key=_order)


def _order(folder: Path) -> tuple[int, int]:
    rank, _, number = folder.name.removeprefix("rank").partition("_")
    return (int(rank), -int(number)) if rank.isdigit() and number.isdigit() else (1 << 30, 0)
