"""``chunkflow explain``: explains what limited the steps of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from chunkflow_compile.hardware.profiles import is_of_machine
from chunkflow_compile.options import read_measured, read_plan
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.comparison import explain_plan
from chunkflow_compile.report.stages import PLAN_FILE
from chunkflow_compile.runtime.measurement import MEASURED_FILE

from .output import say, write_json


def run(arguments: argparse.Namespace) -> int:
    folder = _measured_folder(Path(arguments.folder))
    if not (folder / MEASURED_FILE).exists():
        raise ChunkflowError(f"{folder} holds no measurement: compile with options={{'dump': DIR}} and call the model.")
    plan = read_plan(folder / PLAN_FILE)
    explanation = explain_plan(plan, read_measured(folder / MEASURED_FILE), profiled=is_of_machine(plan.hardware))
    say(arguments, f"{folder}\n\n{explanation.report(arguments.details, arguments.windows)}")
    write_json(arguments, explanation.to_json())
    return 0


def _measured_folder(folder: Path) -> Path:
    """Return the folder with the measurement to explain: ``folder`` itself if it contains a plan; otherwise the subfolder
    of the lowest rank with the newest measured cycle or, if there is no cycle, with the newest measured program."""
    if not folder.is_dir():
        raise ChunkflowError(f"There is no folder {folder}: use the one that options={{'dump': DIR}} names.")
    if (folder / PLAN_FILE).exists():
        return folder
    measured = [p.parent for p in folder.glob(f"rank*_*/{MEASURED_FILE}")]
    if not measured:
        inside = sorted({p.parent.parent for p in folder.glob(f"*/rank*_*/{MEASURED_FILE}")})
        fix = f"use {' or '.join(map(str, inside))}" if inside else "call the compiled model first"
        raise ChunkflowError(f"{folder} holds no measured program: {fix}.")
    return min(measured, key=_newest_first)


def _newest_first(folder: Path) -> tuple[int, bool, float]:
    """Return a sort key for subfolders.  They are sorted by rank; within a rank, cycles come before programs, and the
    newest comes first.  Cycles are sorted by the time of their measurement, programs by their number."""
    rank, _, name = folder.name.removeprefix("rank").partition("_")
    newest = float(name) if name.isdigit() else (folder / MEASURED_FILE).stat().st_mtime
    return int(rank) if rank.isdigit() else 1 << 30, not name.startswith("cycle"), -newest
