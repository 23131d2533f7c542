"""``chunkflow bench``: policies side by side on an emulated link, measured beside predicted."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chunkflow_compile.bench.arms import Arm, parse_arms
from chunkflow_compile.bench.job import Job
from chunkflow_compile.bench.link_load import TO_BE_DERIVED
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

from .output import add_json, check_json, say, write_json

STEPS = 6
# The link would take ten times as long as compute: no step is worth the wait.
MOST_LOAD = 10.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    regimes = "\n".join(f"  {name:16} {regime.shows}" for name, regime in REGIMES.items())
    parser = commands.add_parser(
        "bench",
        help="measure policies side by side, on an emulated link or on a GPU",
        description="Measures policies on real ranks, real compiled regions and real copies.  Without a GPU over a link\n"
        "that is emulated: a receive port a rank, of some bandwidth, which copies and collectives share.  The model\n"
        "is compiled once; each arm is a plan of its own, and steps of the arms are taken in turns, in random order.\n\n"
        f"MODEL:\n{regimes}\n  {'file.py:function':16} your own, that returns a model and the keyword arguments of one call\n"
        f"  with --device cuda also {', '.join(PRESETS)}, with random weights",
        epilog="arms: resident, layerwise, layerwise-barrier, host-yield, chunkflow (within the bytes that layerwise\n"
        "takes; in compute-rich within a quarter of all bytes); chunkflow@40% and layerwise-prefix@40%, within these bytes\n"
        "and those of 40 % of the blocks; misjudged, chunkflow planned from figures wrong by a factor of 2; replanned, the\n"
        "same with replan_after=2.  With --device cuda also inductor, diffusers-group-offload and\n"
        "diffusers-group-offload-compiled, on the same weights.\n\n"
        "example: chunkflow bench contention --json contention.json --picture contention.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a regime, or file.py:function")
    parser.add_argument("--arms", metavar="A,B", help="what is measured (default: those of the regime)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"that count, an arm (default {STEPS})")
    parser.add_argument("--ranks", type=int, metavar="P", help="Ulysses degree, a process each (default 2; 1 on a GPU)")
    link = parser.add_mutually_exclusive_group()
    link.add_argument(
        "--load",
        type=float,
        metavar="X",
        help="share of the resident step for which streaming all weights would keep the link busy; its bandwidth follows "
        "from the compute measured (default: the regime's)",
    )
    link.add_argument("--bandwidth", metavar="SIZE", help="of the link, a second, as 200MB, instead of a load")
    parser.add_argument(
        "--order", choices=("fair", "fifo"), default="fair", help="how transfers share it (default fair)"
    )
    parser.add_argument("--one-port", action="store_true", help="all ranks share one port, as behind one root complex")
    parser.add_argument(
        "--device",
        choices=("threads", "cpu", "cuda"),
        default="threads",
        help="threads: the host runs ahead of every stream, as on a GPU (default); cpu: it computes; cuda: a GPU",
    )
    parser.add_argument(
        "--transport",
        choices=("processes", "loopback"),
        default="processes",
        help="loopback: one process stands for all ranks, and its all-to-alls pass host memory (cuda)",
    )
    parser.add_argument(
        "--hardware", metavar="NAME", help="profile of the GPU (default: the measured one, or its card's)"
    )
    sizes = parser.add_argument_group("sizes of a preset (defaults: its published ones)")
    for name in ("frames", "height", "width", "batch", "text"):
        sizes.add_argument(f"--{name}", type=int, metavar="N")
    parser.add_argument("--picture", metavar="FILE", help="draw the arms there, PNG or SVG")
    add_json(parser, "the record")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.load is not None and not 0 < arguments.load <= MOST_LOAD:
        raise ChunkflowError(f"--load must be above 0 and at most {MOST_LOAD}, not {arguments.load}.")
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
    link, load = None, None
    if arguments.device != "cuda":
        load = None if arguments.bandwidth else arguments.load or regime.load
        bandwidth = parse_rate(arguments.bandwidth, "--bandwidth") if arguments.bandwidth else TO_BE_DERIVED
        link = LinkEmulation(bandwidth=bandwidth, order=arguments.order, shared="port" if arguments.one_port else "")
    return Job(
        regime=regime,
        model=None if arguments.model in REGIMES else arguments.model,
        sizes=_sizes(arguments),
        link=link,
        load=load,
        ranks=arguments.ranks or (2 if link is not None or arguments.transport == "loopback" else 1),
        arms=arms,
        steps=arguments.steps,
        device=arguments.device,
        hardware=arguments.hardware,
        transport=arguments.transport,
    )


def _check_device(arguments: argparse.Namespace, arms: Sequence[Arm]) -> None:
    """What goes with a GPU alone, and what does not."""
    if arguments.device == "cuda":
        check_device(torch.device("cuda"))
        if arguments.bandwidth or arguments.load or arguments.one_port or arguments.order != "fair":
            raise ChunkflowError(
                "--load, --bandwidth, --one-port and --order describe an emulated link: --device cuda has its own."
            )
        if arguments.transport == "processes" and (arguments.ranks or 1) > 1:
            raise ChunkflowError(
                "--ranks on one GPU needs --transport loopback; ranks on several: torchrun your own script."
            )
        return
    peers = [a.name for a in arms if a.policy is None]
    if peers:
        raise ChunkflowError(f"--arms {','.join(peers)}: measured on a GPU only, with --device cuda.")
    if arguments.model in PRESETS or arguments.transport == "loopback" or arguments.hardware:
        raise ChunkflowError("Presets, --transport loopback and --hardware are for --device cuda.")


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
            f"There is no regime {arguments.model!r}: give one of {', '.join(REGIMES)}, or file.py:function for your own."
        )
    if own and arguments.device != "cuda" and not (arguments.bandwidth or arguments.load):
        raise ChunkflowError(
            "A model of your own needs a link: give --load 0.7 for one that is nearly full, or --bandwidth 200MB."
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
