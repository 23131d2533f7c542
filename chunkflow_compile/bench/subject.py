"""The measured model, with random weights, and the inputs of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkflow_compile.catalog.presets import PRESETS, preset
from chunkflow_compile.catalog.small import small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.catalog.weightless import load_build

from .job import REHEARSAL, Job


def build(job: Job, device: torch.device) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """Build the model on ``device`` and split it over the ranks.  Return the model, and a function from a step number (at
    least -REHEARSAL) to the inputs of the step.

    Weights and inputs are the same in every run and on every rank.
    """
    torch.manual_seed(0)
    model, inputs = _model_and_inputs(job, device)
    return _split(job, model.to(device)), lambda step: tree_map_only(torch.Tensor, lambda t: t.to(device), inputs(step))


def build_on_host(job: Job, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the model in host memory, without using the device.  ``weights``: the weights to copy, by name.

    The weights are copied, because drawing billions of random weights on the host would take minutes.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model, _ = _model_and_inputs(job, torch.device("cpu"))
    model.load_state_dict({name: value.to("cpu", copy=True) for name, value in weights.items()}, assign=True)
    return _split(job, model.eval())


def _model_and_inputs(job: Job, device: torch.device) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    if job.model is None:
        family, size, dtype = job.regime.family, job.regime.size, getattr(torch, job.regime.dtype)
        return small_model(family, size).to(dtype), lambda step: _cast(
            small_inputs(family, size, step + REHEARSAL), dtype
        )
    model, given = preset(job.model).build(job.sizes, device) if job.model in PRESETS else load_build(job.model)()
    return model, lambda step: _inputs_of_step(given, step)


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    cast: dict[str, Any] = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    return cast


def first(output: Any) -> torch.Tensor:
    """Return the first tensor in a model's output, which may be a tensor, a tuple, or an output class of diffusers."""
    tensor: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor


def _split(job: Job, model: nn.Module) -> nn.Module:
    splits = job.ranks > 1 and hasattr(model, "enable_parallelism")
    return enable_ulysses(model, job.ranks) if splits else model


def _inputs_of_step(inputs: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the inputs of another step.  Floating-point tensors are scaled down a little from step to step, like latents
    that lose noise."""
    return {
        k: v / (1 + 0.01 * (step + REHEARSAL)) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
