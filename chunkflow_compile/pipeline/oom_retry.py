"""Calls that ran out of memory: whether one may run again, and on which random numbers."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from chunkflow_compile.frontend.block_kinds import caching_hook

Given = TypeVar("Given")


class RngSnapshot:
    """The states of the random generators that a call may draw from: torch's own, and those among its arguments."""

    def __init__(self, device: torch.device, call: functools.partial[Any]) -> None:
        self._device = device
        self._own = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._given = [(g, g.get_state()) for g in given_to(call, torch.Generator)]

    def rewind(self) -> None:
        """Draw the same numbers again."""
        torch.set_rng_state(self._own)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
        for generator, state in self._given:
            generator.set_state(state)


def given_to(call: functools.partial[Any], kind: type[Given]) -> list[Given]:
    """The arguments of a call that are of a class, those in lists and dicts included."""
    return [value for value in tree_leaves((call.args, call.keywords)) if isinstance(value, kind)]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or a cause of it, is that the device has no memory left."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return True
        seen = seen.__cause__
    return False


def runs_once(root: nn.Module, call: functools.partial[Any]) -> bool:
    """Whether a call must not run again: it changes more than it returns, such as a step cache, or other ranks take part."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return True
    given = (*call.args, *call.keywords.values())
    return any(caching_hook(m) is not None for m in root.modules()) or any(
        type(value).__name__.endswith("Cache") for value in given
    )
