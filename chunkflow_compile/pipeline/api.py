"""``compile`` and ``restore``, which accept a model or a pipeline.

In this release, ``apply`` and ``remove`` are aliases of them for pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn
from typing_extensions import Never, Unpack

from chunkflow_compile.frontend.compile import compile as compile_model
from chunkflow_compile.frontend.compile import restore as restore_model
from chunkflow_compile.options import BackendOptions, PipelineOptions, refuse_positional
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import OnPeers
from chunkflow_compile.pipeline.apply import Dtypes, PipelineT, apply, remove
from chunkflow_compile.placed.placement import is_pipeline
from chunkflow_compile.units import Size

_ModelT = TypeVar("_ModelT", bound=nn.Module)


@overload
def compile(
    model: _ModelT,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    peers: OnPeers = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Unpack[BackendOptions],
) -> _ModelT: ...


@overload
def compile(
    pipe: PipelineT,
    /,
    *,
    device: torch.device | str | None = None,
    memory: Size | None = None,
    dtype: Dtypes | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    peers: OnPeers = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    adapters: int | Mapping[str, Any] | None = None,
    **options: Unpack[PipelineOptions],
) -> PipelineT: ...


def compile(
    model: Any,
    *unnamed: Never,
    device: torch.device | str | None = None,
    dtype: Dtypes | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    peers: OnPeers = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    adapters: int | Mapping[str, Any] | None = None,
    **options: Unpack[BackendOptions],
) -> Any:
    """Place and compile a model or a diffusers pipeline, in place; return it.  :func:`restore` undoes it.

    The weights stay in host memory and are copied to the device while it computes.  Each type of repeated block, and each
    other part with large weights, is compiled once, at the first call.  A model without repeated blocks is compiled as a
    whole, and so is one with ``cudagraphs=True``.

    The components of a pipeline share one budget of device memory.  Transformers, encoders and ControlNets are compiled like
    single models, and so is the decoder of a VAE.  Components run one after another, and the weights of the least recently
    used component are evicted first.  Several threads may call ``pipe(...)``: one generation runs at a time.  The first
    generation compiles, and shows its progress on a terminal.  One line per component is logged at INFO, and once more after
    the first generation, then with the times of its calls.  A component with GGUF weights runs eagerly, with a warning that
    names it, because torch.compile does not support them.  Components that belong to another compiled pipeline are shared
    with it, and so is its budget.

    All arguments except the first are passed by name.

    ``device``: the compute device.  The default for a model is the device of its parameters; for a pipeline it is the current
    GPU, or the CPU if there is no GPU.
    ``memory``: the budget for weights and activations on the device, in bytes or as a string such as "12GiB".  It covers a
    model, or all components of a pipeline together.  :class:`Options` explains the default for a model; for a pipeline it is
    the memory that is free now.  The activations of a transformer are predicted, and the tokens of its blocks are split into
    slices if whole blocks do not fit.  In a pipeline, activations are also measured in the first call of each component, and
    the weights are planned again for the rest of the budget.  Activations cannot be measured on a CPU, where only predicted
    ones count.
    ``dtype``: the dtype to cast to.  For a pipeline it may also be a dict with one dtype per component, and "default" for the
    others, as ``from_pretrained(torch_dtype=...)`` accepts it.
    ``share``, ``host_memory``, ``peers``: see :func:`offload`.  ``host_memory`` covers all components together.  A model that
    is already placed keeps its placement.
    ``mode``, ``dynamic``: as in torch.compile.  By default, sizes that change are dynamic from the second compilation on.
    ``adapters``, for pipelines only: the largest rank of LoRA adapters, or a dict with the arguments of
    :func:`enable_adapters`.  The denoisers can then switch adapters without recompilation.
    ``options``: options of the backend.  ``arena``, ``plan``, ``policy`` and ``slowdown`` apply to models only.

    Raises ChunkflowError, before any weight moves, for an argument that is neither a model nor a pipeline, for an option that
    is unknown or does not apply, and for a model that is already compiled or belongs to a compiled pipeline.  For a pipeline,
    it is also raised if a component cannot be compiled, and the message names the component.  The possible reasons are hooks
    of accelerate or of group offloading, another device, the meta device, an earlier compilation, a weight that does not fit
    in ``memory``, and bitsandbytes, quanto or GGUF weights that do not allow the cast to ``dtype``.
    """
    refuse_positional(compile, unnamed)
    given: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "share": share,
        "host_memory": host_memory,
        "peers": peers,
    }
    given |= {"mode": mode, "dynamic": dynamic, **options}
    if not isinstance(model, nn.Module):
        return apply(model, adapters=adapters, **given)
    kind = type(model).__name__
    if adapters is not None:
        raise ChunkflowError(
            f"adapters applies to pipelines; this is a model: call chunkflow_compile.enable_adapters on the {kind} before "
            "compile."
        )
    if isinstance(dtype, Mapping):
        raise ChunkflowError(
            f"dtype by component applies to pipelines; this is a model: give the {kind} one dtype, such as torch.bfloat16."
        )
    return compile_model(model, **given)


@overload
def restore(model: _ModelT, device: torch.device | str | None = None) -> _ModelT: ...


@overload
def restore(pipe: PipelineT, /) -> PipelineT: ...


def restore(model: Any, device: torch.device | str | None = None) -> Any:
    """Undo :func:`compile` and :func:`offload`: restore the original model or pipeline, bit for bit, and return it.

    The parameters of a model return to the device that they came from, or move to ``device`` if it is given.  All calls that
    ChunkFlow compiled for the model and its parts are removed, including calls from ``model.compile(backend="chunkflow")``.
    Calls that other backends compiled stay.  The object that ``torch.compile(model, backend="chunkflow")`` returned is not
    undone: calling it places the model again.  Restoring a part of a model that was placed as a whole restores the whole
    model.  If another thread is still compiling a call of the model, this call places the model again.

    The components of a pipeline return to the devices that they were on.  This waits for a generation that is running.
    Components that another compiled pipeline shares stay as they are until that pipeline is restored too.  If the
    compiled pipeline itself no longer exists, restoring a copy of it, or another pipeline with its components, restores these
    components.  The components of a deep copy move to the device that they ran on, and the original stays compiled.

    A model that is neither placed nor compiled, and a pipeline that is not compiled, are returned unchanged.
    Raises ChunkflowError if the weights do not fit on the target device.  The model or the pipeline then stays compiled, and
    the weights of a model that do not fit stay offloaded.  Also raises it for a model that belongs to a compiled pipeline,
    for ``device`` with a pipeline, and for an argument that is neither a model nor a pipeline.
    """
    if isinstance(model, nn.Module):
        return restore_model(model, device)
    if device is not None and is_pipeline(model):
        raise ChunkflowError(
            "device applies to models; this is a pipeline: call restore(pipe), which returns its components to where they "
            "were, then pipe.to(device)."
        )
    return remove(model)
