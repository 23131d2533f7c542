"""What modules say about themselves: hooks, blocks, and buffers that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


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
