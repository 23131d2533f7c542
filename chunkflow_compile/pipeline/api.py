"""``compile`` and ``restore``, which accept a model or a pipeline.

In this release, ``apply`` and ``remove`` are aliases of ``compile`` and ``restore`` for pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn
from typing_extensions import Never, Unpack

from chunkflow_compile.frontend.compile import compile as compile_model
from chunkflow_compile.frontend.compile import restore as restore_model
from chunkflow_compile.option_parsing import refuse_positional
from chunkflow_compile.options import BackendOptions, PipelineOptions
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import OnPeers
from chunkflow_compile.pipeline.apply import Dtypes, PipelineT, apply, remove
from chunkflow_compile.placed.model_arguments import is_pipeline
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
    """Place and compile a model or a diffusers pipeline, in place; return it.  :func:`restore` undoes this call.

    The weights stay in host memory and are copied to the device while the device computes.  Each type of repeated block is
    compiled once, at its first call.  Parts outside these blocks are also compiled if they have large weights.  A model is
    compiled as one graph instead if it has no repeated blocks, or if ``cudagraphs`` or ``hoist`` requires one graph.

    The components of a pipeline share one budget of device memory.  Transformers, encoders, ControlNets and the decoder of a
    VAE are compiled like single models.  Components run one after another.  If memory is short, the weights of the least
    recently used component are evicted first.  Several threads may call ``pipe(...)``, but only one generation runs at a
    time.  The first generation compiles the components and shows its progress on a terminal.  One line per component is
    logged at INFO when the pipeline is compiled.  After the first generation, these lines are logged again with call times.
    A component with GGUF weights runs eagerly, because torch.compile does not support these weights; a warning names the
    component.  If a component already belongs to another compiled pipeline, both pipelines share the component and the
    budget.

    All arguments except the first must be passed by name.

    ``device``: the compute device.  For a model, the default is the device of its parameters.  For a pipeline, the default is
    the current GPU, or the CPU if there is no GPU.
    ``memory``: the budget for weights and activations on the device, in bytes or as a string such as "12GiB".  The budget
    covers a single model, or all components of a pipeline together.  For a model, :class:`Options` explains the default.
    For a pipeline, the default is the memory that is free now.  The activations of a transformer are predicted.  If the
    activations of whole blocks do not fit, the tokens of these blocks are split into slices.  In a pipeline, the first call
    of each component also measures its activations, and the weights are then planned again for the rest of the budget.  On a
    CPU, activations cannot be measured, so only predicted activations count towards the budget.
    ``dtype``: the dtype to which weights are cast.  For a pipeline, ``dtype`` may also be a dict with one dtype per component
    and a "default" for all other components, as in ``from_pretrained(torch_dtype=...)``.
    ``share``, ``host_memory``, ``peers``: see :func:`offload`.  ``host_memory`` covers all components together.  If a model
    is already placed, these three arguments, ``device`` and ``dtype`` must be left out.
    ``mode``, ``dynamic``: as in torch.compile.  By default, if an input size changes, the model is recompiled once, and this
    size is dynamic from then on.
    ``adapters``: for pipelines only, the maximum rank of LoRA adapters, or a dict with the arguments of
    :func:`enable_adapters`.  The denoisers can then switch adapters without recompilation.
    ``options``: options of the backend.  ``arena``, ``plan``, ``policy``, ``slowdown`` and ``weight_memory`` apply to models
    only.

    Raises ChunkflowError, before any weight moves, if the argument is neither a model nor a pipeline, if an option is unknown
    or does not apply, or if the model is already compiled or belongs to a compiled pipeline.  For a pipeline, the error is
    also raised if a component cannot be compiled; the message names the component.  Possible reasons are hooks of accelerate
    or of group offloading, weights on another device or on the meta device, an earlier compilation, a weight that does not
    fit in ``memory``, and bitsandbytes, quanto or GGUF weights that do not allow the cast to ``dtype``.
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

    The parameters of a model return to their former device, or move to ``device`` if it is given.  Code that ChunkFlow
    compiled for the model and its parts is removed, even if ``model.compile(backend="chunkflow")`` compiled it.  Code that
    other backends compiled stays.  The object that ``torch.compile(model, backend="chunkflow")`` returned stays compiled, and
    calling this object places the model again.  If a part of a placed model is restored, the whole model is restored.  If a
    call in another thread is still compiling the model, that call places the model again.

    The components of a pipeline return to their former devices.  This call waits for the end of a running generation.  A
    component that also belongs to another compiled pipeline stays compiled until that pipeline is restored too.  If the
    compiled pipeline itself no longer exists, its components can still be restored: call this function on a copy of the
    pipeline, or on another pipeline with the same components.  If a deep copy of a compiled pipeline is restored, the
    components of the copy move to the device that they ran on, and the original stays compiled.

    A model that is neither placed nor compiled, and a pipeline that is not compiled, are returned unchanged.
    Raises ChunkflowError if the weights do not fit on the target device.  In this case the model or the pipeline stays
    compiled, and the weights that were not restored before the error stay offloaded.  Also raises ChunkflowError if the model
    belongs to a compiled pipeline, if ``device`` is passed for a pipeline, or if the argument is neither a model nor a
    pipeline.
    """
    if isinstance(model, nn.Module):
        return restore_model(model, device)
    if device is not None and is_pipeline(model):
        raise ChunkflowError(
            "device applies to models; this is a pipeline: call restore(pipe), which returns its components to where they "
            "were, then pipe.to(device)."
        )
    return remove(model)
