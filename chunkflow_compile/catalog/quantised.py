"""Quantised variants of a model for planning.  The linear layers of the blocks are replaced by layers with the bytes and
ops of a quantiser.

The new layers have the layouts of weight-only quantisation in torchao (int8, fp8) and bitsandbytes (nf4).  Their forward
dequantises the weight and multiplies in the dtype of the input.  So quantised weights are copied, and the FLOPs are the
same as without quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError

from .sizes import Quantisation

# The number of elements that share a scale in nf4, as by default in bitsandbytes.
_NF4_GROUP = 64


class _ScaledRows(nn.Module):
    """A linear layer whose weight has one byte per element and one scale per output.  ``dtype``: the dtype of the
    elements."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        shape, scales = linear.weight.shape, linear.weight.new_ones(linear.out_features, 1)
        self.weight = nn.Parameter(linear.weight.new_zeros(shape).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class _Nf4(nn.Module):
    """A linear layer whose weight has two elements per byte, a table of 16 values, and one float32 scale per 64
    elements."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape, count = linear.weight.shape, linear.weight.numel()
        self.weight = nn.Parameter(linear.weight.new_zeros(count // 2, 1).to(torch.uint8), requires_grad=False)
        scales = linear.weight.new_ones(-(-count // _NF4_GROUP), dtype=torch.float32)
        self.absmax = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("code", linear.weight.new_zeros(16))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.cat([self.weight >> 4, self.weight & 15], dim=1)
        code: torch.Tensor = self.code  # type: ignore[assignment]
        groups = code[pairs.int()].reshape(-1, _NF4_GROUP) * self.absmax.to(code.dtype)[:, None]
        return nn.functional.linear(x, groups.reshape(self.shape).to(x.dtype), self.bias)


_LAYERS: Mapping[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": partial(_ScaledRows, dtype=torch.int8),
    "fp8": partial(_ScaledRows, dtype=torch.float8_e4m3fn),
    "nf4": _Nf4,
}


def quantised(model: nn.Module, kind: Quantisation) -> nn.Module:
    """Replace the linear layers in the blocks of ``model``; return ``model``.

    ``kind``: the name of the quantisation.  Raises ChunkflowError if it is unknown, or if the elements of a weight cannot
    be divided into nf4 groups.
    """
    if kind not in _LAYERS:
        raise ChunkflowError(f"There is no quantisation {kind!r}: use one of {', '.join(_LAYERS)}.")
    for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for name, module in [*blocks.named_modules()]:
            if type(module) is nn.Linear:
                if kind == "nf4" and module.weight.numel() % _NF4_GROUP:
                    raise ChunkflowError(f"{name}: {module.weight.numel()} elements are no multiple of {_NF4_GROUP}.")
                parent, _, leaf = name.rpartition(".")
                setattr(blocks.get_submodule(parent), leaf, _LAYERS[kind](module))
    return model
