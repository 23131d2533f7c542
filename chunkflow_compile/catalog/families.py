"""Families: the diffusers classes, and how each is configured and called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .sizes import Config, Shape, build_model


@dataclass(frozen=True)
class Family:
    """A diffusers class.  ``inputs(config, shape, generator)``: keyword arguments of one denoising step; latents and
    text are random, drawn from ``generator`` unless it is None."""

    name: str
    class_name: str
    inputs: Callable[[Config, Shape, torch.Generator | None], dict[str, Any]]

    def build(self, config: Config) -> nn.Module:
        """A model with random weights, in evaluation mode."""
        return build_model(self.class_name, **config)

    def model_and_inputs(self, config: Config, shape: Shape, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
        """A model, and the inputs of one step, those in floating point in ``dtype``."""
        model, inputs = self.build(config), self.inputs(config, shape, None)
        tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        return model, {**inputs, **{k: v.to(dtype) for k, v in tensors.items()}}


def _wan_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    latent = (shape.batch, config["in_channels"], shape.frames, shape.height, shape.width)
    # A pipeline with expand_timesteps (Wan2.2 5B) passes [batch, tokens], any other Wan pipeline [batch].
    tokens = [math.prod(latent[2:]) // math.prod(config["patch_size"])] if shape.timestep == "token" else []
    return {
        "hidden_states": torch.randn(latent, generator=generator),
        "timestep": torch.full((shape.batch, *tokens), 500.0),
        "encoder_hidden_states": torch.randn(shape.batch, shape.text, config["text_dim"], generator=generator),
        "return_dict": False,
    }


def _wan_image_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """With the tokens of the first frame: 257 of CLIP's ViT-H/14."""
    image = torch.randn(shape.batch, 257, config["image_dim"], generator=generator)
    return {**_wan_inputs(config, shape, generator), "encoder_hidden_states_image": image}


def _flux_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    tokens, batch = shape.height * shape.width, shape.batch
    rows, columns = torch.meshgrid(torch.arange(shape.height), torch.arange(shape.width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(tokens, 3).float()
    return {
        "hidden_states": torch.randn(batch, tokens, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, shape.text, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(shape.text, 3),
        "guidance": torch.full((batch,), 3.5),
        "return_dict": False,
    }


def _hunyuan_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    latent = (shape.batch, config["in_channels"], shape.frames, shape.height, shape.width)
    return {
        "hidden_states": torch.randn(latent, generator=generator),
        "timestep": torch.full((shape.batch,), 500.0),
        "encoder_hidden_states": torch.randn(shape.batch, shape.text, config["text_embed_dim"], generator=generator),
        "encoder_attention_mask": torch.ones(shape.batch, shape.text, dtype=torch.long),
        "pooled_projections": torch.randn(shape.batch, config["pooled_projection_dim"], generator=generator),
        "guidance": torch.full((shape.batch,), 6000.0),
        "return_dict": False,
    }


def _qwen_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    batch, tokens, text = shape.batch, shape.height * shape.width, config["joint_attention_dim"]
    return {
        "hidden_states": torch.randn(batch, tokens, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, shape.text, text, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, shape.height, shape.width)]] * batch,
        "return_dict": False,
    }


FAMILIES: Mapping[str, Family] = {
    f.name: f
    for f in (
        Family("wan", "WanTransformer3DModel", _wan_inputs),
        Family("wan-i2v", "WanTransformer3DModel", _wan_image_inputs),
        Family("flux", "FluxTransformer2DModel", _flux_inputs),
        Family("hunyuanvideo", "HunyuanVideoTransformer3DModel", _hunyuan_inputs),
        Family("qwen-image", "QwenImageTransformer2DModel", _qwen_inputs),
    )
}
