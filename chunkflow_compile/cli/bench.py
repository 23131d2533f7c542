"""``chunkflow bench``: compares measured and predicted steps of several policies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chunkflow_compile.bench.arms import Arm, parse_arms
from chunkflow_compile.bench.bench_record import bench_table, conditions, summarise
from chunkflow_compile.bench.job import Job, link_of
from chunkflow_compile.bench.link_load import TO_BE_DERIVED
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import GPU_ARMS, OWN_ARMS, REGIMES, Regime
from chunkflow_compile.catalog.presets import PRESETS, OutputSizes
from chunkflow_compile.catalog.weightless import load_build
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES
from chunkflow_compile.report.pictures import check_picture, draw_arms
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.units import parse_rate

from .arguments import sizes_given
from .output import say, write_json

# The maximum of --load.  At this load, a step takes ten times as long as the resident step, which is too slow to be
# useful.
MOST_LOAD = 10.0
# The maximum of --pace, which suffices for processors that sometimes run at a tenth of their speed.
MOST_PACE = 10.0


def run(arguments: argparse.Namespace) -> int:
    if arguments.load is not None and not 0 < arguments.load <= MOST_LOAD:
        raise ChunkflowError(f"--load must be above 0 and at most {MOST_LOAD}, not {arguments.load}.")
    if arguments.pace and not 1 <= arguments.pace <= MOST_PACE:
        raise ChunkflowError(f"--pace must be 0, or from 1 to {MOST_PACE:g}, not {arguments.pace:g}.")
    if arguments.steps < 1 or (arguments.ranks is not None and arguments.ranks < 1):
        raise ChunkflowError("--steps and --ranks must be at least 1.")
    if arguments.picture:
        check_picture(arguments.picture)
    job = _job(arguments)
    result = summarise(job, run_job(job))
    say(arguments, f"{conditions(job, result)}\n\n{bench_table(result)}")
    if arguments.picture:
        draw_arms(result.record, result.predicted, Path(arguments.picture))
    write_json(arguments, result.to_json())
    return 0 if all(arm.equal_to_resident is not False for arm in result.record.arms.values()) else 1


def _job(arguments: argparse.Namespace) -> Job:
    regime = _regime(arguments)
    arms = parse_arms(tuple(arguments.arms.split(",")) if arguments.arms else regime.arms)
    _check_device(arguments, arms)
    link, load, pace = None, None, None
    if arguments.device != "cuda":
        pace = arguments.pace or None
        load = None if arguments.bandwidth else arguments.load or regime.load
        bandwidth = parse_rate(arguments.bandwidth, "bandwidth") if arguments.bandwidth else TO_BE_DERIVED
        link = link_of(regime, bandwidth, arguments.order, arguments.one_port)
    ranks = 1 if link is None and arguments.transport != "loopback" else regime.ranks
    return Job(
        regime=regime,
        model=None if arguments.model in REGIMES else arguments.model,
        sizes=_sizes(arguments),
        link=link,
        load=load,
        pace=pace,
        ranks=arguments.ranks or ranks,
        arms=arms,
        steps=arguments.steps,
        lowering=arguments.lowering,
        device=arguments.device,
        hardware=arguments.hardware,
        transport=arguments.transport,
        lines=True,
    )


def _check_device(arguments: argparse.Namespace, arms: Sequence[Arm]) -> None:
    """Raise ChunkflowError if the device does not support an argument or an arm."""
    if arguments.device == "cuda":
        check_device(torch.device("cuda"))
        if arguments.bandwidth or arguments.load or arguments.one_port or arguments.order != "fair":
            raise ChunkflowError(
                "--load, --bandwidth, --one-port and --order describe an emulated link, but --device cuda uses a real "
                "one: leave them out."
            )
        if arguments.transport == "processes" and (arguments.ranks or 1) > 1:
            raise ChunkflowError(
                "--ranks above 1 needs --transport loopback, because bench uses one GPU. For several GPUs, start a "
                "script of your own with torchrun."
            )
        return
    others = [a.name for a in arms if a.policy is None]
    if others:
        raise ChunkflowError(f"--arms {','.join(others)}: measured on a GPU only, with --device cuda. Leave them out.")
    if arguments.model in PRESETS or arguments.transport == "loopback" or arguments.hardware:
        raise ChunkflowError("Presets, --transport loopback and --hardware need --device cuda.")


def _sizes(arguments: argparse.Namespace) -> OutputSizes | None:
    given = sizes_given(arguments)
    if arguments.model in PRESETS:
        sizes = replace(PRESETS[arguments.model].sizes, **given)
        PRESETS[arguments.model].shape(sizes)
        return sizes
    if given:
        raise ChunkflowError(f"--{next(iter(given))} is a size of a preset; {arguments.model} has its own.")
    return None


def _regime(arguments: argparse.Namespace) -> Regime:
    if arguments.model in REGIMES:
        return REGIMES[arguments.model]
    own = ":" in arguments.model or ".py" in arguments.model
    if not own and arguments.model not in PRESETS:
        raise ChunkflowError(
            f"There is no regime {arguments.model!r}: give one of {', '.join(REGIMES)}, or file.py:function for a model "
            "of your own."
        )
    if own and arguments.device != "cuda" and not (arguments.bandwidth or arguments.load):
        raise ChunkflowError(
            "A model of your own needs a link: give --load 0.7 for a link that is nearly full, or --bandwidth 200MB."
        )
    if own:
        load_build(arguments.model)
    return Regime(
        chunk_bytes=DEFAULT_CHUNK_BYTES if arguments.device == "cuda" else DEFAULT_MIN_BYTES,
        arms=GPU_ARMS if arguments.device == "cuda" else OWN_ARMS,
        shows=arguments.model,
    )
