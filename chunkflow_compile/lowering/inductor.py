"""A region through Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.remote_cache import RemoteCacheJsonSerde
from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
from torch._inductor.standalone_compile import CompiledArtifact
from torch.compiler._cache import CacheArtifactManager
from torch.fx import GraphModule

from .warm_up import vector_instructions

LoweredRegion = Callable[..., Sequence[Any]]

# standalone_compile would tune kernels while it compiles, on random tensors of full size: memory that a card may not have
# before the model is placed.  They are tuned in the first step instead, which it would do once more in any case.
_TUNING = {"triton.autotune_at_compile_time": False}


def through_inductor(module: GraphModule, inductor: Mapping[str, Any]) -> LoweredRegion:
    """Lower a region.  ``inductor``: the user's configuration.  Must be called inside a tracing context."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    # standalone_compile gives each region a TracingContext of its own.  Weights stay inputs, so Inductor never takes
    # memory of a slot for a buffer of its own.
    with _keyed_by_instructions(inputs):
        region = torch._inductor.standalone_compile(
            module, inputs, dynamic_shapes="from_tracing_context", options={"config_patches": {**_TUNING, **inductor}}
        )
    _record(region)
    return region


def _record(region: CompiledArtifact) -> None:
    """Let ``torch.compiler.save_cache_artifacts`` save a region, too: standalone_compile records it for the region only."""
    if region._artifacts is None:  # it cannot be pickled, which Inductor has logged
        return
    recorded = CacheArtifactManager.deserialize(region._artifacts[0]) or {}
    for kind, artifacts in recorded.items():
        for artifact in artifacts:
            content: Any = artifact.content
            if kind == AutotuneCacheArtifact.type():  # recorded as a value, and encoded then
                content = RemoteCacheJsonSerde().decode(content)
            CacheArtifactManager.record_artifact(kind, artifact.key, content)


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
