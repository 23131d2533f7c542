"""Check whether a weight can be streamed, based on its class and its memory layout."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.weights.bytes import is_dense
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import parts, stream_inside, tensors_of

# The classes of ordinary weights.  If a model is planned without values, its weights are of class FakeTensor.
PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
BITSANDBYTES_INT8 = "bitsandbytes.nn.modules.Int8Params"
GGUF = "diffusers.quantizers.gguf.utils.GGUFParameter"
# Parameter classes from other libraries.  Parameters of these classes differ from ordinary parameters only in additional
# attributes.
_WITH_ATTRIBUTES = ("bitsandbytes.nn.modules.Params4bit", "vllm.model_executor.parameter.ModelWeightParameter")
# Name of a parameter class that cannot be streamed -> the reason, and the classes to use instead.
_NOT_STREAMED = {
    BITSANDBYTES_INT8: "its layer keeps the bytes a second time; int8 of torchao or quanto streams",
    GGUF: "its class takes part in every op; int8 or nf4 of torchao, quanto or bitsandbytes streams",
}


def class_of(tensor: torch.Tensor) -> str:
    """Return the full name of a tensor's class."""
    kind = type(tensor)
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_fully_sharded(root: nn.Module) -> None:
    """Raise ChunkflowError for a model under FSDP, because FSDP itself gathers the weights before each use and frees them
    afterwards."""
    for name, module in root.named_modules():
        # FSDP1 and FSDP2 mark a module with an attribute for Dynamo.  FSDP2 also replaces the class of the module by a
        # subclass with the method ``_get_fsdp_state``.
        if "_is_fsdp_managed_module" in module.__dict__ or hasattr(type(module), "_get_fsdp_state"):
            raise ChunkflowError(
                f"FSDP itself moves the weights of {name or type(module).__name__} between the ranks, in every step: to "
                "stream them from host memory instead, leave out fully_shard (or FullyShardedDataParallel). The shards of "
                "tensor parallelism (parallelize_module) stream."
            )


def refuse_unknown_parts(root: nn.Module) -> None:
    """Raise ChunkflowError if a weight is a tensor subclass that contains an object which torch.compile does not support."""
    taken = (torch.Tensor, *_opaque())
    for name, tensor in tensors_of(root):
        for path, part in parts(tensor, name):
            if not isinstance(part, taken):
                raise ChunkflowError(
                    f"{path} is of type {type(part).__name__}, but __tensor_flatten__ names it as one of the tensors inside "
                    f"{name} ({type(tensor).__name__}), and torch.compile takes only tensors there: return it in the context."
                )


def _opaque() -> tuple[type, ...]:
    """Return the base classes of torch's opaque objects.  Torch 2.11 has no such class, and torch 2.14 has renamed the
    class."""
    names = (("_opaque_base", "OpaqueBase"), ("_custom_class_base", "CustomClassBase"))
    bases = (getattr(getattr(torch, module, None), name, None) for module, name in names)
    return tuple(base for base in bases if base is not None)


def why_not(parameter: torch.Tensor, index: ModelIndex, inside: str = "") -> str | None:
    """Return the reason why a weight of a model cannot be streamed; None if it can be streamed.

    ``inside``: the path of the weight inside a tensor subclass; empty if the weight is not part of a tensor subclass.
    """
    if isinstance(parameter, HostWeight):
        return None
    if inside and not stream_inside():
        return "inside a tensor subclass, which needs torch 2.13 to be streamed"
    name = class_of(parameter)
    if type(parameter) not in PLAIN and name not in _WITH_ATTRIBUTES:
        reason = _NOT_STREAMED.get(name)
        return f"a tensor subclass ({type(parameter).__name__})" + (f": {reason}" if reason else "")
    if parameter.layout != torch.strided or parameter.is_nested or not is_dense(parameter):
        return "its elements do not fill one range of memory"
    if id(parameter) in index.shared:
        return "it shares memory with another tensor"
    return None
