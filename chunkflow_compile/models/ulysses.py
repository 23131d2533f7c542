"""Ulysses sequence parallelism for diffusers models, with or without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.modules import hooks_of


def enable_ulysses(model: nn.Module, degree: int) -> nn.Module:
    """Split the sequence of a diffusers transformer over ``degree`` ranks; return ``model``.

    torch.distributed must be initialised.  Calls ``model.enable_parallelism`` with a plan that traces into one graph.
    The model need not have been called before, because one that does not fit the device could not be.
    Raises ChunkflowError if there is no process group, or if ``degree`` does not divide the number of attention heads; a
    call whose tokens it does not divide raises one too.
    """
    from diffusers import ContextParallelConfig

    if not dist.is_initialized():
        raise ChunkflowError(
            "enable_ulysses splits a model over the ranks of a process group, and there is none: call "
            'torch.distributed.init_process_group("nccl"), or "gloo" on CPUs, before it, and start the program with torchrun.'
        )
    _check_heads(model, degree)
    if TorchVersion(torch.__version__) < "2.13":
        # The last gather of a model calls this function, and Dynamo does not trace into torch._utils before 2.13.
        torch.compiler.allow_in_graph(torch._utils._maybe_view_chunk_cat)
    # Without an accelerator, diffusers (0.42) divides by the number of devices, 0.  During this call, the model's own
    # resolver is shadowed by one that builds its mesh on the CPU.
    if not torch.accelerator.is_available():
        model.__dict__["_resolve_parallel_config"] = lambda config: _resolve_on_cpu(model, config)
    try:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=degree), cp_plan=parallel_plan(model))  # type: ignore[operator]
    finally:
        model.__dict__.pop("_resolve_parallel_config", None)
    for module in model.modules():
        for hook in hooks_of(module).values():
            _settle(getattr(hook, "module_forward_metadata", None))
            _refuse_uneven(hook)
    return model


def _check_heads(model: nn.Module, degree: int) -> None:
    """Raise ChunkflowError if the heads of an attention of the model cannot be split over ``degree`` ranks."""
    for name, module in model.named_modules():
        splits = hasattr(getattr(module, "processor", None), "_parallel_config")  # the attention that diffusers splits
        for kind in ("heads", "kv_heads") if splits else ():
            heads = getattr(module, kind, None)
            if isinstance(heads, int) and heads % degree:
                fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                raise ChunkflowError(
                    f"Ulysses over {degree} ranks splits the attention heads into {degree} equal parts, and the {heads} "
                    f"{kind} of {name} ({type(model).__name__}) cannot be split so: choose a degree of {fits}."
                )


def _refuse_uneven(hook: Any) -> None:
    """Let a hook of diffusers that splits a sequence name the numbers if it cannot."""
    from diffusers.hooks.context_parallel import ContextParallelSplitHook

    from .even_split import EvenSplitHook

    if type(hook) is ContextParallelSplitHook:
        hook.__class__ = EvenSplitHook


def _settle(metadata: Any) -> None:
    """Look up the positions of the arguments that a hook splits before the first call: Dynamo does not trace that."""
    if metadata is not None and metadata.cached_parameter_indices is None:
        names = list(inspect.signature(metadata._cls.forward).parameters)[1:]  # without self
        metadata.cached_parameter_indices = {name: i for i, name in enumerate(names)}


def parallel_plan(model: nn.Module) -> dict[str, Any]:
    """How a model's sequence is split and gathered, as a ``cp_plan`` of diffusers.

    diffusers' own plan, with two changes.  HunyuanVideo has none, so one is defined here.  Wan's plan also splits a
    per-token timestep; if the timestep is per sample, as in text-to-video, that split only warns, and the warning
    breaks the graph, so it is left out.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    if type(model).__name__ == "HunyuanVideoTransformer3DModel":
        split = ContextParallelInput(split_dim=1, expected_dims=3)
        rotary = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)
        return {
            "transformer_blocks.0": {"hidden_states": split, "encoder_hidden_states": split},
            "rope": {0: rotary, 1: rotary},
            "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
        }
    own: Any = model._cp_plan
    return {
        name: {k: v for k, v in entry.items() if k != "timestep"} if isinstance(entry, dict) else entry
        for name, entry in own.items()
        if not (isinstance(entry, dict) and set(entry) == {"timestep"})
    }


def _resolve_on_cpu(model: Any, config: Any) -> Any:
    from diffusers import ParallelConfig

    parallel = ParallelConfig(context_parallel_config=config)
    mesh = dist.device_mesh.init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    model._parallel_config = parallel
    return parallel
