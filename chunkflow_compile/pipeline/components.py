"""Find the components of a pipeline, and check that they can be placed.  Before each generation, check that no other code
has moved or compiled them since they were placed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from chunkflow_compile.frontend.compile import is_ours
from chunkflow_compile.hardware.headroom import budget_for
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.budget import Budget
from chunkflow_compile.pipeline.phase import Phase, kept_by
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.model_arguments import instead_of_model, is_pipeline
from chunkflow_compile.placed.offload import cast_to
from chunkflow_compile.placed.placement import placement_of, placements_around
from chunkflow_compile.placed.streamable import BITSANDBYTES_INT8, PLAIN, class_of, why_not
from chunkflow_compile.private_torch.dynamo import OptimizedModule
from chunkflow_compile.units import enough, size
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves, leaves_of, tensors_of
from chunkflow_compile.weights.loader import keep_dtype
from chunkflow_compile.weights.modules import hooks_of

# Prefixes of the names of classes for quantized weights.  If a component contains such weights, its other weights keep their
# dtype, because its forward method would fail after a cast.
_FIXED_DTYPES = ("bitsandbytes.", "optimum.quanto.", "diffusers.quantizers.gguf.")


def components_of(pipe: Any) -> dict[str, nn.Module]:
    """Return a mapping from names to those components that have weights.  A component with several names is listed once."""
    names: dict[nn.Module, str] = {}
    for name, model in pipe.components.items():
        if isinstance(model, nn.Module) and any(True for _ in leaves_of(model)):
            names.setdefault(model, name)
    return {name: model for model, name in names.items()}


def check_pipeline(pipe: Any, alias: str, verb: str) -> None:
    """Raise ChunkflowError if the argument of a public function is not a pipeline.

    ``alias``: the name of the public function, which accepts only pipelines.  ``verb``: the name of the corresponding
    function that also accepts models.
    """
    if isinstance(pipe, nn.Module):
        raise ChunkflowError(
            f"{alias} takes a diffusers pipeline, not {type(pipe).__name__}: for a model, call "
            f"chunkflow_compile.{verb}(model)."
        )
    if not is_pipeline(pipe):
        raise ChunkflowError(instead_of_model(pipe, or_pipeline=True))


def check_component(name: str, model: nn.Module, device: torch.device) -> None:
    """Raise ChunkflowError if a component cannot be placed."""
    what = f"pipe.{name} ({type(model).__name__})"
    calls = [call for m in model.modules() if (call := m._compiled_call_impl) is not None]
    wrapped = _has_compiled_method(model) or any(isinstance(m, OptimizedModule) for m in model.modules())
    if calls or wrapped:
        fix = "pass a pipeline whose components are not compiled, since compile(pipe) compiles them."
        if not wrapped and all(map(is_ours, calls)):
            fix = f"call chunkflow_compile.restore(pipe.{name}) first, since compile(pipe) compiles it itself."
        raise ChunkflowError(f"{what} is compiled already: {fix}")
    if placement_of(model) is not None or placements_around(leaves_of(model)):
        raise ChunkflowError(f"{what} is offloaded already: call chunkflow_compile.restore(pipe.{name}) first.")
    if (hook := _moving_hook(model)) is not None:
        undo = (
            "load the pipeline without device_map or group offloading, or call pipe.remove_all_hooks() and "
            "pipe.reset_device_map() instead of enable_model_cpu_offload()."
        )
        if hasattr(model, "_hf_hook") and getattr(model, "quantization_method", None) == "bitsandbytes":
            undo = "accelerate may put it on models of bitsandbytes. Call pipe.remove_all_hooks() first."
        raise ChunkflowError(f"{what} is under {hook}, which moves its weights too: {undo}")
    for leaf in leaves_of(model):
        if leaf.is_meta:
            raise ChunkflowError(f"{what} has parameters on the meta device, without values: load its weights first.")
        if leaf.device.type != "cpu" and leaf.device != device:
            raise ChunkflowError(
                f"{what} is on {leaf.device}: pass device={str(leaf.device)!r}, or move it to the CPU."
            )
        if class_of(leaf) == BITSANDBYTES_INT8 and leaf.device != device:
            raise ChunkflowError(
                f"{what} has int8 weights of bitsandbytes on {leaf.device}, whose scales only bitsandbytes moves: load it on "
                f"{device}, where these weights stay, or quantise it with torchao or quanto, whose weights stream."
            )


def check_dtypes(dtype: Any, pipe: Any) -> None:
    """Raise ChunkflowError if ``dtype`` contains a value that is not a dtype, or the name of an unknown component."""
    for name, given in dtype.items() if isinstance(dtype, Mapping) else [("default", dtype)]:
        if name != "default" and name not in pipe.components:
            names = ", ".join(components_of(pipe))
            raise ChunkflowError(f"dtype has {name!r}, which is no component of this pipeline: use default, {names}.")
        if given is not None and not isinstance(given, torch.dtype):
            raise ChunkflowError(f"dtype={given!r} is no dtype: give one of torch's, such as torch.bfloat16.")


def check_cast(name: str, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise ChunkflowError if a component is quantized with a library that does not allow casts, and a cast to ``dtype``
    would change one of its weights."""
    fixed = next((t for _, t in tensors_of(model) if class_of(t).startswith(_FIXED_DTYPES)), None)
    if dtype is None or fixed is None:
        return
    dtype_of = cast_to(dtype, model)
    changed = next((n for n, t in tensors_of(model) if type(t) in PLAIN and dtype_of(n, t) != t.dtype), None)
    if changed is not None:
        raise ChunkflowError(
            f"pipe.{name} ({type(model).__name__}) has weights of {class_of(fixed)}, which compute in a dtype of their own, "
            f"so {changed} is not cast to {dtype}: load the component with torch_dtype={dtype}, or leave it out, "
            f"dtype={{'default': {dtype}, {name!r}: None}}."
        )


def check_unmoved(name: str, phase: Phase, device: torch.device) -> None:
    """Raise ChunkflowError if other code has moved or compiled a component since it was placed, or has added hooks that move
    its weights."""
    model = phase.root
    what, then = f"pipe.{name} ({type(model).__name__})", "call chunkflow_compile.restore(pipe) first, or undo that."
    if (hook := _moving_hook(model)) is not None:
        raise ChunkflowError(f"{what} came under {hook} after compile(pipe), and both would move its weights: {then}")
    if not phase.begins or _has_compiled_method(model):
        raise ChunkflowError(f"{what} was compiled after compile(pipe), which compiles it: {then}")
    for leaf in leaves_of(model):
        # weights that were added after compile(pipe) may be on the CPU until a program reads them
        if leaf.device != device and (isinstance(leaf, HostWeight) or leaf.device.type != "cpu"):
            raise ChunkflowError(f"{what} was moved from {device} to {leaf.device} after compile(pipe): {then}")


def _has_compiled_method(model: nn.Module) -> bool:
    """Whether other code has replaced a method by a compiled method, as in ``vae.decode = torch.compile(vae.decode)``."""
    own = ((type(m), name, call) for m in model.modules() for name, call in vars(m).items())
    given = (getattr(call, "__dict__", {}) for kind, name, call in own if callable(getattr(kind, name, None)))
    return any("_torchdynamo_orig_callable" in marks and "_torchdynamo_disable" not in marks for marks in given)


def _moving_hook(model: nn.Module) -> str | None:
    """Return a description of a hook that moves the weights of a model; None if the model has no such hook."""
    for inner in model.modules():
        if hasattr(inner, "_hf_hook"):
            return "a hook of accelerate"
        if any("group_offloading" in hook for hook in hooks_of(inner)):
            return "diffusers' group offloading"
    return None


def check_floor(
    models: Mapping[str, nn.Module], cast: Mapping[str, torch.dtype | None], budget: Budget, min_bytes: int
) -> None:
    """Raise ChunkflowError if the budget is smaller than the weights that stay on the device plus the largest streamed
    weight."""
    small, fixed, largest = kept_by(budget.phases), dict[str, tuple[int, str]](), dict.fromkeys(models, 0)
    for name, model in models.items():
        for path, nbytes, stays in _weights(model, cast[name], min_bytes):
            if stays is None:
                largest[name] = max(largest[name], nbytes)
            elif stays:
                fixed[f"pipe.{name}.{path}"] = nbytes, stays
            else:
                small += nbytes
    unstreamed = sum(nbytes for nbytes, _ in fixed.values())
    name = max(largest, key=lambda n: largest[n], default="")
    if not models or small + unstreamed + largest[name] <= budget.usable:
        return
    said = f"small weights of all components take {size(small)}"
    if fixed:
        first, (_, reason) = max(fixed.items(), key=lambda item: item[1][0])
        said += f", {len(fixed)} that cannot be streamed take {size(unstreamed)}"
        said += f" (the largest is {first}, {reason})"
    what, fix = f"pipe.{name}: its largest streamed weight has {size(largest[name])}", ""
    if not largest[name]:
        what = f"this pipeline: no weight of at least min_bytes, {size(min_bytes)}, can be streamed"
        fix = ", or a smaller min_bytes"
    raise ChunkflowError(
        f"memory={size(budget.total)} is too little for {what}, {said}. Give at least "
        f"memory={enough(budget_for(small + unstreamed + largest[name]))!r}{fix}. Activations come on top, and other weights "
        "of the same region: what they take is known after the first call of each component."
    )


def _weights(model: nn.Module, dtype: torch.dtype | None, min_bytes: int) -> Iterator[tuple[str, int, str | None]]:
    """Yield (name, size in bytes, reason) for each weight of a component.

    The size is the size after ``offload`` has cast the weight.  The reason says why the weight will stay on the device.  The
    reason is an empty string for a small weight, and None for a weight that will be streamed.
    """
    index, dtype_of = ModelIndex.of(model), keep_dtype if dtype is None else cast_to(dtype, model)
    seen = set[int]()
    for outer, tensor in tensors_of(model):
        for inside, leaf in leaves(tensor):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                small = leaf.numel() * leaf.element_size() < min_bytes and id(leaf) not in index.filled
                stays = "" if small else why_not(leaf, index, inside)
                yield outer + inside, leaf.numel() * dtype_of(index.names[id(leaf)][0], leaf).itemsize, stays
