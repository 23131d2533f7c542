"""Access to the hooks that diffusers attaches to a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def hook_registry(module: nn.Module) -> Any:
    """Return the registry of diffusers' hooks on a module, or None."""
    return module.__dict__.get("_diffusers_hook")


def hooks_of(module: nn.Module) -> Mapping[str, Any]:
    """Return diffusers' hooks on a module, by name."""
    hooks: Mapping[str, Any] = getattr(hook_registry(module), "hooks", {})
    return hooks
