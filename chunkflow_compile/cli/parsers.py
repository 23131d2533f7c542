"""The commands, their help pages and their arguments.  This module does not import torch, so that ``--help`` is fast."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chunkflow_compile.bench.pace import PACE
from chunkflow_compile.bench.regimes import DEMO, REGIMES
from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.published import PUBLISHED
from chunkflow_compile.passes.names import HOST_YIELD, ONLY_PREDICTED, OPTIONAL_PASSES, POLICIES, SHARDED, STAGES
from chunkflow_compile.report.record import PROSE_WIDTH

from .arguments import (
    SIZES,
    add_hardware,
    add_hoist,
    add_json,
    add_kernels,
    add_lowering,
    add_model,
    add_pack,
    add_sizes,
    add_split,
)

# The number of measured steps per arm.
_DEMO_STEPS = 3
_BENCH_STEPS = 6
SIMULATED = (*POLICIES, *ONLY_PREDICTED)


@dataclass(frozen=True)
class Command:
    """A command.  The module with the name of the command runs it.  ``arguments``: a function that adds its arguments to
    a parser.  ``summary``: its line in the list of commands.  ``description``, ``epilog``: the texts of its help page
    before and after the arguments."""

    arguments: Callable[[ArgumentParser], None]
    summary: str
    description: str
    epilog: str


def _demo(parser: ArgumentParser) -> None:
    add = parser.add_argument
    layers = " and ".join(f"{regime.size.layers} in {name}" for name, regime in DEMO.items())
    add("--layers", type=int, metavar="N", help=f"blocks of the model (default {layers})")
    add("--frames", type=int, metavar="N", help="latent frames of the model (default 5)")
    add("--steps", type=int, default=_DEMO_STEPS, help=f"measured steps per arm (default {_DEMO_STEPS})")
    add_lowering(parser)
    add_json(parser, "the record")
    add("--dump", metavar="DIR", help="folder for the programs and a picture, which are not kept otherwise")


def _bench(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a regime, or file.py:function")
    add("--arms", metavar="A,B", help="arms to measure (default: those of the regime)")
    steps = f"measured steps per arm (default {_BENCH_STEPS})"
    add("--steps", type=int, default=_BENCH_STEPS, metavar="N", help=steps)
    add("--ranks", type=int, metavar="P", help="Ulysses degree (default 2; 1 on a GPU without loopback)")
    link = parser.add_mutually_exclusive_group()
    load = (
        "share of the resident step for which streaming all weights would keep the link busy; the bandwidth follows from the "
        "measured compute (default: the load of the regime)"
    )
    link.add_argument("--load", type=float, metavar="X", help=load)
    link.add_argument("--bandwidth", metavar="SIZE", help="bandwidth of the link, bytes per second such as 200MB")
    order = "how transfers share the link: in turns, or first come, first served (default fair)"
    add("--order", choices=("fair", "fifo"), default="fair", help=order)
    add("--one-port", action="store_true", help="all ranks share one port, like GPUs under one root complex")
    pace = (
        "stretch each region to X times its measured compute, so that other work on the processors does not count; 0 turns "
        f"this off (default {PACE}; always off on a GPU)"
    )
    add("--pace", type=float, default=PACE, metavar="X", help=pace)
    device = (
        "threads: the CPU, where the host runs ahead of every stream as on a GPU (default); cpu: the CPU, where the host "
        "computes; cuda: a GPU"
    )
    add("--device", choices=("threads", "cpu", "cuda"), default="threads", help=device)
    transport = "loopback: one process simulates all ranks, and all-to-alls go through host memory (with --device cuda)"
    add("--transport", choices=("processes", "loopback"), default="processes", help=transport)
    profile = "profile of the GPU (default: the measured one, or the built-in one of this GPU)"
    add("--hardware", metavar="NAME", help=profile)
    add_lowering(parser)
    add_sizes(parser, SIZES, "sizes of a preset (default: the published ones)")
    add("--picture", metavar="FILE", help="draw the arms to FILE, PNG or SVG")
    add_json(parser, "the record")


def _plan(parser: ArgumentParser) -> None:
    add_model(parser, or_blocks=True)
    add_hoist(parser)
    add_json(parser, "the plan, or the points of the curve,")
    weights = "also list every block, and every weight with the reason for its place"
    parser.add_argument("--weights", action="store_true", help=weights)
    curve = "print the predicted time per forward for each budget, also with --pack, --peers or --hoist; draw it to PNG"
    parser.add_argument("--curve", nargs="?", const="", metavar="PNG", help=curve)


def _pipeline(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("pipeline", metavar="PIPELINE", help=", ".join(PUBLISHED))
    parser.set_defaults(nodes=1, ulysses=1, cfg_parallel=1)  # this command plans for a single GPU
    budget = "GPU memory for weights and activations, such as 12GiB (default: the minimum)"
    add("--memory", metavar="SIZE", help=budget)
    add_hardware(parser)
    add_kernels(parser)
    add_pack(parser)
    add_hoist(parser)
    add_split(parser)
    add("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    add_sizes(parser, ("frames", "height", "width"), "sizes (default: the published sizes)")
    add("--picture", metavar="PNG", help="draw the GPU memory over the generation")
    trace = "write the phases, with two calls of each, as a trace for ui.perfetto.dev"
    add("--timeline", metavar="JSON", help=trace)
    add_json(parser, "the phases of each method")


def _simulate(parser: ArgumentParser) -> None:
    add_model(parser)
    add_hoist(parser)
    which = (
        f"one of {', '.join(SIMULATED)} (default: all except {HOST_YIELD}, with layerwise-prefix only if there is "
        f"a budget, and {' and '.join(SHARDED)} only on several ranks)"
    )
    parser.add_argument("--policy", default="all", choices=("all", *SIMULATED), metavar="POLICY", help=which)
    degrees = "instead of policies, compare these Ulysses degrees and recommend one"
    parser.add_argument("--sweep-ulysses", metavar="1,2,4,8", help=degrees)
    add_json(parser, "the record")


def _why(parser: ArgumentParser) -> None:
    add_model(parser, or_blocks=True)
    add_hoist(parser)
    name = "name of the weight, or a part of the name that is unique"
    parser.add_argument("param", metavar="PARAM", help=name)
    add_json(parser, "the story")


def _timeline(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, or_plan=True, or_blocks=True)
    add_hoist(parser)
    add("--out", required=True, metavar="FILE", help="picture (.png, .svg) or trace events (.json)")
    add("--block", metavar="NAME", help="first block to enlarge (default: one in the middle)")
    add("--blocks", type=int, default=1, metavar="N", help="number of blocks to enlarge (default 1)")


def _dump(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add_hoist(parser)
    add("--preamble", action="store_true", help="with --hoist: show what computes the hoisted products, not the step")
    add("--stage", metavar="NAME", help="stop after this stage")
    add("--annotate", action="store_true", help="end lines with cost, window, slot, bytes and slack")
    add("--full", action="store_true", help="do not fold equal blocks or shorten lines")
    add("--out", metavar="DIR", help="write NN_stage.py, NN_stage.diff, plan.json and report.txt there")
    add("--disable-pass", action="append", default=[], metavar="NAME", help="leave out a pass; may be repeated")
    add("--verbose", action="store_true", help="print the time of each stage and what was proved, on stderr")
    add("--verify-each", action="store_true", help="check the contract of every stage")
    add_json(parser, "the op counts of each stage")


def _hardware(parser: ArgumentParser) -> None:
    add_json(parser, "the profiles")


def _explain(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of the dump, or of one program in it")
    parser.add_argument("--details", action="store_true", help="predictions, the worst stalls and windows")
    parser.add_argument("--windows", action="store_true", help="the same, with every window")
    add_json(parser, "the explanation")


def _doctor(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help=f"check host memory for its weights: {', '.join(PRESETS)}"
    )
    ranks = "processes of this machine that share the weights (default 1)"
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=ranks)
    add_json(parser, "the findings")


def _calibrate(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="FILE", help="write the profile to FILE (default: where hardware='measured' finds it)")
    add("--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where there is a GPU)")
    add("--name", help="name of the profile (default: the name of the file)")
    emulate = "on the CPU: emulate a link of SIZE bytes per second, such as 200MB, for programs that use the profile"
    add("--emulate", metavar="SIZE", help=emulate)
    one_port = "with --emulate: all ranks share the link, through FILE"
    add("--one-port", metavar="FILE", help=one_port)
    ranks = (
        "ranks that copy from host memory and from each other's GPUs at once, to measure the bandwidth that they share "
        "(default: all GPUs, on a CPU 1)"
    )
    add("--ranks", type=int, metavar="N", help=ranks)
    loopback = "measure the collectives of one process, through host memory: one GPU is enough"
    add("--loopback", action="store_true", help=loopback)
    drive = "also measure the SSD, by reading this file, or the largest file in this folder"
    add("--drive", metavar="PATH", type=Path, help=drive)


_NEWLINE = "\n"


def _filled(text: str, indent: int = 2) -> str:
    """Return a text wrapped for a help page."""
    return textwrap.fill(text, PROSE_WIDTH, initial_indent="  ", subsequent_indent=" " * indent, break_on_hyphens=False)


def _listed(rows: Mapping[str, str], width: int) -> str:
    """Return a list of names and descriptions as text.  ``width``: the width of the column of names in characters."""
    return _NEWLINE.join(_filled(f"{name:{width}} {said}", width + 3) for name, said in rows.items())


COMMANDS: Mapping[str, Command] = {
    "pipeline": Command(
        _pipeline,
        "predict a whole pipeline: time, GPU memory and host memory",
        """\
Plans one generation of a pipeline (encoders, transformers and VAE) within a budget for weights and
activations, and compares it with other ways to run the pipeline.  Activations of transformers are
predicted for compiled code.  Those of encoders and VAEs are taken from eager mode, an upper bound.""",
        "example: chunkflow pipeline flux.1-dev --memory 12GiB --hardware rtx-4080-pcie --picture flux.png",
    ),
    "plan": Command(
        _plan,
        "predict one model: time per forward within a memory budget",
        """\
Traces a model without weights, for any Ulysses degree, and decides where each weight is kept and
when its copies start, for a machine and a goal.""",
        """\
examples:
  chunkflow plan flux.1-dev --memory 10GiB --hardware rtx-4080-pcie
  chunkflow plan wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --memory 4GiB --json plan.json""",
    ),
    "simulate": Command(
        _simulate,
        "compare ChunkFlow with other methods of offloading, predicted",
        """\
Simulates one forward of a model under each policy, by discrete events with contention, without
weights.""",
        "example: chunkflow simulate wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --policy all",
    ),
    "hardware": Command(
        _hardware,
        "list the machines to plan for: GPU memory, PCIe, measured or assumed",
        """\
Lists the hardware profiles that --hardware takes, with GPU memory and PCIe bandwidth, and which of
their figures were measured.""",
        "example: chunkflow hardware",
    ),
    "doctor": Command(
        _doctor,
        "check this machine: what is missing, and how to get it",
        """\
Checks torch, CUDA, the GPUs and their links, NUMA, host memory and how much of it can be pinned,
gloo and NCCL, compilers and libraries.  With a model, also whether its weights fit in host memory.
Exits with 1 if something that a run needs is missing.""",
        "example: chunkflow doctor wan2.2-ti2v-5b --ranks 2",
    ),
    "calibrate": Command(
        _calibrate,
        "measure this machine into a hardware profile",
        """\
Measures GEMMs, attention, memory, copies to one GPU and to all GPUs at once, collectives of two
ranks, and compute alone and while copies run.  Writes a profile for --hardware FILE or
options={'hardware': FILE}.""",
        "example: chunkflow calibrate --out hw.json",
    ),
    "demo": Command(
        _demo,
        "stream the weights of a small model on two ranks of this machine",
        """\
Two gloo ranks run denoising steps of a small Wan-style transformer from diffusers (random
weights, Ulysses degree 2) over an emulated link, in three arms: all weights resident;
layerwise, which fetches the whole next block while a block computes; and chunkflow.  First
the link is nearly full, which shows speed.  Then it has time to spare, which shows memory.
On a machine that is busy with other work it prints no ratios.  Exits with 1 if the outputs are
not equal bit for bit.""",
        "example: chunkflow demo --json demo.json",
    ),
    "bench": Command(
        _bench,
        "measure policies side by side, on an emulated link or on a GPU",
        f"""\
Measures policies with real ranks, real compiled regions and real copies.  Without a GPU, the link
is emulated: each rank has a receive port, whose bandwidth copies and collectives share.  The model
is compiled once.  Every arm is a plan of its own, and the arms take turns in random order.

MODEL:
{_listed({name: regime.shows for name, regime in REGIMES.items()}, 16)}
  {"file.py:function":16} your function, which returns a model and the keyword arguments of one call
{_filled(f"with --device cuda also {', '.join(PRESETS)}, with random weights")}""",
        """\
arms:
  resident, layerwise, layerwise-barrier
  chunkflow             within the bytes of layerwise; in compute-rich, a quarter of all bytes
  chunkflow@40%         within these bytes and those of 40 % of the blocks
  chunkflow+pack        with weights packed, within the same bytes; also as chunkflow@40%+pack
  chunkflow+auto        the same where that is predicted to be faster
  chunkflow+hoist       with weights hoisted that no latent reaches, within the same bytes; measured
                        steps find their modulations in the table
  resident+groups2      with exchanges in two groups of heads; also as chunkflow+groups2
  layerwise-prefix@40%  within the same bytes: the first blocks that fit are resident, the others
                        layerwise
  misjudged             chunkflow, planned as if compute took twice as long and the link were twice
                        as fast
  replanned             misjudged with replan_after=2
  with --device cuda also inductor, inductor-again (the noise), inductor-graph (reduce-overhead),
  by-kind (chunkflow_compile.compile), graph (with cudagraphs=True), diffusers-repeated-blocks,
  diffusers-group-offload and diffusers-group-offload-compiled, on the same weights;
  and apply, of a pipeline of this model, last: its budget counts what the others hold

example: chunkflow bench contention --json contention.json --picture contention.png""",
    ),
    "explain": Command(
        _explain,
        "after a run: what limits a step, and what to change",
        """\
Explains a run of a model that was compiled with options={'dump': DIR}: the time of a step, stalls,
device memory, host memory, and what to change to make it faster.  With --details also what was
predicted, the worst stalls with their reasons, and the windows that differ most.  In Python:
print(chunkflow_compile.explain(compiled, details=True)).""",
        """\
examples:
  chunkflow demo --dump run
  chunkflow explain run/contention    # the newest program of the first rank
  chunkflow explain run/contention --details
  chunkflow explain run/contention/rank1_3 --windows""",
    ),
    "why": Command(
        _why,
        "explain why a weight is where it is, and what would change it",
        """\
Shows where a weight is kept and why, its slot, and when it is copied and read.  Plans again with
one setting changed at a time, to show what would change that.""",
        """\
examples:
  chunkflow why wan2.2-ti2v-5b blocks.3.ffn.net.2.weight --ulysses 2
  chunkflow why wan2.2-ti2v-5b time_proj.weight --ulysses 2      # a unique part of the name""",
    ),
    "timeline": Command(
        _timeline,
        "draw a forward: compute, collectives, copies, the arena",
        """\
Draws the predicted forward of a model or of a plan file: lanes for compute, collectives and copies,
the arena byte by byte, stalls in red.  With a plan file, leave out the options of the model.""",
        """\
examples:
  chunkflow timeline wan2.2-ti2v-5b --ulysses 2 --out step.png
  chunkflow timeline plan.json --block blocks.3 --blocks 2 --out step.svg
  chunkflow timeline plan.json --out step.json     # open it in ui.perfetto.dev""",
    ),
    "dump": Command(
        _dump,
        "show the program at every stage of compilation",
        f"""\
Prints the program after the last stage, or after --stage, with equal blocks folded.  With --out,
writes all stages and their differences instead.
Stages: {", ".join(STAGES)}.""",
        f"""\
passes that can be disabled:
{_listed(OPTIONAL_PASSES, 10)}

examples:
  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --annotate
  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --stage regions --full > regions.py
  chunkflow dump examples/ulysses_dit.py:planned --ulysses 2 --hardware cpu --out stages""",
    ),
}
# The commands by audience, in the order in which the help lists them.
AUDIENCES: Mapping[str, tuple[str, ...]] = {
    "before you run a model (predictions, without weights or a GPU)": ("pipeline", "plan", "simulate", "hardware"),
    "this machine": ("doctor", "calibrate", "demo", "bench"),
    "debugging a model": ("explain", "why", "timeline", "dump"),
}
