"""Arguments that several commands share.  Imports no torch, as ``parsers`` does not."""

from __future__ import annotations

import argparse
from typing import get_args

from chunkflow_compile.hardware.profiles import profile_names
from chunkflow_compile.models.presets import PRESETS
from chunkflow_compile.models.sizes import Quantisation
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, DEFAULT_GROUP_BYTES, DEFAULT_MIN_BYTES, Yield


def add_model(parser: argparse.ArgumentParser, *, or_plan: bool = False, or_blocks: bool = False) -> None:
    """Add the options of the model and the machine.

    ``or_plan``: accept a plan file in place of a model.  ``or_blocks``: accept its blocks as a cycle, and weights on the
    drive.
    """
    known = f"{', '.join(PRESETS)}, or file.py:function for your own"
    if or_plan:
        parser.add_argument("model", metavar="MODEL|PLAN", help=f"{known}; or a plan file")
    else:
        parser.add_argument("model", metavar="MODEL", help=known)
    parser.add_argument("--ulysses", type=int, default=1, metavar="P", help="Ulysses degree (default 1)")
    parser.add_argument(
        "--cfg-parallel",
        type=int,
        default=1,
        metavar="N",
        help="2: the branches of classifier-free guidance are on ranks of their own, P each (default 1)",
    )
    parser.add_argument(
        "--hardware",
        default="h100-pcie-x2",
        metavar="HW",
        help=f"{', '.join(profile_names())}, a JSON file, or measured (default h100-pcie-x2)",
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--memory", metavar="SIZE", help="most weight bytes on the device, such as 4GiB: the fastest plan within them"
    )
    goal.add_argument(
        "--slowdown",
        type=float,
        metavar="X",
        help="longest step, over that with all weights resident: the smallest plan within it (default 1.02)",
    )
    parser.add_argument(
        "--yield",
        dest="yields",
        choices=get_args(Yield),
        default="auto",
        help="how copies keep out of the way of collectives (default auto: whichever is predicted to be faster)",
    )
    if or_blocks:
        parser.add_argument(
            "--regional",
            action="store_true",
            help="the blocks as compile_repeated_blocks runs them, as a cycle; the weights outside blocks are not counted",
        )
        parser.add_argument(
            "--host-memory",
            metavar="SIZE",
            help="most bytes of the weights in host memory, such as 24GiB; the rest is on the drive",
        )
        parser.add_argument(
            "--drive", metavar="RATE", help="what the drive reads, such as 7GB/s (default: the profile's)"
        )
    sizes = parser.add_argument_group("sizes of a preset (defaults: those published)")
    for name, text in (
        ("frames", "frames of video"),
        ("height", "pixels"),
        ("width", "pixels"),
        ("batch", "samples"),
        ("text", "tokens of the prompt"),
    ):
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=text)
    sizes.add_argument(
        "--quantize", choices=get_args(Quantisation), help="plan the linear layers of the blocks quantised so"
    )
    parser.add_argument(
        "--forwards",
        type=int,
        metavar="N",
        help="calls of the model per step, of both branches (default: the preset's, 2 with guidance)",
    )
    for name, default in (
        ("chunk-bytes", DEFAULT_CHUNK_BYTES),
        ("min-bytes", DEFAULT_MIN_BYTES),
        ("group-bytes", DEFAULT_GROUP_BYTES),
    ):
        parser.add_argument(
            f"--{name}", default=str(default), metavar="SIZE", help=f"as in options (default {default >> 20} MiB)"
        )


def add_lowering(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lowering",
        choices=("inductor", "eager"),  # tensorrt has never run, so it is in no comparison
        default="inductor",
        help="inductor: regions are compiled (default); eager: they are not, which starts at once and needs no C++ compiler",
    )


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--json``, the same for every command; ``what`` it writes."""
    parser.add_argument("--json", metavar="FILE", help=f"write {what} to FILE as JSON; - for stdout, instead of tables")
