"""Arguments that several commands share.  Imports no torch, as ``parsers`` does not."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal, get_args

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.sizes import Quantisation
from chunkflow_compile.hardware.profiles import profile_names
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES, Yield
from chunkflow_compile.units import enough

# The machines of plans if none is named: of one model, and of a whole pipeline on one card.
MACHINE, CARD = "h100-pcie-x2", "rtx-4090-pcie"
# What the values of --pack and --peers mean.
FORMS: dict[str, Literal[False, True, "auto"]] = {"no": False, "yes": True, "auto": "auto"}
KERNELS = ("cudnn", "fa3", "fa2", "efficient")
SIZES = {
    "frames": "frames of video",
    "height": "pixels",
    "width": "pixels",
    "batch": "samples",
    "text": "tokens of the prompt",
}


def add_model(parser: argparse.ArgumentParser, *, or_plan: bool = False, or_blocks: bool = False) -> None:
    """Add the options of the model and the machine.

    ``or_plan``: accept a plan file in place of a model.  ``or_blocks``: accept its blocks as a cycle, and weights on the
    drive.
    """
    add, models = parser.add_argument, f"{', '.join(PRESETS)}, or file.py:function for your own"
    parser.set_defaults(regional=False, host_memory=None, drive=None, disable_pass=())
    if or_plan:
        add("model", metavar="MODEL|PLAN", help=f"{models}; or a plan file")
    else:
        add("model", metavar="MODEL", help=models)
    add("--ulysses", type=int, default=1, metavar="P", help="Ulysses degree (default 1)")
    branches = "2: the branches of classifier-free guidance are on ranks of their own, P each (default 1)"
    add("--cfg-parallel", type=int, default=1, metavar="N", help=branches)
    add_hardware(parser, MACHINE)
    add_kernels(parser)
    nodes = "machines that the ranks are on, equally many on each (default 1)"
    add("--nodes", type=int, default=1, metavar="N", help=nodes)
    goal = parser.add_mutually_exclusive_group()
    within = "most weight bytes on the device, such as 4GiB: the fastest plan within them"
    goal.add_argument("--memory", metavar="SIZE", help=within)
    slower = "longest step, over that with all weights resident: the smallest plan within it (default 1.02)"
    goal.add_argument("--slowdown", type=float, metavar="X", help=slower)
    yields = "how copies keep out of the way of collectives (default auto: whichever is predicted to be faster)"
    add("--yield", dest="yields", choices=get_args(Yield), default="auto", help=yields)
    add_pack(parser)
    pieces = (
        "weights in equal pieces on the devices of the P ranks, which pull them from each other: all, or those with which a "
        "step within --memory is shorter, or else fewer bytes are enough for --slowdown (default no)"
    )
    add("--peers", nargs="?", choices=tuple(FORMS), const="yes", default="no", help=pieces)
    if or_blocks:
        regional = (
            "the blocks as compile_repeated_blocks runs them, as a cycle; the weights outside blocks are not counted"
        )
        add("--regional", action="store_true", help=regional)
        rest = "most bytes of the weights in host memory, such as 24GiB; the rest is on the drive"
        add("--host-memory", metavar="SIZE", help=rest)
        add("--drive", metavar="RATE", help="what the drive reads, such as 7GB/s (default: the profile's)")
    sizes = add_sizes(parser, SIZES, "sizes of a preset (defaults: those published)")
    layers = "plan the linear layers of the blocks quantised so"
    sizes.add_argument("--quantize", choices=get_args(Quantisation), help=layers)
    calls = "calls of the model per step, of both branches (default: the preset's, 2 with guidance)"
    add("--forwards", type=int, metavar="N", help=calls)
    for name, default in {"chunk-bytes": DEFAULT_CHUNK_BYTES, "min-bytes": DEFAULT_MIN_BYTES}.items():
        shown = f"as in options (default {enough(default)})"
        add(f"--{name}", default=str(default), metavar="SIZE", help=shown)
    add("--group-bytes", metavar="SIZE", help="as in options (default: as coarse as is good)")


def add_hardware(parser: argparse.ArgumentParser, default: str) -> None:
    profiles = f"{', '.join(profile_names())}, a JSON file, or measured (default {default})"
    parser.add_argument("--hardware", metavar="HW", help=profiles)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """What the machine runs a region with: the cost of a step goes by it."""
    kernel = "what attention runs on (default auto: what torch takes on the machine)"
    parser.add_argument("--attention", choices=("auto", *KERNELS), default="auto", help=kernel)
    add_lowering(parser)


def add_sizes(parser: argparse.ArgumentParser, names: Iterable[str], title: str) -> argparse._ArgumentGroup:
    """Add the sizes of a preset; ``sizes_given`` reads them."""
    group = parser.add_argument_group(title)
    for name in names:
        group.add_argument(f"--{name}", type=int, metavar="N", help=SIZES[name])
    return group


def sizes_given(arguments: argparse.Namespace) -> dict[str, int]:
    """The sizes that a user has set, by their names."""
    return {name: value for name, value in vars(arguments).items() if name in SIZES and value is not None}


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Add the option of packed weights; ``FORMS`` has what its values mean."""
    which = (
        "weights in bfloat16 packed without loss, in three quarters of their bytes: all that can be, or those with which a "
        "step within --memory is shorter (default no)"
    )
    parser.add_argument("--pack", nargs="?", choices=tuple(FORMS), const="yes", default="no", help=which)


def add_lowering(parser: argparse.ArgumentParser) -> None:
    which = (
        "inductor: regions are compiled (default); eager: they are not, which starts at once and needs no C++ compiler"
    )
    choices = ("inductor", "eager")  # tensorrt has never run, so it is in no comparison
    parser.add_argument("--lowering", choices=choices, default="inductor", help=which)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--json``, the same for every command; ``what`` it writes."""
    parser.add_argument("--json", metavar="FILE", help=f"write {what} to FILE as JSON; - for stdout, instead of tables")
