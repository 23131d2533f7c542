"""Arguments that several commands share.  Like ``parsers``, this module does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal, get_args

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.sizes import Quantisation
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES, ExchangeGroups, Yield
from chunkflow_compile.units import enough

# The machine that commands plan for if no machine is named and there is no GPU.
DEFAULT_MACHINE = "rtx-4090-pcie"
# Translates the values of --pack, --peers and --hoist to the values of the options with these names.
FORMS: dict[str, Literal[False, True, "auto"]] = {"no": False, "yes": True, "auto": "auto"}
KERNELS = ("cudnn", "fa3", "fa2", "efficient")
_TUNING = {
    "chunk-bytes": "size of the pieces in which weights are copied",
    "min-bytes": "smaller weights stay on the GPU",
}
SIZES = {
    "frames": "frames of video",
    "height": "pixels",
    "width": "pixels",
    "batch": "samples",
    "text": "tokens of the prompt",
}


def add_model(parser: argparse.ArgumentParser, *, or_plan: bool = False, or_blocks: bool = False) -> None:
    """Add the arguments for the model and the machine.

    ``or_plan``: whether to accept a plan file instead of a model.  ``or_blocks``: whether to add the options for planning
    blocks as a cycle and for weights on the SSD.
    """
    add, models = parser.add_argument, f"{', '.join(PRESETS)}, or file.py:function for your own"
    parser.set_defaults(regional=False, host_memory=None, drive=None, disable_pass=(), hoist="no")
    if or_plan:
        add("model", metavar="MODEL|PLAN", help=f"{models}; or a plan file")
    else:
        add("model", metavar="MODEL", help=models)
    add("--ulysses", type=int, default=1, metavar="P", help="Ulysses degree (default 1)")
    branches = "2: each branch of classifier-free guidance runs on P ranks of its own (default 1)"
    add("--cfg-parallel", type=int, default=1, metavar="N", help=branches)
    add_hardware(parser)
    add_kernels(parser)
    nodes = "machines that the ranks run on, with equally many ranks on each (default 1)"
    add("--nodes", type=int, default=1, metavar="N", help=nodes)
    goal = parser.add_mutually_exclusive_group()
    within = "GPU memory for weights and activations, such as 8GiB: makes the fastest plan within it"
    goal.add_argument("--memory", metavar="SIZE", help=within)
    alone = "GPU memory for weights alone: makes the fastest plan within it"
    goal.add_argument("--weight-memory", metavar="SIZE", help=alone)
    slower = (
        "makes the smallest plan whose step takes at most X times as long as with all weights resident (default 1.02)"
    )
    goal.add_argument("--slowdown", type=float, metavar="X", help=slower)
    yields = "how copies avoid slowing down collectives (default auto: whichever is predicted to be faster)"
    add("--yield", dest="yields", choices=get_args(Yield), default="auto", help=yields)
    add_pack(parser)
    add_split(parser)
    add_exchange_groups(parser)
    pieces = (
        "shard weights across the GPUs of the P ranks, which copy them from each other; yes: all weights; auto: those that "
        "make a step within the budget faster, or a plan for --slowdown smaller (default no)"
    )
    add("--peers", nargs="?", choices=tuple(FORMS), const="yes", default="no", help=pieces)
    if or_blocks:
        regional = (
            "plan the blocks one by one in a cycle, as compile_repeated_blocks runs them; weights outside do not count"
        )
        add("--regional", action="store_true", help=regional)
        rest = "host memory for weights, such as 24GiB; the other weights are read from the SSD"
        add("--host-memory", metavar="SIZE", help=rest)
        add("--drive", metavar="RATE", help="read bandwidth of the SSD, such as 7GB/s (default: the profile's)")
    sizes = add_sizes(parser, SIZES, "sizes of a preset (defaults: the published sizes)")
    layers = "quantise the linear layers of the blocks to this format"
    sizes.add_argument("--quantize", choices=get_args(Quantisation), help=layers)
    calls = "forwards per denoising step, both branches together (default: the preset's)"
    add("--forwards", type=int, metavar="N", help=calls)
    for name, default in {"chunk-bytes": DEFAULT_CHUNK_BYTES, "min-bytes": DEFAULT_MIN_BYTES}.items():
        add(f"--{name}", default=str(default), metavar="SIZE", help=f"{_TUNING[name]} (default {enough(default)})")
    groups = "size of the groups of weights at which compute is cut (default: chosen by the planner)"
    add("--group-bytes", metavar="SIZE", help=groups)


def add_hardware(parser: argparse.ArgumentParser) -> None:
    profiles = (
        "the machine to plan for: a profile that chunkflow hardware lists, a JSON file, or measured (default: this "
        f"machine's GPU, or {DEFAULT_MACHINE} where there is none)"
    )
    parser.set_defaults(hardware_note="")  # a note on the chosen machine, see machine.py
    parser.add_argument("--hardware", metavar="HW", help=profiles)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the options for the kernels of a region, which determine its cost."""
    kernel = "attention kernel (default auto: the one that torch chooses on this machine)"
    parser.add_argument("--attention", choices=("auto", *KERNELS), default="auto", help=kernel)
    add_lowering(parser)


def add_sizes(parser: argparse.ArgumentParser, names: Iterable[str], title: str) -> argparse._ArgumentGroup:
    """Add options for the sizes of a preset; ``sizes_given`` reads them."""
    group = parser.add_argument_group(title)
    for name in names:
        group.add_argument(f"--{name}", type=int, metavar="N", help=SIZES[name])
    return group


def sizes_given(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that the user has set, by name."""
    return {name: value for name, value in vars(arguments).items() if name in SIZES and value is not None}


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Add the option for packed weights; ``FORMS`` translates its values."""
    which = (
        "compress bfloat16 weights without loss, to three quarters of their size; yes: all that can be; auto: those that "
        "make a step within the budget faster (default no)"
    )
    parser.add_argument("--pack", nargs="?", choices=tuple(FORMS), const="yes", default="no", help=which)


def add_hoist(parser: argparse.ArgumentParser) -> None:
    """Add the option for hoisted products; ``FORMS`` translates its values."""
    which = (
        "compute what no latent reaches, such as modulations by the timestep, once for many steps, so that its weights are "
        "not copied in each; auto: if a step is then shorter (default no)"
    )
    parser.add_argument("--hoist", nargs="?", choices=tuple(FORMS), const="yes", default="no", help=which)


def add_split(parser: argparse.ArgumentParser) -> None:
    """Add the option for running blocks in slices."""
    which = (
        "split the tokens of each block into K slices, one after the other, so that fewer bytes of activations are on the "
        "GPU at a time; auto: as few as --memory needs, 1 to 16 (default auto)"
    )
    parser.add_argument("--split", type=_slices, default="auto", metavar="K", help=which)


def add_exchange_groups(parser: argparse.ArgumentParser) -> None:
    """Add the option for exchanges in groups of heads."""
    which = (
        "divide the all-to-alls around attention into G groups of heads, so that one group is exchanged while another "
        "computes; auto: if a step is then at least 3 %% shorter (default no)"
    )
    parser.add_argument("--exchange-groups", type=_groups, default=False, metavar="G", help=which)


def _groups(text: str) -> ExchangeGroups:
    """Parse a value of --exchange-groups.  Raises argparse.ArgumentTypeError if it is invalid."""
    return False if text == "no" else _slices(text)


def _slices(text: str) -> int | Literal["auto"]:
    """Parse a value of --split.  Raises argparse.ArgumentTypeError if it is invalid."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of at least 1")
    return int(text)


def add_lowering(parser: argparse.ArgumentParser) -> None:
    which = "inductor compiles the model (default); eager does not, so it starts at once and needs no C++ compiler"
    choices = ("inductor", "eager")  # tensorrt is untested, so it is not offered for comparisons
    parser.add_argument("--lowering", choices=choices, default="inductor", help=which)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--json``, which works in the same way in every command.  ``what``: a description of the output."""
    parser.add_argument("--json", metavar="FILE", help=f"write {what} to FILE as JSON; -: to stdout, without tables")
