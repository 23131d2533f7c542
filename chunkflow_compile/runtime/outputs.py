"""Outputs of a region that lie in a slot: they would outlive their weight there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def owning(region: Callable[..., Sequence[Any]], slots: Mapping[str, torch.Tensor]) -> Callable[..., Sequence[Any]]:
    """The region with outputs that own their memory: those that lie among ``slots`` are copied.

    Inductor hands out an input where an op does nothing to it (w * 1).  Which outputs those are is found in the first
    step.
    """
    slot = next(iter(slots.values()), None)
    if slot is None:
        return region
    arena = slot.untyped_storage()._cdata
    found: list[frozenset[int]] = []

    def call(*args: Any) -> Sequence[Any]:
        outputs = region(*args)
        if not found:
            found.append(frozenset(i for i, o in enumerate(outputs) if _lies_in(o, arena)))
        if found[0]:
            return [o.clone() if i in found[0] else o for i, o in enumerate(outputs)]
        return outputs

    return call


def _lies_in(value: object, storage: int) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage
