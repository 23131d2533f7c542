"""Lowering: each structurally unique region once, through Inductor or eager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.fx import GraphModule

from chunkflow_compile.passes.program.rewrite import Program

Lowering = Literal["inductor", "eager"]
Region = Callable[..., Sequence[Any]]


def warm_up(lowering: Lowering, device: torch.device) -> None:
    """Starts, beside the tracing, what Inductor would do first: finding out the CPU's vector instructions.

    With empty caches that compiles a test file for each, 6 s on a slow core, and the compiler needs no GIL for it.
    """
    if lowering == "inductor" and device.type == "cpu":
        threading.Thread(target=_find_vector_instructions, name="chunkflow-warm-up", daemon=True).start()


def _find_vector_instructions() -> None:
    with contextlib.suppress(Exception):  # whatever fails here fails again, and is reported, where it is needed
        pick_vec_isa()


def lower_regions(program: Program, lowering: Lowering, inductor: Mapping[str, Any]) -> dict[str, Region]:
    """Submodule name -> callable that takes the region's inputs and returns its outputs as a sequence.

    ``inductor``: configuration of the user's for every region.  Must be called inside a torch.compile backend, whose
    fake mode the regions' metadata belong to.
    """
    if lowering == "eager":
        return {name: region.module.forward for name, region in program.regions.items()}
    return {name: _through_inductor(region.module, inductor) for name, region in program.regions.items()}


def _through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> Region:
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    # standalone_compile gives each region a TracingContext of its own; weights stay inputs, so no buffer that Inductor
    # thinks it owns ever lies in a slot.
    return torch._inductor.standalone_compile(
        module, inputs, dynamic_shapes="from_tracing_context", options={"config_patches": dict(inductor)}
    )
