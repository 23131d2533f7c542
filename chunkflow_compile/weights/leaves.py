"""The tensors that hold the bytes of a weight: the weight itself, or the inner tensors of a tensor subclass, at any
depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .exchange import become
from .host_weight import HostWeight


def stream_inside() -> bool:
    """Whether the inner tensors of a tensor subclass can be offloaded.

    A call of compiled code must unwrap the inputs that were tensor subclasses during tracing.  Before torch 2.13,
    AOTAutograd instead unwraps the inputs that are tensor subclasses at the time of the call, so the result is False.
    """
    return TorchVersion(torch.__version__) >= "2.13"


def leaves(tensor: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each tensor that holds bytes, with its name.  The name consists of the weight's name and the attributes on the
    path to the inner tensor, as in ``weight.qdata``."""
    return (part for part in parts(tensor, name) if isinstance(part[1], torch.Tensor))


def parts(tensor: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the inner objects of a tensor subclass, at any depth.  Some inner objects may not be tensors, such as the
    DeviceMesh of a DTensor.  For an ordinary tensor, yield the tensor itself."""
    if isinstance(tensor, HostWeight) or not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from parts(getattr(tensor, attribute), f"{name}.{attribute}")


def with_leaves(tensor: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tensor like ``tensor``, in which each leaf is replaced by the result of ``change`` for this leaf."""
    if isinstance(tensor, HostWeight) or not is_traceable_wrapper_subclass(tensor):
        return change(tensor)
    attributes, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in attributes}
    inner = {n: with_leaves(part, change) if isinstance(part, torch.Tensor) else part for n, part in parts.items()}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def align(root: nn.Module) -> None:
    """Give each instance of a tensor subclass in a model the device and the storage offset of its inner tensors.

    A DTensor has the storage offset of its shard.  After the shard was moved, this offset may be outdated, and torch
    cannot trace a DTensor with an outdated offset.
    """
    for _, tensor in tensors_of(root):
        inside = [leaf for _, leaf in leaves(tensor)]
        if not inside or inside[0] is tensor:
            continue
        moved = all(leaf.device != tensor.device for leaf in inside)
        if moved or inside[0].storage_offset() != tensor.storage_offset():
            with torch.inference_mode(False), torch.no_grad():
                copied = with_leaves(tensor, lambda leaf: leaf)
                if not moved and copied.storage_offset() == tensor.storage_offset():
                    continue
                if isinstance(tensor, nn.Parameter):  # nn.Parameter(copied) would call detach, which copies the leaves
                    copied.requires_grad_(tensor.requires_grad)._is_param = True
                become(tensor, copied)


def tensors_of(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a model with their names, and the tensors in the quantization states of its
    parameters.  A tied tensor is yielded once per name.

    Skips the weights of the modules that a module lists in ``chunkflow_aside``, because no program reads them.
    """
    aside: list[nn.Module] = [
        part for m in root.modules() if hasattr(type(m), "chunkflow_aside") for part in cast("Any", m).chunkflow_aside
    ]
    left_out = {id(t) for part in aside for t in chain(part.parameters(), part.buffers())}
    for name, tensor in chain(
        root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)
    ):
        if id(tensor) in left_out:
            continue
        yield name, tensor
        yield from quant_state_tensors(tensor, name)


def leaves_of(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model that hold bytes; a tied tensor is yielded once per name."""
    return (leaf for _, leaf in named_leaves(root))


def named_leaves(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor that :func:`leaves_of` yields."""
    return (leaf for name, tensor in tensors_of(root) for leaf in leaves(tensor, name))


def quant_state_tensors(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor in the quantization state that bitsandbytes attaches to a parameter.  An example
    of a name is ``weight.quant_state.absmax``."""
    state = tensor.__dict__.get("quant_state")
    if state is not None:
        yield from _held_by(state, f"{name}.quant_state")


def _held_by(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for attribute, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            yield f"{name}.{attribute}", value
        elif type(value) is type(state):  # nested quantization: the scales of the scales
            yield from _held_by(value, f"{name}.{attribute}")
