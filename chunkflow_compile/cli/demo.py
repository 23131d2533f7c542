"""``chunkflow demo``: weight streaming on two ranks, over a nearly full link and over one with time to spare."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from chunkflow_compile.bench.job import RESIDENT, job_of
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import DEMO
from chunkflow_compile.bench.summary import BenchRecord, conditions, summarise
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.record import check_folder, table

from .output import called, say, write_json


def run(arguments: argparse.Namespace) -> int:
    given = {n: v for n in ("layers", "frames") if (v := getattr(arguments, n)) is not None}
    if min([arguments.steps, *given.values()]) < 1:
        raise ChunkflowError("--layers, --frames and --steps must be at least 1.")
    dump = _dump_folder(arguments.dump)
    results: dict[str, BenchRecord] = {}
    for name, regime in DEMO.items():
        sized = replace(regime, size=replace(regime.size, **given))
        job = job_of(sized, arguments.steps, lowering=arguments.lowering, dump=str(dump / name))
        ranks = run_job(job)
        results[name] = result = summarise(job, ranks)
        ratios = {arm: f"{result.ratio(arm, RESIDENT):.3f}" for arm in result.record.arms}
        shown = table(result.record, {"to resident": ratios})
        say(arguments, f"{name}: {regime.shows}\n{conditions(job, result)}\n\n{shown}\n")
    for name, result in results.items():
        say(arguments, f"{name}: {_finding(result)}")
    program = ranks[0].arms["chunkflow"].program  # of the regime that was measured last
    folder = None if program is None else program.folder
    say(arguments, f"\nprogram: {folder}/04_verified.py\nto explain it: {called('explain', str(folder))}")
    bodies = {name: result.record.body for name, result in results.items()}
    write_json(arguments, {**bodies["compute-rich"], "regimes": bodies})
    return 0 if all(arm.equal_to_resident for r in results.values() for arm in r.record.arms.values()) else 1


def _finding(result: BenchRecord) -> str:
    """The result of a regime, in one sentence."""
    mine = result.record.arms["chunkflow"]
    share = (mine.weights_device_bytes or 0) / (mine.weights_total_bytes or 1)
    return (
        f"a step of chunkflow takes {_arm_ratio(result, 'chunkflow', RESIDENT)} times as long as the resident step, with "
        f"{100 * share:.0f} % of the weights on the device; it is {_arm_ratio(result, 'layerwise', 'chunkflow')} times as "
        "fast as layerwise"
    )


def _arm_ratio(result: BenchRecord, arm: str, base: str) -> str:
    """The median of all rounds, and the rounds it comes from: far apart, they say that the machine was busy."""
    rounds = result.ratios(arm, base)
    return f"{median(rounds):.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def _dump_folder(dump: str | None) -> Path:
    """Create the folder before minutes of work.  Raises ChunkflowError if it cannot be written."""
    try:
        return check_folder(dump or tempfile.mkdtemp(prefix="chunkflow-demo-"))
    except OSError as error:
        raise ChunkflowError(f"A temporary folder cannot be created: {error}. Give one: --dump.") from error
