"""``chunkflow bench``: policies side by side, measured beside predicted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chunkflow_compile.bench.arms import Arm, parse_arms
from chunkflow_compile.bench.job import Job
from chunkflow_compile.bench.link_load import TO_BE_DERIVED
from chunkflow_compile.bench.pace import PACE
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import GPU_ARMS, PEERS, REGIMES, Regime
from chunkflow_compile.bench.summary import bench_table, describe, summarise
from chunkflow_compile.models.presets import PRESETS, Sizes
from chunkflow_compile.models.small import Size
from chunkflow_compile.models.weightless import load_build
from chunkflow_compile.options import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.report.bench_picture import draw_arms
from chunkflow_compile.report.record import check_writable
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.units import parse_rate

from .output import add_json, add_lowering, check_json, say, write_json

STEPS = 6
# At this load, streaming takes ten times as long as the resident step, which is too slow to be of use.
MOST_LOAD = 10.0
# Slack for processors that are a tenth as fast at times.
MOST_PACE = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    regimes = "\n".join(f"  {name:16} {regime.shows}" for name, regime in REGIMES.items())
    parser = commands.add_parser(
        "bench",
        help="measure policies side by side, on an emulated link or on a GPU",
        description="Measures policies with real ranks, real compiled regions and real copies.  Without a GPU, the link\n"
        "is emulated: each rank has a receive port, whose bandwidth copies and collectives share.  The model is compiled\n"
        "once.  Every arm is a plan of its own, and the arms take turns in random order.\n\n"
        f"MODEL:\n{regimes}\n"
        f"  {'file.py:function':16} your function, which returns a model and the keyword arguments of one call\n"
        f"  with --device cuda also {', '.join(PRESETS)}, with random weights",
        epilog="arms:\n"
        "  resident, layerwise, layerwise-barrier, host-yield\n"
        "  chunkflow             within the bytes of layerwise; in compute-rich, within a quarter of all bytes\n"
        "  chunkflow@40%         within these bytes and those of 40 % of the blocks\n"
        "  layerwise-prefix@40%  within the same bytes: the first blocks that fit are resident, the others layerwise\n"
        "  misjudged             chunkflow, planned as if compute took twice as long and the link were twice as fast\n"
        "  replanned             misjudged with replan_after=2\n"
        "  with --device cuda also inductor, diffusers-group-offload and diffusers-group-offload-compiled, on the\n"
        "  same weights\n\n"
        "example: chunkflow bench contention --json contention.json --picture contention.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a regime, or file.py:function")
    parser.add_argument("--arms", metavar="A,B", help="arms to measure (default: those of the regime)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"measured steps per arm (default {STEPS})"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="P", help="Ulysses degree (default 2; 1 on a GPU without loopback)"
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument(
        "--load",
        type=float,
        metavar="X",
        help="share of the resident step for which streaming all weights would keep the link busy; sets the bandwidth "
        "from the measured compute (default: the load of the regime)",
    )
    link.add_argument("--bandwidth", metavar="SIZE", help="bandwidth of the link, bytes per second such as 200MB")
    parser.add_argument(
        "--order",
        choices=("fair", "fifo"),
        default="fair",
        help="how transfers share the link: in turns, or first come, first served (default fair)",
    )
    parser.add_argument(
        "--one-port", action="store_true", help="all ranks share one port, like GPUs under one root complex"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=PACE,
        metavar="X",
        help="hold each region to X times its measured compute, so that what else the processors do does not count; 0 for "
        f"as long as it takes (default {PACE}; on a GPU always as long as it takes)",
    )
    parser.add_argument(
        "--device",
        choices=("threads", "cpu", "cuda"),
        default="threads",
        help="threads: the CPU, where the host runs ahead of every stream as on a GPU (default); cpu: the CPU, where the "
        "host computes; cuda: a GPU",
    )
    parser.add_argument(
        "--transport",
        choices=("processes", "loopback"),
        default="processes",
        help="loopback: one process stands for all ranks, and all-to-alls go through host memory (with --device cuda)",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="profile of the GPU (default: the measured one, or the built-in one of the card)",
    )
    add_lowering(parser)
    sizes = parser.add_argument_group("sizes of a preset (default: the published ones)")
    for name in ("frames", "height", "width", "batch", "text"):
        sizes.add_argument(f"--{name}", type=int, metavar="N")
    parser.add_argument("--picture", metavar="FILE", help="draw the arms to FILE, PNG or SVG")
    add_json(parser, "the record")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.load is not None and not 0 < arguments.load <= MOST_LOAD:
        raise ChunkflowError(f"--load must be above 0 and at most {MOST_LOAD}, not {arguments.load}.")
    if arguments.pace and not 1 <= arguments.pace <= MOST_PACE:
        raise ChunkflowError(f"--pace must be 0, or from 1 to {MOST_PACE:g}, not {arguments.pace:g}.")
    if arguments.steps < 1 or (arguments.ranks is not None and arguments.ranks < 1):
        raise ChunkflowError("--steps and --ranks must be at least 1.")
    check_json(arguments)
    if arguments.picture:
        check_writable(Path(arguments.picture))
    job = _job(arguments)
    ranks = run_job(job)
    found = summarise(job, ranks)
    say(arguments, f"{describe(job, found)}\n\n{bench_table(found)}")
    if arguments.picture:
        draw_arms(found.record, found.predicted, Path(arguments.picture))
    write_json(arguments, found.to_json())
    return 0 if all(arm.equal_to_resident is not False for arm in found.record.arms.values()) else 1


def _job(arguments: argparse.Namespace) -> Job:
    regime = _regime(arguments)
    arms = parse_arms(tuple(arguments.arms.split(",")) if arguments.arms else regime.arms)
    _check_device(arguments, arms)
    link, load, pace = None, None, None
    if arguments.device != "cuda":
        pace = arguments.pace or None
        load = None if arguments.bandwidth else arguments.load or regime.load
        bandwidth = parse_rate(arguments.bandwidth, "--bandwidth") if arguments.bandwidth else TO_BE_DERIVED
        link = LinkEmulation(bandwidth=bandwidth, order=arguments.order, shared="port" if arguments.one_port else "")
    return Job(
        regime=regime,
        model=None if arguments.model in REGIMES else arguments.model,
        sizes=_sizes(arguments),
        link=link,
        load=load,
        pace=pace,
        ranks=arguments.ranks or (2 if link is not None or arguments.transport == "loopback" else 1),
        arms=arms,
        steps=arguments.steps,
        lowering=arguments.lowering,
        device=arguments.device,
        hardware=arguments.hardware,
        transport=arguments.transport,
    )


def _check_device(arguments: argparse.Namespace, arms: Sequence[Arm]) -> None:
    """Raise ChunkflowError for arguments and arms that do not fit the device."""
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
    peers = [a.name for a in arms if a.policy is None]
    if peers:
        raise ChunkflowError(f"--arms {','.join(peers)}: measured on a GPU only, with --device cuda. Leave them out.")
    if arguments.model in PRESETS or arguments.transport == "loopback" or arguments.hardware:
        raise ChunkflowError("Presets, --transport loopback and --hardware need --device cuda.")


def _sizes(arguments: argparse.Namespace) -> Sizes | None:
    given = {n: getattr(arguments, n) for n in ("frames", "height", "width", "batch", "text")}
    given = {n: v for n, v in given.items() if v is not None}
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
        family="",
        size=Size(),
        load=0.0,
        chunk_bytes=DEFAULT_CHUNK_BYTES if arguments.device == "cuda" else DEFAULT_MIN_BYTES,
        arms=GPU_ARMS if arguments.device == "cuda" else PEERS,
        shows=arguments.model,
    )
