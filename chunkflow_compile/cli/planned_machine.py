"""Choose the machine that a command plans for: the machine that the user names, this machine's GPU, or the default."""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace

import torch

from chunkflow_compile.hardware.profiles import MEASURED, SCALED, default_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

from .arguments import DEFAULT_MACHINE


def choose_hardware(arguments: argparse.Namespace) -> None:
    """If the user has not set ``--hardware``, set it to the profile of this machine's GPU or, without a GPU, to
    DEFAULT_MACHINE."""
    if arguments.hardware is not None:
        return
    arguments.hardware, why = _of_this_machine()
    arguments.hardware_note = f"note: planned for {arguments.hardware} ({why})"


def note_hardware(arguments: argparse.Namespace) -> None:
    """If the user has not set ``--hardware``, print once on stderr which machine was chosen and why."""
    if arguments.hardware_note:
        print(arguments.hardware_note, file=sys.stderr)
        arguments.hardware_note = ""


def _of_this_machine() -> tuple[str, str]:
    """Return the name of the chosen profile and the reason for the choice."""
    if not torch.cuda.is_available():
        return DEFAULT_MACHINE, "the default without a GPU; chunkflow hardware lists others"
    card = torch.cuda.get_device_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no warning about a GPU without a profile, because the note mentions this
        name = default_profile(torch.device("cuda", torch.cuda.current_device()))
    if name == MEASURED:
        return name, f"calibrated on this machine's {card}"
    if name.startswith(SCALED):
        return name, f"this {card}; chunkflow calibrate measures it"
    return name, f"this machine's {card}"


def machine(hardware: Hardware, arguments: argparse.Namespace) -> Hardware:
    """Return the hardware profile with the attention kernel and the number of nodes that the user has set.

    Raises ChunkflowError if the profile has no rate for the kernel, or if the ranks cannot be divided evenly over the
    nodes.
    """
    if arguments.attention != "auto":
        hardware = hardware.attending_by(arguments.attention)
    nodes, ranks = arguments.nodes, arguments.ulysses
    if nodes < 1 or ranks % nodes:
        raise ChunkflowError(
            f"--nodes {nodes} does not divide --ulysses {ranks}: a node has equally many ranks of a group, and at least one."
        )
    if nodes > 1 and arguments.cfg_parallel > 1:
        raise ChunkflowError(
            "--nodes with --cfg-parallel: which ranks share a node is not known. Leave out --nodes where each branch has a "
            "node of its own, or --cfg-parallel."
        )
    return hardware if nodes == 1 else replace(hardware, node_ranks=ranks // nodes)
