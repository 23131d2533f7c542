"""Recognize which arguments of public functions are models, models that torch.compile has wrapped, or pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.private_torch.dynamo import OptimizedModule


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile has wrapped, or ``model`` itself if it is not wrapped.  Raises ChunkflowError if
    ``model`` is not a module."""
    if not isinstance(model, nn.Module):
        raise ChunkflowError(instead_of_model(model))
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def is_pipeline(given: Any) -> bool:
    """Return whether an argument is a pipeline.  Any object with a mapping ``components`` counts as a pipeline, except a
    module."""
    return not isinstance(given, nn.Module) and isinstance(getattr(given, "components", None), Mapping)


def instead_of_model(given: Any, or_pipeline: bool = False) -> str:
    """Return the error message for an argument that is not a model.  The message says what to pass instead.
    ``or_pipeline``: whether the public function also accepts a pipeline."""
    wanted, loader = (
        ("a model or a pipeline", "DiffusionPipeline") if or_pipeline else ("a model", "FluxTransformer2DModel")
    )
    if isinstance(given, type):
        name = given.__name__
        return f"{name} is a class, not {wanted}: pass an instance, as {name}.from_pretrained(...) returns."
    if isinstance(given, str | Path):
        load = f"{loader}.from_pretrained({str(given)!r})"
        return f"{str(given)!r} is a name, not {wanted}: load it first, such as with {load}."
    this = f"This {type(given).__name__}"
    if or_pipeline:
        fix = (
            "the pipeline itself, not its components"
            if isinstance(given, Mapping)
            else "a torch.nn.Module or a pipeline"
        )
        return f"{this} is neither a model nor a diffusers pipeline: pass {fix}."
    if is_pipeline(given):
        return (
            f"{this} is a pipeline, not a model: pass one component, such as pipe.transformer. For the whole pipeline, call "
            "chunkflow_compile.compile(pipe)."
        )
    return f"{this} is not a model: pass a torch.nn.Module."
