"""Finds out which weights can be compressed, before regions that decompress weights are lowered."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.packed import Packed


def compressible(cut: Cut, weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of the weights that the regions of ``cut`` decompress and that can be compressed without loss.

    This function compresses weights that are already in a host store.  It only checks all other weights; they are compressed
    when they are moved into the host store.
    ``weights``: the weights by their names in ``cut``.
    """
    with unset_fake_temporarily(), torch.no_grad():
        return frozenset(name for name in cut.packed if _compresses(weights[name]))


def _compresses(weight: torch.Tensor) -> bool:
    if (buffer := buffer_of(weight)) is not None:
        return buffer.pack()
    if isinstance(weight, FakeTensor) or weight.is_meta:
        return True
    values = weight.values_on_host if isinstance(weight, HostWeight) else weight.detach().to("cpu")
    return Packed.of(values) is not None
