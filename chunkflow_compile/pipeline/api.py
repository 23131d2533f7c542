"""``compile`` and ``restore``: the pair of functions for a model and for a pipeline.

``apply`` and ``remove`` are aliases for pipelines, in this release.
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

    The components of a pipeline share one budget of device memory.  Transformers, encoders and ControlNets are compiled as
    models are, and so is the decoder of a VAE.  Components run one after another, and the weights of the least recently used
    component are evicted first.  Several threads may call ``pipe(...)``: one generation runs at a time.  The first generation
    compiles, and shows its progress on a terminal.  One line per component is logged at INFO, and again after the first
    generation, with the times of its calls.  A component with GGUF weights runs eagerly, with a warning that names it,
    because torch.compile does not support them.  Components that belong to another compiled pipeline are shared with it, and
    so is its budget.

    All arguments but the first are given by name.

    ``device``: by default, the device of the parameters of a model; for a pipeline, the GPU that torch uses, or else the CPU.
    ``memory``: bytes, or a text such as "12GiB": the budget for weights and activations on the device, of a model or of all
    components of a pipeline.  For a model see :class:`Options` for the default; for a pipeline, it is what is free now.
    Activations of a transformer are predicted, and its blocks are split into slices of their tokens if whole ones do not
    fit.  In a pipeline they are measured in the first call of each component, and the weights are planned again for the rest
    of the budget.  On a CPU, activations cannot be measured, so those of other components are not counted.
    ``dtype``: the dtype to cast to.  For a pipeline, also a dict by component, {"default": ...} for the others, as
    ``torch_dtype`` of ``from_pretrained``.
    ``share``, ``host_memory``, ``peers``: see :func:`offload`.  ``host_memory`` is for all components together.  A model that
    is placed already keeps its placement.
    ``mode``, ``dynamic``: as in torch.compile.  By default, sizes that change are dynamic from the second compilation on.
    ``adapters``, for pipelines only: lets the denoisers change LoRA adapters without recompilation: the largest rank, or the
    arguments of :func:`enable_adapters` by name.
    ``options``: those of the backend.  ``arena``, ``plan``, ``policy`` and ``slowdown`` are for models only.

    Raises ChunkflowError before any weight moves for an argument that is neither a model nor a pipeline, for an unknown
    option or one that does not apply, and for a model that is compiled already or belongs to a compiled pipeline.  For a
    pipeline, the error names the component: one that is under the hooks of accelerate or of group offloading, on another
    device, without values or compiled already, one with a weight that does not fit in ``memory``, or one whose weights of
    bitsandbytes, quanto or GGUF do not allow the cast to ``dtype``.
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
    """Undo :func:`compile` and :func:`offload`: the original model or pipeline, bit for bit; return it.

    Of a model, the parameters return to where they came from, or move to ``device`` if it is given.  The model and its parts
    keep no call that ChunkFlow compiled, including those of ``model.compile(backend="chunkflow")``; those of other backends
    stay.  The object that ``torch.compile(model, backend="chunkflow")`` returned is not undone: calling it places the model
    again.  Restoring a part of a model that was placed as a whole restores the whole.  Calls of other threads that are still
    compiling place the model again.

    Of a pipeline, the components return to where they were.  It waits for a generation that is running.  Components that
    another pipeline shares stay as they are until that one is restored too; a pipeline whose original is gone restores
    what the original had compiled.  The components of a deep copy move to the device that they ran on, and the original
    stays compiled.

    A model that is neither placed nor compiled, and a pipeline that is not compiled, are returned as they are.
    Raises ChunkflowError if the weights do not fit where they are to go: those of a model that do not fit stay offloaded, and
    the model or the pipeline stays compiled.  Also raises it for a model that belongs to a compiled pipeline, for ``device``
    with a pipeline, and for an argument that is neither a model nor a pipeline.
    """
    if isinstance(model, nn.Module):
        return restore_model(model, device)
    if device is not None and is_pipeline(model):
        raise ChunkflowError(
            "device applies to models; this is a pipeline: call restore(pipe), which returns its components to where they "
            "were, then pipe.to(device)."
        )
    return remove(model)
