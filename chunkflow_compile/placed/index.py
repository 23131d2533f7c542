"""The names and the blocks of a model's weights, and which of the weights share memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves, named_leaves, tensors_of


@dataclass(frozen=True)
class ModelIndex:
    """The names and blocks of a model.

    ``root``: the module that was compiled, or else the smallest module that contains all parameters.  For a block in a
    ``ModuleList``, it is the model around the block.  None if no module contains them.
    ``names``: id of a parameter, of a buffer, or of a tensor inside one -> its names.  ``shared``: ids of the tensors that
    share memory with another tensor.  ``blocks``: key of ``nn_module_stack`` (the id of a module) -> name of a block.  A
    block is an element of an outermost ``ModuleList``, see :func:`elements`.  ``maybe_block``: True if no module around
    ``root`` was found, but ``gc.freeze()`` may have hidden one.  ``filled``: ids of the buffers that :func:`filled_by`
    returns.
    """

    root: nn.Module | None
    names: Mapping[int, tuple[str, ...]]
    blocks: Mapping[str, str]
    shared: frozenset[int] = frozenset()
    maybe_block: bool = False
    filled: frozenset[int] = frozenset()

    @staticmethod
    def of(root: nn.Module, maybe_block: bool = False) -> ModelIndex:
        names: dict[int, tuple[str, ...]] = {}
        tensors = [*named_leaves(root)]
        for name, tensor in tensors:
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
        shared, filled = _overlapping(t for _, t in tensors), frozenset(filled_by(root))
        return ModelIndex(root, names, dict(_blocks(root, "")), shared, maybe_block, filled)

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all of ``parameters`` belong to the model."""
        return all(id(p) in self.names for p in parameters)


def filled_by(root: nn.Module) -> dict[int, Any]:
    """Id of each buffer that a module of the model fills before programs read it -> the module.

    The class of the module lists the names of such buffers in ``chunkflow_filled``, and its method ``fill()`` fills them.
    These buffers stream even if they are small, and ranks do not share them.
    """
    return {id(m._buffers[name]): m for m in root.modules() for name in getattr(type(m), "chunkflow_filled", ())}


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward method.  A list of modules does not."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def elements(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each element of a list.  An element without forward, such as a nested list, is replaced by its own
    elements."""
    for name, child in module.named_children():
        if is_called(child):
            yield prefix + name, child
        else:
            yield from elements(child, f"{prefix}{name}.")


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(module, nn.ModuleList):
        yield from ((str(id(element)), name) for name, element in elements(module, prefix))
        return
    for name, child in module.named_children():
        yield from _blocks(child, f"{prefix}{name}.")


def _overlapping(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The ids of the tensors that share bytes of memory with another one."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        strided = tensor.layout == torch.strided and not tensor.is_nested
        if isinstance(tensor, HostWeight) or not strided or not tensor.numel():
            continue
        begin = int(tensor.storage_offset()) * tensor.element_size()
        reach: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        storage = tensor.untyped_storage()._cdata
        spans.setdefault(storage, []).append((begin, begin + int(reach) * tensor.element_size(), id(tensor)))
    overlapping: set[int] = set()
    for of_one in spans.values():
        end, last = -1, 0
        for begin, stop, number in sorted(of_one):
            if begin < end:
                overlapping.update((last, number))
            if stop > end:
                end, last = stop, number
    return frozenset(overlapping)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor.  It imports nothing: if there is a DTensor, its module is already imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shards_of(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name of each local tensor that is a shard of a DTensor -> the shard of this rank.

    A shard is given by the coordinates of the rank in those mesh dimensions that split the tensor.
    """
    shards: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors_of(root):
        if is_distributed(tensor):
            whole: Any = tensor
            placed = zip(whole.device_mesh.get_coordinate() or (), whole.placements, strict=False)
            if part := tuple(place for place, placement in placed if not placement.is_replicate()):
                shards.update((path, part) for path, _ in leaves(tensor, name))
    return shards
