"""Lowering: each structurally unique region once, with Inductor, TensorRT or eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.errors import first_line
from chunkflow_compile.passes.program.rewrite import Program

from .tensorrt import Region, through_tensorrt
from .warm_up import warmed_up

Lowering = Literal["inductor", "eager", "tensorrt"]

# standalone_compile would tune kernels while it compiles, on random tensors of full size: memory that a card may not have
# before the model is placed.  They are tuned in the first step instead, which it would do once more in any case.
_TUNING = {"triton.autotune_at_compile_time": False}


def lower_regions(
    program: Program,
    lowering: Lowering,
    inductor: Mapping[str, Any],
    told: Callable[[str], object] = str,
    note: Callable[[str], object] = str,
) -> dict[str, Region]:
    """Submodule name -> callable that takes the region's inputs and returns its outputs as a sequence.

    ``inductor``: the user's Inductor configuration, for every region.  ``told``: called with what is being done.  ``note``:
    called with what the user asked for and does not get.  Must be called inside a torch.compile backend: the metadata of
    the regions belong to its fake mode.
    """
    if lowering == "eager":
        return {name: region.module.forward for name, region in program.regions.items()}
    warmed_up()
    lowered = dict[str, Region]()
    for number, (name, region) in enumerate(program.regions.items(), 1):
        told(f"lowering region {number} of {len(program.regions)}")
        if lowering == "tensorrt":
            try:
                lowered[name] = through_tensorrt(region.module)
                continue
            except Exception as error:  # noqa: BLE001  (any op or type that TensorRT does not support)
                note(f"{name} goes to Inductor: TensorRT says {first_line(error)}")
        lowered[name] = _through_inductor(region.module, inductor)
    return lowered


def _through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> Region:
    module = _named_by_place(module)
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    # standalone_compile gives each region a TracingContext of its own.  Weights stay inputs, so Inductor never takes
    # memory of a slot for a buffer of its own.
    return torch._inductor.standalone_compile(
        module, inputs, dynamic_shapes="from_tracing_context", options={"config_patches": {**_TUNING, **inductor}}
    )


def _named_by_place(module: GraphModule) -> GraphModule:
    """The region with its nodes numbered: Inductor's caches then find it in another model, where its ops have other names."""
    graph, copies = Graph(), dict[Node, Node]()
    for number, node in enumerate(module.graph.nodes):
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        if node.op != "output":
            copied.name = f"v{number}"
            if node.op == "placeholder":
                copied.target = copied.name
    return GraphModule(module, graph)
