"""Kernels: what Inductor fuses between products is one, an eager op is one; attention with a mask is slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from problems import MACHINE
from torch import nn

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.problem import RegionCost

pytestmark = pytest.mark.usefixtures("no_grad")
TOKENS, WIDTH = 64, 32
X = TOKENS * WIDTH * 4


class Gated(nn.Module):
    """A norm with an affine modulation, a product, an activation and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.up(torch.sin(x) * 2 + 1).view(1, TOKENS, WIDTH)).view(TOKENS, WIDTH)


def cost(model: nn.Module, fused: bool = True, **inputs: torch.Tensor) -> RegionCost:
    """Of the only region of a model."""
    (region,) = make_cut(replace(trace(model, inputs), fused=fused)).problem.regions
    return region.cost


def test_fused_ops_are_one_kernel_and_read_and_write_what_leaves_it() -> None:
    fused, eager = (cost(Gated(), fused, x=torch.randn(TOKENS, WIDTH)) for fused in (True, False))
    assert fused.kernels == 3  # before the product, the product, after it
    assert dict(fused.traffic) == {X: 2 * X + 3 * X}  # x and its image; the product, x and the sum
    assert eager.kernels == 6  # sin, mul, add, product, gelu, add
    assert dict(eager.traffic) == {X: 4 * 2 * X + 3 * X}
    assert fused.flops == eager.flops > 0 and fused.operands == eager.operands


class Attends(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask if self.masked else None)


def test_attention_with_a_mask_is_counted_apart() -> None:
    inputs = {"x": torch.randn(1, 2, TOKENS, WIDTH), "mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)}
    plain, masked = (cost(Attends(masked), **inputs) for masked in (False, True))
    assert plain.attention == masked.attention == masked.masked > 0 == plain.masked
    machine = replace(MACHINE, attention_flops={"fa2": 1e12}, attention="fa2", eta_masked=0.5)
    assert plain.attention_seconds(machine) == plain.attention / 1e12
    assert masked.attention_seconds(machine) == 2 * masked.attention / 1e12
