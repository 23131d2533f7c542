"""The names and the blocks of a model's weights, and which of them have memory in common."""

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

    ``root``: the module that was compiled, or else the smallest that holds all parameters; of a block in a ``ModuleList``,
    the model around it; None if no module holds them.
    ``names``: id of a parameter, of a buffer, or of a tensor inside one -> its names.  ``shared``: ids of those that have
    memory in common with another.  ``blocks``: key of ``nn_module_stack`` (the module's id) -> name of a block.  A block is
    an element of an outermost ``ModuleList``, see :func:`elements`.  ``maybe_block``: whether no module around ``root`` was
    seen, but ``gc.freeze()`` may have hidden one.  ``filled``: ids of the keys of :func:`filled_by`.
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
    """The buffers that a module of the model fills before programs read them, by id -> the module.

    Its class names them in ``chunkflow_filled``, and ``fill()`` fills them.  They stream whatever their size, and each rank
    has its own.
    """
    return {id(m._buffers[name]): m for m in root.modules() for name in getattr(type(m), "chunkflow_filled", ())}


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward, unlike a list of modules."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def elements(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each element of a list.  One that nothing calls, such as a list in a list, stands for its own."""
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
    """The ids of the tensors that have bytes of memory in common with another one."""
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
    """Whether a tensor is a DTensor.  Imports nothing: where there is one, its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shards_of(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Which part of its DTensor this rank has, for each tensor with bytes that is a part, by name.

    A part is the rank's coordinates in those dimensions of the mesh that split the tensor.
    """
    shards: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors_of(root):
        if is_distributed(tensor):
            whole: Any = tensor
            placed = zip(whole.device_mesh.get_coordinate() or (), whole.placements, strict=False)
            if part := tuple(place for place, placement in placed if not placement.is_replicate()):
                shards.update((path, part) for path, _ in leaves(tensor, name))
    return shards
