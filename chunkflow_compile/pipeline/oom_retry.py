"""Decides whether a call that ran out of memory may be retried, and resets the random number generators for the retry."""

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
    """The states of the random number generators that a call may use: the global generators in torch, and all generators
    among the arguments of the call."""

    def __init__(self, device: torch.device, call: functools.partial[Any]) -> None:
        self._device = device
        self._own = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._given = [(g, g.get_state()) for g in given_to(call, torch.Generator)]

    def rewind(self) -> None:
        """Reset the generators to these states, so that a retry of the call draws the same numbers."""
        torch.set_rng_state(self._own)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)
        for generator, state in self._given:
            generator.set_state(state)


def given_to(call: functools.partial[Any], kind: type[Given]) -> list[Given]:
    """Return the instances of ``kind`` among the arguments of a call, including instances inside lists and dicts."""
    return [value for value in tree_leaves((call.args, call.keywords)) if isinstance(value, kind)]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is an out-of-memory error of the device."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return True
        seen = seen.__cause__
    return False


def runs_once(root: nn.Module, call: functools.partial[Any]) -> bool:
    """Whether a call must not be retried.

    A call must not be retried if it has side effects, for example on a step cache, or if there are other ranks, because the
    other ranks would not retry the call.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return True
    given = (*call.args, *call.keywords.values())
    return any(caching_hook(m) is not None for m in root.modules()) or any(
        type(value).__name__.endswith("Cache") for value in given
    )
