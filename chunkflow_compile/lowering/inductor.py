"""A region through Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

Region = Callable[..., Sequence[Any]]

# standalone_compile would tune kernels while it compiles, on random tensors of full size: memory that a card may not have
# before the model is placed.  They are tuned in the first step instead, which it would do once more in any case.
_TUNING = {"triton.autotune_at_compile_time": False}


def through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> Region:
    """Lower a region.  ``inductor``: the user's configuration.  Must be called inside a tracing context."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    # standalone_compile gives each region a TracingContext of its own.  Weights stay inputs, so Inductor never takes
    # memory of a slot for a buffer of its own.
    return torch._inductor.standalone_compile(
        module, inputs, dynamic_shapes="from_tracing_context", options={"config_patches": {**_TUNING, **inductor}}
    )
