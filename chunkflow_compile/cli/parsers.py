"""The commands: what ``--help`` says of each, and its arguments.  Imports no torch, so that ``--help`` answers at once."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chunkflow_compile.bench.pace import PACE
from chunkflow_compile.bench.regimes import DEMO, REGIMES
from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.published import PUBLISHED
from chunkflow_compile.passes.names import ONLY_PREDICTED, OPTIONAL_PASSES, POLICIES, SHARDED, STAGES

from .arguments import CARD, SIZES, add_hardware, add_json, add_kernels, add_lowering, add_model, add_pack, add_sizes

# Measured steps per arm.
_DEMO_STEPS = 3
_BENCH_STEPS = 6
# host-yield differs from layerwise only in how far the host runs ahead, which is not simulated.
SIMULATED = (*(p for p in POLICIES if p != "host-yield"), *ONLY_PREDICTED)


@dataclass(frozen=True)
class Command:
    """A command, which the module of its name runs.  ``summary``: its line in the list of all.  ``description``,
    ``epilog``: what its page says before and after ``arguments``, which the function adds."""

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
        "share of the resident step for which streaming all weights would keep the link busy; sets the bandwidth from the "
        "measured compute (default: the load of the regime)"
    )
    link.add_argument("--load", type=float, metavar="X", help=load)
    link.add_argument("--bandwidth", metavar="SIZE", help="bandwidth of the link, bytes per second such as 200MB")
    order = "how transfers share the link: in turns, or first come, first served (default fair)"
    add("--order", choices=("fair", "fifo"), default="fair", help=order)
    add("--one-port", action="store_true", help="all ranks share one port, like GPUs under one root complex")
    pace = (
        "hold each region to X times its measured compute, so that what else the processors do does not count; 0 for as "
        f"long as it takes (default {PACE}; on a GPU always as long as it takes)"
    )
    add("--pace", type=float, default=PACE, metavar="X", help=pace)
    device = (
        "threads: the CPU, where the host runs ahead of every stream as on a GPU (default); cpu: the CPU, where the host "
        "computes; cuda: a GPU"
    )
    add("--device", choices=("threads", "cpu", "cuda"), default="threads", help=device)
    transport = (
        "loopback: one process stands for all ranks, and all-to-alls go through host memory (with --device cuda)"
    )
    add("--transport", choices=("processes", "loopback"), default="processes", help=transport)
    profile = "profile of the GPU (default: the measured one, or the built-in one of the card)"
    add("--hardware", metavar="NAME", help=profile)
    add_lowering(parser)
    add_sizes(parser, SIZES, "sizes of a preset (default: the published ones)")
    add("--picture", metavar="FILE", help="draw the arms to FILE, PNG or SVG")
    add_json(parser, "the record")


def _plan(parser: ArgumentParser) -> None:
    add_model(parser, or_blocks=True)
    add_json(parser, "the plan, or the points of the curve,")
    parser.add_argument("--weights", action="store_true", help="a line for every weight, with the reason")
    curve = (
        "print memory against predicted step time, with --pack or --peers also of such weights; draw it to PNG as well"
    )
    parser.add_argument("--curve", nargs="?", const="", metavar="PNG", help=curve)


def _pipeline(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("pipeline", metavar="PIPELINE", help=", ".join(PUBLISHED))
    parser.set_defaults(nodes=1, ulysses=1, cfg_parallel=1)  # it is planned for one card
    add("--memory", metavar="SIZE", help="most bytes on the device, such as 12GiB (default: the least that fits)")
    add_hardware(parser, CARD)
    add_kernels(parser)
    add_pack(parser)
    add("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    add_sizes(parser, ("frames", "height", "width"), "sizes (default: as published)")
    add("--picture", metavar="PNG", help="draw the memory over the generation")
    trace = "write the phases, with two calls of each, as a trace for ui.perfetto.dev"
    add("--timeline", metavar="JSON", help=trace)
    add_json(parser, "the phases of each way")


def _simulate(parser: ArgumentParser) -> None:
    add_model(parser)
    which = (
        f"one policy (default: all, with layerwise-prefix only if --memory is set, {' and '.join(SHARDED)} only on several "
        "ranks)"
    )
    parser.add_argument("--policy", default="all", choices=("all", *SIMULATED), help=which)
    degrees = "in place of policies, plan for each of these degrees, and say which to take"
    parser.add_argument("--sweep-ulysses", metavar="1,2,4,8", help=degrees)
    add_json(parser, "the record")


def _why(parser: ArgumentParser) -> None:
    add_model(parser, or_blocks=True)
    name = "name of the weight, or a part of it that no other name has"
    parser.add_argument("param", metavar="PARAM", help=name)
    add_json(parser, "the story")


def _timeline(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, or_plan=True, or_blocks=True)
    add("--out", required=True, metavar="FILE", help="picture (.png, .svg) or trace events (.json)")
    add("--block", metavar="NAME", help="first block to enlarge (default: one in the middle)")
    add("--blocks", type=int, default=1, metavar="N", help="number of blocks to enlarge (default 1)")


def _dump(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add("--stage", metavar="NAME", help="stop after this stage")
    add("--annotate", action="store_true", help="end lines with cost, window, slot, bytes and slack")
    add("--full", action="store_true", help="fold nothing, shorten nothing")
    add("--out", metavar="DIR", help="write NN_stage.py, NN_stage.diff, plan.json and report.txt there")
    add("--disable-pass", action="append", default=[], metavar="NAME", help="leave out a pass; may be repeated")
    add("--verbose", action="store_true", help="print on stderr the time of each stage, and what was proved")
    add("--verify-each", action="store_true", help="check the contract of every stage")
    add_json(parser, "the op counts of each stage")


def _explain(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of the dump, or of one program in it")
    parser.add_argument("--details", action="store_true", help="predictions, the worst stalls and windows")
    parser.add_argument("--windows", action="store_true", help="the same, with every window")
    add_json(parser, "the explanation")


def _doctor(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"what its weights take: {', '.join(PRESETS)}")
    ranks = "processes of this machine that share them (default 1)"
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
        "ranks that copy at once, for what they share of the host's memory, and pull from each other's devices (default: all "
        "GPUs, on a CPU 1)"
    )
    add("--ranks", type=int, metavar="N", help=ranks)
    loopback = "measure the collectives of one process, through host memory: one GPU is enough"
    add("--loopback", action="store_true", help=loopback)
    drive = "also measure the drive of a file, or of the largest file in a folder"
    add("--drive", metavar="PATH", type=Path, help=drive)


_NEWLINE = "\n"
COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        _demo,
        "stream the weights of a small model on two ranks of this machine",
        """\
Two gloo ranks run denoising steps of a small Wan-style transformer from diffusers (random
weights, Ulysses degree 2) over an emulated link, in three arms: all weights resident;
layerwise, which fetches the whole next block while a block computes; and chunkflow.  First
the link is nearly full, which shows speed.  Then it has time to spare, which shows memory.
The exit code is 1 if the outputs are not equal bit for bit.""",
        "example: chunkflow demo --json demo.json",
    ),
    "bench": Command(
        _bench,
        "measure policies side by side, on an emulated link or on a GPU",
        f"""\
Measures policies with real ranks, real compiled regions and real copies.  Without a GPU, the link
is emulated: each rank has a receive port, whose bandwidth copies and collectives share.  The model is compiled
once.  Every arm is a plan of its own, and the arms take turns in random order.

MODEL:
{_NEWLINE.join(f"  {name:16} {regime.shows}" for name, regime in REGIMES.items())}
  {"file.py:function":16} your function, which returns a model and the keyword arguments of one call
  with --device cuda also {", ".join(PRESETS)}, with random weights""",
        """\
arms:
  resident, layerwise, layerwise-barrier, host-yield
  chunkflow             within the bytes of layerwise; in compute-rich, within a quarter of all bytes
  chunkflow@40%         within these bytes and those of 40 % of the blocks
  chunkflow+pack        with weights packed, within the same bytes; chunkflow+auto where that is predicted to be faster;
                        also as chunkflow@40%+pack
  layerwise-prefix@40%  within the same bytes: the first blocks that fit are resident, the others layerwise
  misjudged             chunkflow, planned as if compute took twice as long and the link were twice as fast
  replanned             misjudged with replan_after=2
  with --device cuda also inductor, inductor-again (the noise), inductor-graph (reduce-overhead), by-kind
  (chunkflow_compile.compile), graph (the same with cudagraphs=True), diffusers-repeated-blocks,
  diffusers-group-offload and diffusers-group-offload-compiled, on the same weights;
  and apply, of a pipeline of this model, last: its budget counts what the others hold

example: chunkflow bench contention --json contention.json --picture contention.png""",
    ),
    "plan": Command(
        _plan,
        "plan a model for a machine, without weights",
        """\
Traces a model without weights for any Ulysses degree and decides, for a machine and a goal, where
each weight lives and when its copies start.""",
        "example: chunkflow plan wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --memory 4GiB --json plan.json",
    ),
    "pipeline": Command(
        _pipeline,
        "plan a whole pipeline within the memory of a card, without weights",
        """\
Plans one generation of a pipeline, encoders, transformers and VAE, within a budget for weights and
activations, and shows it beside other ways to run it.  Activations are those of eager code, an upper bound.""",
        "example: chunkflow pipeline flux.1-dev --memory 12GiB --hardware rtx-4090-pcie --picture flux.png",
    ),
    "simulate": Command(
        _simulate,
        "simulate a model under each policy, without weights",
        "Simulates a step of a model on a machine under each policy, by discrete events with contention.",
        "example: chunkflow simulate wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --policy all",
    ),
    "why": Command(
        _why,
        "explain why a weight is where it is, and what would change it",
        """\
One weight's story: its home and why, its slot, when it is copied and read.
Plans again with one setting changed at a time, to show what would change it.""",
        """\
examples:
  chunkflow why wan2.2-ti2v-5b blocks.3.ffn.net.2.weight --ulysses 2
  chunkflow why wan2.2-ti2v-5b time_proj.weight --ulysses 2      # a part of the name, if only one has it""",
    ),
    "timeline": Command(
        _timeline,
        "draw a step: compute, collectives, copies, the arena",
        """\
Draws the predicted step of a model or of a plan file: lanes for compute, collectives and copies,
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
writes all stages and their differences instead.  Stages: {", ".join(STAGES)}.""",
        f"""\
passes that can be disabled:
{_NEWLINE.join(f"  {name:<10} {effect}" for name, effect in OPTIONAL_PASSES.items())}

examples:
  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --annotate
  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --stage regions --full > regions.py
  chunkflow dump examples/ulysses_dit.py:planned --ulysses 2 --hardware cpu --out stages --verify-each""",
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
    "doctor": Command(
        _doctor,
        "check this machine: what is missing, and how to get it",
        """\
Checks torch, CUDA, the GPUs and their links, NUMA, host memory and how much of it can be pinned,
gloo and NCCL, compilers and libraries.  With a model, also whether its weights fit into host memory.
Exit code 1 if something that a run needs is missing.""",
        "example: chunkflow doctor wan2.2-ti2v-5b --ranks 2",
    ),
    "calibrate": Command(
        _calibrate,
        "measure this machine into a hardware profile",
        """\
Measures GEMMs, attention, memory, copies to the device, on all GPUs at once too, collectives of two
ranks and compute alone and beside copies, and writes a profile for --hardware FILE or options={'hardware': FILE}.""",
        "example: chunkflow calibrate --out hw.json",
    ),
}
