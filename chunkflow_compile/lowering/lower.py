"""Lowering: each structurally unique region once, through Inductor or eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.rewrite import Program

Lowering = Literal["inductor", "eager"]
Region = Callable[..., Sequence[Any]]


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
