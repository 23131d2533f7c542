"""A region through Inductor."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from .warm_up import vector_instructions

LoweredRegion = Callable[..., Sequence[Any]]


def through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> LoweredRegion:
    """Lower a region.  ``inductor``: the user's configuration.  Must be called inside a tracing context."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    # Each region has a context of its own, for what AOTAutograd notes of a graph there.  Weights stay inputs, so Inductor
    # never takes memory of a slot for a buffer of its own.
    with tracing(TracingContext(TracingContext.get().fake_mode)), _keyed_by_instructions(inputs):
        region: LoweredRegion = compile_fx(copy.deepcopy(module), inputs, config_patches=dict(inductor))  # type: ignore[assignment]
    return region


@contextlib.contextmanager
def _keyed_by_instructions(inputs: Sequence[Any]) -> Iterator[None]:
    """Put the vector instructions into the keys of Inductor's caches, for a region on the CPU.

    They leave them out, and the layout of a kernel's constants depends on them: on a CPU with others, a region from a
    shared cache or a saved file would give wrong numbers.
    """
    if not any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in inputs):
        yield
        return
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}{vector_instructions()}"):
        yield
