"""Outputs of a region that lie in a slot: they are copied, because the slot's next weight would overwrite them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def owning(region: Callable[..., Sequence[Any]], slots: Mapping[str, torch.Tensor]) -> Callable[..., Sequence[Any]]:
    """Wrap a region so that its outputs own their memory: those that lie in ``slots`` are cloned.

    Inductor returns an input as an output if the op does not change it (w * 1).  The first step finds out which outputs
    those are.
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
