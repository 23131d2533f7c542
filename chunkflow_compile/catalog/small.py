"""Small random models of each family, for the demo, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .families import FAMILIES
from .sizes import Config, Size

TEXT_WIDTH = 32


def _blocks(size: Size, **own: Any) -> Config:
    """Return the fields that all classes share, and the class-specific fields ``own``."""
    sizes = {"num_layers": size.layers, "num_attention_heads": size.heads, "attention_head_dim": size.head_dim}
    return {**sizes, **own}


def _wan_config(size: Size) -> Config:
    return _blocks(
        size,
        patch_size=(1, 2, 2),
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=4 * size.heads * size.head_dim,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )


def _flux_config(size: Size) -> Config:
    return _blocks(
        size,
        in_channels=16,
        num_single_layers=size.singles,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=size.rope,
    )


def _hunyuan_config(size: Size) -> Config:
    return _blocks(
        size,
        in_channels=4,
        out_channels=4,
        num_single_layers=size.singles,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        rope_axes_dim=size.rope,
    )


def _qwen_config(size: Size) -> Config:
    rope = {"axes_dims_rope": size.rope}
    return _blocks(size, in_channels=16, out_channels=4, joint_attention_dim=TEXT_WIDTH, **rope)


SMALL_MODELS: Mapping[str, Callable[[Size], Config]] = {
    "wan": _wan_config,
    "flux": _flux_config,
    "hunyuanvideo": _hunyuan_config,
    "qwen-image": _qwen_config,
}


def small_model(name: str, size: Size, seed: int = 0) -> nn.Module:
    """Build a random model in evaluation mode; the same seed gives the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FAMILIES[name].build(SMALL_MODELS[name](size))


def small_inputs(name: str, size: Size, seed: int) -> dict[str, Any]:
    """Return random inputs for one denoising step of ``small_model(name, size)``; the timestep depends on the seed, too."""
    inputs = FAMILIES[name].inputs(SMALL_MODELS[name](size), size, torch.Generator().manual_seed(seed))
    return {**inputs, "timestep": inputs["timestep"] / (1 + seed % 50)}
