"""The hooks of diffusers on a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def hook_registry(module: nn.Module) -> Any:
    """The registry of diffusers' hooks on a module, None if it has none."""
    return module.__dict__.get("_diffusers_hook")


def hooks_of(module: nn.Module) -> Mapping[str, Any]:
    """The hooks of diffusers on a module, by name."""
    hooks: Mapping[str, Any] = getattr(hook_registry(module), "hooks", {})
    return hooks
