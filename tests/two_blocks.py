"""Models of two blocks as ``file.py:function``, for the command line."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from helpers import Stack, UlyssesStack
from torch import nn

# Of the model whose scales depend on a timestep.
WIDTH = 32


def ulysses() -> tuple[nn.Module, dict[str, Any]]:
    """Four all-to-alls in each block, and 4 tokens on each rank."""
    return UlyssesStack(), {"x": torch.randn(4, 32)}


def block() -> tuple[nn.Module, dict[str, Any]]:
    """One of them."""
    return UlyssesStack(1), {"x": torch.randn(4, 32)}


def split() -> tuple[nn.Module, dict[str, Any]]:
    """The same for 4096 tokens, which the ranks divide."""
    return UlyssesStack(), {"x": torch.randn(4096 // dist.get_world_size(), 32)}


def wide() -> tuple[nn.Module, dict[str, Any]]:
    """The same with large weights, and 64 tokens."""
    return UlyssesStack(width=512), {"x": torch.randn(64 // dist.get_world_size(), 512)}


def stack() -> tuple[nn.Module, dict[str, Any]]:
    """No collectives."""
    return Stack(), {"x": torch.randn(4, 8)}


class Backwards(Stack):
    """Its last block comes first in the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def backwards() -> tuple[nn.Module, dict[str, Any]]:
    return Backwards(6), {"x": torch.randn(4, 8)}


class Timed(nn.Module):
    """Two blocks whose scales are computed from a timestep, as AdaLN does.

    ``noise``: draws values that the timestep scales.  ``shared``: the second block's modulation also multiplies the latent.
    """

    def __init__(self, noise: bool = False, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH)
        self.modulations = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.square = nn.Linear(WIDTH, WIDTH)
        self.noise, self.shared = noise, shared

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        temb = nn.functional.silu(self.embed(t))
        if self.noise:
            temb = temb + torch.randn_like(temb)
        for modulation, projection in zip(self.modulations, self.projections, strict=True):
            scale, shift = modulation(temb).chunk(2, dim=-1)
            x = projection(x * (1 + scale) + shift)
        if self.shared:
            x = self.square(x) + self.square(nn.functional.silu(self.square(temb)))
        return x


def timed() -> tuple[nn.Module, dict[str, Any]]:
    return Timed().eval().requires_grad_(False), {"x": torch.randn(64, WIDTH), "t": torch.randn(1, 8)}


class LongNames(nn.Module):
    """Names as long as those of FLUX, and a weight that every block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation_of_all_blocks = nn.Linear(64, 64, bias=False)
        self.single_transformer_blocks = nn.ModuleList(Modulated() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.single_transformer_blocks:
            x = x + block(x, self.modulation_of_all_blocks.weight)
        return x


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_output_projection = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.attention_output_projection(x) @ modulation)


def long_names() -> tuple[nn.Module, dict[str, Any]]:
    return LongNames(), {"x": torch.randn(4, 64)}


def packable() -> tuple[nn.Module, dict[str, Any]]:
    """Weights in bfloat16 that are large enough to be packed."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Stack(4, 256), {"x": torch.randn(64, 8)}
    finally:
        torch.set_default_dtype(torch.float32)


def untraceable() -> tuple[nn.Module, dict[str, Any]]:
    """A model whose forward depends on values."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x) if x.sum() > 0 else x

    return Branch(), {"x": torch.randn(4, 8)}
