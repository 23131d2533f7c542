"""Small random models of the diffusers classes that ChunkFlow is for: demo, tests and benchmarks run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    """``layers``: blocks of the first kind; ``singles``: of the second, where the class has two.  Width is
    ``heads * head_dim``.  ``frames``, ``height`` and ``width`` are latent sizes; ``text``: text tokens."""

    layers: int = 2
    singles: int = 2
    heads: int = 4
    head_dim: int = 16
    frames: int = 2
    height: int = 8
    width: int = 8
    text: int = 8


@dataclass(frozen=True)
class SmallModel:
    """A class of diffusers in a random small configuration.

    ``build(size)`` makes the module, ``inputs(size, seed)`` keyword arguments for one denoising step of it.
    """

    name: str
    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size, int], dict[str, Any]]


def _randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def _timestep(seed: int) -> float:
    return 1000.0 / (1 + seed % 50)


def _wan(size: Size) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=4 * size.heads * size.head_dim,
        num_layers=size.layers,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )


def _wan_inputs(size: Size, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": _randn(g, 1, 4, size.frames, size.height, size.width),
        "timestep": torch.tensor([_timestep(seed)]),
        "encoder_hidden_states": _randn(g, 1, size.text, 32),
        "return_dict": False,
    }


def _flux(size: Size) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    half = size.head_dim // 4 // 2 * 2
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=size.layers,
        num_single_layers=size.singles,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(size.head_dim - 2 * half, half, half),
    )


def _flux_inputs(size: Size, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    tokens = size.height * size.width
    rows, columns = torch.meshgrid(torch.arange(size.height), torch.arange(size.width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(tokens, 3).float()
    return {
        "hidden_states": _randn(g, 1, tokens, 16),
        "encoder_hidden_states": _randn(g, 1, size.text, 32),
        "pooled_projections": _randn(g, 1, 32),
        "timestep": torch.tensor([_timestep(seed) / 1000]),
        "img_ids": ids,
        "txt_ids": torch.zeros(size.text, 3),
        "guidance": torch.tensor([3.5]),
        "return_dict": False,
    }


def _hunyuan(size: Size) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    half = size.head_dim // 4 // 2 * 2
    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        num_layers=size.layers,
        num_single_layers=size.singles,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(size.head_dim - 2 * half, half, half),
    )


def _hunyuan_inputs(size: Size, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": _randn(g, 1, 4, size.frames, size.height, size.width),
        "timestep": torch.tensor([_timestep(seed)]),
        "encoder_hidden_states": _randn(g, 1, size.text, 32),
        "encoder_attention_mask": torch.ones(1, size.text, dtype=torch.long),
        "pooled_projections": _randn(g, 1, 32),
        "guidance": torch.tensor([6000.0]),
        "return_dict": False,
    }


def _qwen(size: Size) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    half = size.head_dim // 4 // 2 * 2
    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=size.layers,
        attention_head_dim=size.head_dim,
        num_attention_heads=size.heads,
        joint_attention_dim=32,
        axes_dims_rope=(size.head_dim - 2 * half, half, half),
    )


def _qwen_inputs(size: Size, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": _randn(g, 1, size.height * size.width, 16),
        "encoder_hidden_states": _randn(g, 1, size.text, 32),
        "timestep": torch.tensor([_timestep(seed) / 1000]),
        "img_shapes": [[(1, size.height, size.width)]],
        "return_dict": False,
    }


SMALL_MODELS: Mapping[str, SmallModel] = {
    m.name: m
    for m in (
        SmallModel("wan", _wan, _wan_inputs),
        SmallModel("flux", _flux, _flux_inputs),
        SmallModel("hunyuanvideo", _hunyuan, _hunyuan_inputs),
        SmallModel("qwen-image", _qwen, _qwen_inputs),
    )
}


def small_model(name: str, size: Size, seed: int = 0) -> nn.Module:
    """A random model in evaluation mode; the same seed gives the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SMALL_MODELS[name].build(size).eval()
