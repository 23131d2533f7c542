"""The index of a model: the names of its weights, its blocks, and the weights that share memory."""

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
    """The names of a model's weights, the model's blocks, and the weights that share memory.

    ``root``: the compiled module.  If the compiled module is not known, ``root`` is the smallest module that contains all
    parameters, or None if no module contains all of them.  If the compiled module is a block in a ``ModuleList``, ``root`` is
    the model that contains this block.
    ``names``: id of a tensor -> the names of this tensor.  The tensors are parameters, buffers, and the inner tensors of
    tensor subclasses.  ``shared``: the ids of the tensors that share memory with another tensor.
    ``blocks``: key of a block in ``nn_module_stack`` (the id of the module) -> name of the block.  A block is an element of
    an outermost ``ModuleList`` (see :func:`elements`).
    ``maybe_block``: whether ``gc.freeze()`` may have hidden a larger module that contains ``root``.  ``filled``: the ids of
    the buffers that a module fills before programs read them (see :func:`filled_by`).
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
        """Return whether all of ``parameters`` belong to the model."""
        return all(id(p) in self.names for p in parameters)


def filled_by(root: nn.Module) -> dict[int, Any]:
    """Return a mapping from the id of a buffer to the module that fills this buffer before programs read it.

    The class of such a module lists the names of the buffers in ``chunkflow_filled``, and its method ``fill()`` writes the
    values of the buffers.  Filled buffers are streamed even if they are small, and ranks do not share them.
    """
    return {id(m._buffers[name]): m for m in root.modules() for name in getattr(type(m), "chunkflow_filled", ())}


def is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward method.  A ``ModuleList``, for example, does not have one."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def elements(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module for each element of a list of modules.  If an element has no forward method, such as a
    nested list, yield the elements inside it instead."""
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
    """Return the ids of the tensors that share bytes of memory with another tensor in ``tensors``."""
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
    """Return whether a tensor is a DTensor.  This function imports nothing, because the module of DTensor is already imported
    if a DTensor exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shards_of(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return which shards of DTensors this rank stores.

    The result is a mapping from the name of each local tensor to the coordinates of this rank in the device mesh.  Dimensions
    of the mesh over which the DTensor is replicated are left out.
    """
    shards: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors_of(root):
        if is_distributed(tensor):
            whole: Any = tensor
            placed = zip(whole.device_mesh.get_coordinate() or (), whole.placements, strict=False)
            if part := tuple(place for place, placement in placed if not placement.is_replicate()):
                shards.update((path, part) for path, _ in leaves(tensor, name))
    return shards
