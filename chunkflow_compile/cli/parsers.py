"""The arguments of every command.  Imports no torch, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from chunkflow_compile.bench.pace import PACE
from chunkflow_compile.bench.regimes import DEMO, REGIMES
from chunkflow_compile.hardware.profiles import profile_names
from chunkflow_compile.models.presets import PRESETS
from chunkflow_compile.models.published import PUBLISHED
from chunkflow_compile.passes.names import OPTIONAL_PASSES, POLICIES, STAGES

from .arguments import add_json, add_lowering, add_model

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# Measured steps per arm.
_DEMO_STEPS = 3
_BENCH_STEPS = 6
# host-yield differs from layerwise only in how far the host runs ahead, which is not simulated.
SIMULATED = tuple(p for p in POLICIES if p != "host-yield")


def _demo(commands: Commands) -> argparse.ArgumentParser:
    layers = " and ".join(f"{regime.size.layers} in {name}" for name, regime in DEMO.items())
    parser = commands.add_parser(
        "demo",
        help="stream the weights of a small model on two ranks of this machine",
        description="Two gloo ranks run denoising steps of a small Wan-style transformer from diffusers (random weights, "
        "Ulysses degree 2) over an emulated link, in three arms: all weights resident; layerwise, which fetches the "
        "whole next block while a block computes; and chunkflow. First the link is nearly full, which shows speed. Then "
        "it has time to spare, which shows memory. The exit code is 1 if the outputs are not equal bit for bit.",
        epilog="example: chunkflow demo --json demo.json",
    )
    parser.add_argument("--layers", type=int, metavar="N", help=f"blocks of the model (default {layers})")
    parser.add_argument("--frames", type=int, metavar="N", help="latent frames of the model (default 5)")
    parser.add_argument(
        "--steps", type=int, default=_DEMO_STEPS, help=f"measured steps per arm (default {_DEMO_STEPS})"
    )
    add_lowering(parser)
    add_json(parser, "the record")
    parser.add_argument("--dump", metavar="DIR", help="folder for the dumped programs (default: a new temporary one)")
    return parser


def _bench(commands: Commands) -> argparse.ArgumentParser:
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
        "  with --device cuda also inductor, inductor-again (the noise), diffusers-group-offload and\n"
        "  diffusers-group-offload-compiled, on the same weights\n\n"
        "example: chunkflow bench contention --json contention.json --picture contention.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a regime, or file.py:function")
    parser.add_argument("--arms", metavar="A,B", help="arms to measure (default: those of the regime)")
    parser.add_argument(
        "--steps", type=int, default=_BENCH_STEPS, metavar="N", help=f"measured steps per arm (default {_BENCH_STEPS})"
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
    return parser


def _plan(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "plan",
        help="plan a model for a machine, without weights",
        description="Traces a model without weights for any Ulysses degree and decides, for a machine and a goal, where each "
        "weight lives and when its copies start.",
        epilog="example: chunkflow plan wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --memory 4GiB --json plan.json",
    )
    add_model(parser, or_blocks=True)
    add_json(parser, "the plan, or the points of the curve,")
    parser.add_argument("--weights", action="store_true", help="a line for every weight, with the reason")
    parser.add_argument(
        "--curve",
        nargs="?",
        const="",
        metavar="PNG",
        help="print memory against predicted step time; draw it to PNG as well",
    )
    return parser


def _pipeline(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "pipeline",
        help="plan a whole pipeline within the memory of a card, without weights",
        description="Plans one generation of a pipeline, encoders, transformers and VAE, within a budget for weights and "
        "activations, and shows it beside other ways to run it.  Activations are those of eager code, an upper bound.",
        epilog="example: chunkflow pipeline flux.1-dev --memory 12GiB --hardware rtx-4090-pcie --picture flux.png",
    )
    parser.add_argument("pipeline", metavar="PIPELINE", help=", ".join(PUBLISHED))
    parser.add_argument(
        "--memory", metavar="SIZE", help="most bytes on the device, such as 12GiB (default: the least that fits)"
    )
    parser.add_argument(
        "--hardware",
        default="rtx-4090-pcie",
        metavar="HW",
        help=f"{', '.join(profile_names())}, a JSON file, or measured (default rtx-4090-pcie)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps (default: the model's)")
    for name, text in (("frames", "frames of video"), ("height", "pixels"), ("width", "pixels")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default: as published)")
    parser.add_argument("--picture", metavar="PNG", help="draw the memory over the generation")
    parser.add_argument(
        "--timeline", metavar="JSON", help="write the phases, with two calls of each, as a trace for ui.perfetto.dev"
    )
    add_json(parser, "the phases of each way")
    return parser


def _simulate(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "simulate",
        help="simulate a model under each policy, without weights",
        description="Simulates a step of a model on a machine under each policy, by discrete events with contention.",
        epilog="example: chunkflow simulate wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --policy all",
    )
    add_model(parser)
    parser.add_argument(
        "--policy",
        default="all",
        choices=("all", *SIMULATED),
        help="one policy (default: all, with layerwise-prefix only if --memory is set)",
    )
    add_json(parser, "the record")
    return parser


def _why(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "why",
        help="explain why a weight is where it is, and what would change it",
        description="One weight's story: home, chunks, slot, when it is copied and read, slack, and what limits it.\n"
        "Plans again with one setting changed at a time, to show what would change it.",
        epilog="examples:\n"
        "  chunkflow why wan2.2-ti2v-5b blocks.3.ffn.net.2.weight --ulysses 2\n"
        "  chunkflow why wan2.2-ti2v-5b time_proj.weight --ulysses 2      # a part of the name, if only one has it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, or_blocks=True)
    parser.add_argument("param", metavar="PARAM", help="name of the weight, or a part of it that no other name has")
    add_json(parser, "the story")
    return parser


def _diff(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "diff",
        help="compare two plans",
        description="Weights that changed home or window, and step time and memory before and after.  Exit code 1 if\n"
        "the plans differ, as in diff.",
        epilog="example:\n"
        "  chunkflow plan wan2.2-ti2v-5b --ulysses 2 --json a.json\n"
        "  chunkflow plan wan2.2-ti2v-5b --ulysses 2 --memory 4GiB --json b.json\n"
        "  chunkflow diff a.json b.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A.json", help="a plan")
    parser.add_argument("after", metavar="B.json", help="another plan")
    add_json(parser, "the difference")
    return parser


def _timeline(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "timeline",
        help="draw a step: compute, collectives, copies, the arena",
        description="Draws the predicted step of a model or of a plan file: lanes for compute, collectives and copies,\n"
        "the arena byte by byte, stalls in red.  With a plan file, leave out the options of the model.",
        epilog="examples:\n"
        "  chunkflow timeline wan2.2-ti2v-5b --ulysses 2 --out step.png\n"
        "  chunkflow timeline plan.json --block blocks.3 --blocks 2 --out step.svg\n"
        "  chunkflow timeline plan.json --out step.json     # open it in ui.perfetto.dev",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, or_plan=True, or_blocks=True)
    parser.add_argument("--out", required=True, metavar="FILE", help="picture (.png, .svg) or trace events (.json)")
    parser.add_argument("--block", metavar="NAME", help="first block to enlarge (default: one in the middle)")
    parser.add_argument("--blocks", type=int, default=1, metavar="N", help="number of blocks to enlarge (default 1)")
    return parser


def _dump(commands: Commands) -> argparse.ArgumentParser:
    passes = "\n".join(f"  {name:<10} {effect}" for name, effect in OPTIONAL_PASSES.items())
    parser = commands.add_parser(
        "dump",
        help="show the program at every stage of compilation",
        description="Prints the program after the last stage, or after --stage, with equal blocks folded.  With --out,\n"
        f"writes all stages and their differences instead.  Stages: {', '.join(STAGES)}.",
        epilog=f"passes that can be disabled:\n{passes}\n\n"
        "examples:\n"
        "  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --annotate\n"
        "  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --stage regions --full > regions.py\n"
        "  chunkflow dump examples/ulysses_dit.py:planned --ulysses 2 --hardware cpu --out stages --verify-each",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument("--stage", metavar="NAME", help="stop after this stage")
    parser.add_argument("--annotate", action="store_true", help="end lines with cost, window, slot, bytes and slack")
    parser.add_argument("--full", action="store_true", help="fold nothing, shorten nothing")
    parser.add_argument("--out", metavar="DIR", help="write NN_stage.py, NN_stage.diff, plan.json and report.txt there")
    parser.add_argument("--disable-pass", action="append", metavar="NAME", help="leave out a pass; may be repeated")
    parser.add_argument(
        "--verbose", action="store_true", help="print on stderr the time of each stage, and what was proved"
    )
    parser.add_argument("--verify-each", action="store_true", help="check the contract of every stage")
    add_json(parser, "the op counts of each stage")
    return parser


def _explain(commands: Commands) -> argparse.ArgumentParser:
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
    return parser


def _doctor(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: what is missing, and how to get it",
        description="Checks torch, CUDA, the GPUs and their links, NUMA, host memory and how much of it can be pinned,\n"
        "gloo and NCCL, compilers and libraries.  With a model, also whether its weights fit into host memory.\n"
        "Exit code 1 if something that a run needs is missing.",
        epilog="example: chunkflow doctor wan2.2-ti2v-5b --ranks 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"what its weights take: {', '.join(PRESETS)}")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes of this machine that share them (default 1)"
    )
    add_json(parser, "the findings")
    return parser


def _calibrate(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine into a hardware profile",
        description="Measures GEMMs, attention, memory, copies to the device, collectives of two ranks and "
        "compute alone and beside copies, and writes a profile for --hardware FILE or options={'hardware': FILE}.",
        epilog="example: chunkflow calibrate --out hw.json",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the profile to FILE (default: where hardware='measured' finds it)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where there is a GPU)"
    )
    parser.add_argument("--name", help="name of the profile (default: the name of the file)")
    parser.add_argument(
        "--emulate",
        metavar="SIZE",
        help="on the CPU: emulate a link of SIZE bytes per second, such as 200MB, for programs that use the profile",
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="measure the collectives of one process, through host memory: one GPU is enough",
    )
    parser.add_argument(
        "--drive",
        metavar="PATH",
        type=Path,
        help="also measure the drive of a file, or of the largest file in a folder",
    )
    return parser


# Each is run by the module of its name.
COMMANDS: Mapping[str, Callable[[Commands], argparse.ArgumentParser]] = {
    "demo": _demo,
    "bench": _bench,
    "plan": _plan,
    "pipeline": _pipeline,
    "simulate": _simulate,
    "why": _why,
    "diff": _diff,
    "timeline": _timeline,
    "dump": _dump,
    "explain": _explain,
    "doctor": _doctor,
    "calibrate": _calibrate,
}
