"""``use_adapters``: select LoRA adapters for the generations of one thread, for example for one request to a server."""

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
    """Activate the adapters ``names`` within a ``with`` statement, and restore the previously active adapters at its end.

    Other threads that call a pipeline with the same budget wait until the ``with`` statement ends.  So each thread generates
    with its own adapters.

    ``names``: names of loaded adapters, as for ``set_adapters``; None deactivates all adapters.  ``weights``: one weight for
    all adapters, or one weight per adapter; 1 by default.
    Raises ChunkflowError if the pipeline does not support adapters.  Raises diffusers' ValueError if an adapter is not
    loaded; the previously active adapters are restored in this case as well.
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
