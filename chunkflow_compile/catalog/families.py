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
    text are random, drawn from ``generator`` unless it is None.  ``prepare``: what a model does only in its first call, and
    cannot be traced."""

    name: str
    class_name: str
    inputs: Callable[[Config, Shape, torch.Generator | None], dict[str, Any]]
    prepare: Callable[[Any], None] | None = None

    def build(self, config: Config) -> nn.Module:
        """A model with random weights, in evaluation mode."""
        model = build_model(self.class_name, **config)
        if self.prepare is not None:
            self.prepare(model)
        return model

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


def _sd3_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Latents in patches of two by two."""
    latent = (shape.batch, config["in_channels"], 2 * shape.height, 2 * shape.width)
    text = (shape.batch, shape.text, config["joint_attention_dim"])
    return {
        "hidden_states": torch.randn(latent, generator=generator),
        "encoder_hidden_states": torch.randn(text, generator=generator),
        "pooled_projections": torch.randn(shape.batch, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.full((shape.batch,), 500.0),
        "return_dict": False,
    }


def _flux2_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """With coordinates of four axes; guidance is an input only of a model that embeds it."""
    batch, tokens, text = shape.batch, shape.height * shape.width, shape.text
    one = torch.arange(1)
    axes = (one, torch.arange(shape.height), torch.arange(shape.width), one), (one, one, one, torch.arange(text))
    img_ids, txt_ids = (torch.cartesian_prod(*four).expand(batch, -1, -1) for four in axes)
    return {
        "hidden_states": torch.randn(batch, tokens, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, config["joint_attention_dim"], generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": img_ids,
        "txt_ids": txt_ids,
        "guidance": torch.full((batch,), 4.0) if config["guidance_embeds"] else None,
        "return_dict": False,
    }


def _z_image_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """A list of latents in patches of two by two, and one of texts.  Both in the default dtype: they are no tensors."""
    latent = (config["in_channels"], 1, 2 * shape.height, 2 * shape.width)
    text = (shape.text, config["cap_feat_dim"])
    return {
        "x": [torch.randn(latent, generator=generator) for _ in range(shape.batch)],
        "t": torch.full((shape.batch,), 0.5),
        "cap_feats": [torch.randn(text, generator=generator) for _ in range(shape.batch)],
        "return_dict": False,
    }


def _z_image_tables(model: Any) -> None:
    """The tables of its rotary embedding, which it makes under a device of its own, as Dynamo does not support."""
    rope, device = model.rope_embedder, next(model.parameters()).device
    tables = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)
    rope.freqs_cis = [table.to(device) for table in tables]


def _ltx_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """At 25 frames a second."""
    tokens = shape.frames * shape.height * shape.width
    text = (shape.batch, shape.text, config["caption_channels"])
    return {
        "hidden_states": torch.randn(shape.batch, tokens, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(text, generator=generator),
        "timestep": torch.full((shape.batch,), 500.0),
        "encoder_attention_mask": torch.ones(shape.batch, shape.text, dtype=torch.bool),
        "num_frames": shape.frames,
        "height": shape.height,
        "width": shape.width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
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
        Family("sd3", "SD3Transformer2DModel", _sd3_inputs),
        Family("flux2", "Flux2Transformer2DModel", _flux2_inputs),
        Family("z-image", "ZImageTransformer2DModel", _z_image_inputs, _z_image_tables),
        Family("ltx", "LTXVideoTransformer3DModel", _ltx_inputs),
    )
}
