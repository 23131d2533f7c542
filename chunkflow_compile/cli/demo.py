"""``chunkflow demo``: two ranks of a Wan-style model on an emulated link; weights resident, layerwise, and by chunkflow."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from chunkflow_compile.bench.arms import parse_arms
from chunkflow_compile.bench.job import Job
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import DEMO
from chunkflow_compile.bench.summary import describe, summarise
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.report.record import table

from .output import add_json, check_json, say, write_json

RANKS = 2
STEPS = 6


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    layers = DEMO.size.layers
    parser = commands.add_parser(
        "demo",
        help="run the main job on two ranks of this machine",
        description="Two gloo ranks take denoising steps of a small Wan-style transformer from diffusers (random weights, "
        "Ulysses degree 2) over an emulated link: with all weights resident, with the whole next block fetched ahead, and "
        "as ChunkFlow plans it. The outputs must be equal bit for bit.",
        epilog="example: chunkflow demo --json demo.json",
    )
    parser.add_argument("--layers", type=int, default=layers, help=f"blocks of the model (default {layers})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps that count, an arm (default {STEPS})")
    add_json(parser, "the record")
    parser.add_argument("--dump", metavar="DIR", help="folder for the dumped programs (default: a new temporary one)")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.layers < 1 or arguments.steps < 1:
        raise ChunkflowError("--layers and --steps must be at least 1.")
    dump = arguments.dump or tempfile.mkdtemp(prefix="chunkflow-demo-")
    check_json(arguments)
    _make_folder(Path(dump))
    job = Job(
        regime=replace(DEMO, size=replace(DEMO.size, layers=arguments.layers)),
        link=LinkEmulation(bandwidth=DEMO.bandwidth),
        ranks=RANKS,
        arms=parse_arms(DEMO.arms),
        steps=arguments.steps,
        dump=dump,
    )
    ranks = run_job(job)
    found = summarise(job, ranks)
    arms, base = found.record.arms, found.record.arms["resident"].step_s or 1.0
    columns: dict[str, dict[str, object]] = {
        "to resident": {name: f"{(arm.step_s or 0.0) / base:.3f}" for name, arm in arms.items()},
        "collectives a step": {name: run.measurements[-1].collectives for name, run in ranks[0].arms.items()},
    }
    say(arguments, f"{describe(job, found)}\n\n{table(found.record, columns)}")
    folder = ranks[0].arms["chunkflow"].folder
    say(arguments, f"\nprogram: {folder}/04_verified.py\nwhat it did: chunkflow explain {folder}")
    write_json(arguments, found.record.to_json())
    return 0 if all(arm.equal_to_resident for arm in arms.values()) else 1


def _make_folder(dump: Path) -> None:
    """Before a minute of work, not behind it."""
    try:
        dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChunkflowError(f"{dump} cannot be written: {error}. Give another folder.") from error
