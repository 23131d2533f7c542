"""``chunkflow bench``: policies side by side on an emulated link, measured beside predicted."""

from __future__ import annotations

import argparse
from pathlib import Path

from chunkflow_compile.bench.arms import parse_arms
from chunkflow_compile.bench.ranks import Job, run_job
from chunkflow_compile.bench.regimes import PEERS, REGIMES, Regime
from chunkflow_compile.bench.summary import bench_table, describe, summarise, title
from chunkflow_compile.cli.output import add_json, check_json, say, write_json
from chunkflow_compile.models.small import Size
from chunkflow_compile.models.weightless import load_build
from chunkflow_compile.options import DEFAULT_MIN_BYTES
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.report.bench_picture import draw_arms
from chunkflow_compile.report.record import check_writable
from chunkflow_compile.units import parse_rate

STEPS = 6


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    regimes = "\n".join(f"  {name:16} {regime.shows}" for name, regime in REGIMES.items())
    parser = commands.add_parser(
        "bench",
        help="measure policies side by side on an emulated link",
        description="Measures policies on real ranks, real compiled regions and real copies, over a link that is emulated:\n"
        "a receive port a rank, of some bandwidth, which copies and collectives share.  The model is compiled\n"
        "once; each arm is a plan of its own, and steps of the arms are taken in turns, in random order.\n\n"
        f"MODEL:\n{regimes}\n  {'file.py:function':16} your own, which returns a model and the keyword arguments of one call",
        epilog="arms: resident, layerwise, layerwise-barrier, host-yield, chunkflow (in the bytes that layerwise takes);\n"
        "chunkflow@40% and layerwise-prefix@40%, in these and the bytes of 40 % of the blocks; misjudged, chunkflow\n"
        "planned from figures wrong by 2; replanned, the same with replan_after=2.\n\n"
        "example: chunkflow bench contention --json contention.json --picture contention.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a regime, or file.py:function")
    parser.add_argument("--arms", metavar="A,B", help="what is measured (default: those of the regime)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"that count, an arm (default {STEPS})")
    parser.add_argument("--ranks", type=int, default=2, metavar="P", help="Ulysses degree, a process each (default 2)")
    parser.add_argument("--bandwidth", metavar="SIZE", help="of the link, a second, as 200MB (default: the regime's)")
    parser.add_argument(
        "--order", choices=("fair", "fifo"), default="fair", help="how transfers share it (default fair)"
    )
    parser.add_argument("--one-port", action="store_true", help="all ranks share one port, as behind one root complex")
    parser.add_argument(
        "--device",
        choices=("threads", "cpu"),
        default="threads",
        help="threads: the host runs ahead of every stream, as on a GPU (default); cpu: it computes",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the arms there, PNG or SVG")
    add_json(parser, "the record")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1 or arguments.ranks < 1:
        raise ChunkflowError("--steps and --ranks must be at least 1.")
    check_json(arguments)
    if arguments.picture:
        check_writable(Path(arguments.picture))
    job = _job(arguments)
    ranks = run_job(job)
    found = summarise(title(job), ranks)
    say(arguments, f"{describe(job, found)}\n\n{bench_table(found)}")
    if arguments.picture:
        draw_arms(found.record, found.predicted, Path(arguments.picture))
    write_json(arguments, found.to_json())
    return 0 if all(arm.equal_to_resident is not False for arm in found.record.arms.values()) else 1


def _job(arguments: argparse.Namespace) -> Job:
    regime = _regime(arguments)
    bandwidth = regime.bandwidth
    if arguments.bandwidth:
        bandwidth = parse_rate(arguments.bandwidth, "--bandwidth")
    return Job(
        regime=regime,
        model=None if arguments.model in REGIMES else arguments.model,
        link=LinkEmulation(bandwidth=bandwidth, order=arguments.order, shared="port" if arguments.one_port else ""),
        ranks=arguments.ranks,
        arms=parse_arms(tuple(arguments.arms.split(",")) if arguments.arms else regime.arms),
        steps=arguments.steps,
        device=arguments.device,
    )


def _regime(arguments: argparse.Namespace) -> Regime:
    if arguments.model in REGIMES:
        return REGIMES[arguments.model]
    if ":" not in arguments.model and ".py" not in arguments.model:
        raise ChunkflowError(
            f"There is no regime {arguments.model!r}: give one of {', '.join(REGIMES)}, or file.py:function for your own."
        )
    if not arguments.bandwidth:
        raise ChunkflowError("--bandwidth is needed for a model of your own: bytes a second, as 200MB.")
    load_build(arguments.model)
    return Regime(
        family="", size=Size(), bandwidth=0.0, chunk_bytes=DEFAULT_MIN_BYTES, arms=PEERS, shows=arguments.model
    )
