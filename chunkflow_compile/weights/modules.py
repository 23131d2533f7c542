"""The names and the blocks of a model's weights, and what modules say about themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .leaves import named_leaves, overlapping


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
        found = [*named_leaves(root)]
        for name, tensor in found:
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
        shared, filled = overlapping(t for _, t in found), frozenset(filled_by(root))
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


def hook_registry(module: nn.Module) -> Any:
    """The registry of diffusers' hooks on a module, None if it has none."""
    return module.__dict__.get("_diffusers_hook")


def hooks_of(module: nn.Module) -> Mapping[str, Any]:
    """The hooks of diffusers on a module, by name."""
    found: Mapping[str, Any] = getattr(hook_registry(module), "hooks", {})
    return found


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
