"""``use_adapters``: adapters for the calls of one thread, as a request that names its own has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from chunkflow_compile.frontend.adapters import tuned_layers
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.budget import budget_of


@contextlib.contextmanager
def use_adapters(
    pipe: Any, names: str | Sequence[str] | None, weights: float | Sequence[float] | None = None
) -> Iterator[None]:
    """Let a pipeline generate with these adapters, and give it back those that it had: a context.

    Threads take turns, on all pipelines of one budget: other threads wait until the context ends, so each generates with its
    own adapters.

    ``names``: of adapters that are loaded, as for ``set_adapters``; None for the model alone.  ``weights``: of each, 1 by
    default.
    Raises ChunkflowError for a pipeline that takes no adapters, and diffusers' ValueError for an adapter that is not loaded;
    the pipeline has the adapters that it had then, too.
    """
    if isinstance(pipe, nn.Module) or not hasattr(pipe, "set_adapters"):
        raise ChunkflowError(f"use_adapters takes a pipeline that loads adapters, not {type(pipe).__name__}.")
    budget = budget_of(pipe)
    with contextlib.nullcontext() if budget is None else budget.turn():
        models = [model for model in pipe.components.values() if isinstance(model, nn.Module)]
        layers: list[Any] = [layer for m in models for layer in tuned_layers(m) if hasattr(layer, "lora_A")]
        before = [
            (layer, [*layer.active_adapters], dict(layer.scaling), bool(layer.disable_adapters)) for layer in layers
        ]
        try:
            if names:
                pipe.enable_lora()
                pipe.set_adapters(names, weights)
            elif before:
                pipe.disable_lora()
            yield
        finally:
            for layer, active, scaling, disabled in before:
                layer.set_adapter([name for name in active if name in layer.lora_A])
                layer.scaling.update({name: scale for name, scale in scaling.items() if name in layer.scaling})
                layer.enable_adapters(not disabled)
