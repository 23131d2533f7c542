"""Families: the diffusers classes, and how to configure and call each class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from .sizes import Config, Shape, build_model


@dataclass(frozen=True)
class Family:
    """A diffusers class.

    ``inputs(config, shape, generator)``: a function that returns the keyword arguments of one denoising step.  Latents
    and text are random; ``generator`` draws them unless it is None.  ``prepare``: a function that modifies a model so
    that its call can be traced, or None.
    """

    name: str
    class_name: str
    inputs: Callable[[Config, Shape, torch.Generator | None], dict[str, Any]]
    prepare: Callable[[Any], None] | None = None

    def build(self, config: Config) -> nn.Module:
        """Build a model with random weights, in evaluation mode."""
        model = build_model(self.class_name, **config)
        if self.prepare is not None:
            self.prepare(model)
        return model

    def model_and_inputs(self, config: Config, shape: Shape, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
        """Build a model and the inputs of one step.  ``dtype``: the dtype of floating-point inputs."""
        model, inputs = self.build(config), self.inputs(config, shape, None)
        tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        return model, {**inputs, **{k: v.to(dtype) for k, v in tensors.items()}}


def _wan_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    latent = (shape.batch, config["in_channels"], shape.frames, shape.height, shape.width)
    # the timestep has the shape [batch, tokens] in a pipeline with expand_timesteps (Wan2.2 5B), and [batch] in other Wan
    # pipelines
    tokens = [math.prod(latent[2:]) // math.prod(config["patch_size"])] if shape.timestep == "token" else []
    return {
        "hidden_states": torch.randn(latent, generator=generator),
        "timestep": torch.full((shape.batch, *tokens), 500.0),
        "encoder_hidden_states": torch.randn(shape.batch, shape.text, config["text_dim"], generator=generator),
        "return_dict": False,
    }


def _wan_image_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Add the image tokens of the first frame: 257 from CLIP's ViT-H/14."""
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
    """Return inputs for SD3.  The latents are not packed, because the model divides them into patches of two by two."""
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
    """Return inputs for FLUX.2.  Coordinates have four axes.  Guidance is an input only if the model embeds it."""
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
    """Return inputs for Z-Image: a list of latents, which the model divides into patches of two by two, and a list of
    texts.  Inputs in lists keep the default dtype."""
    latent = (config["in_channels"], 1, 2 * shape.height, 2 * shape.width)
    text = (shape.text, config["cap_feat_dim"])
    return {
        "x": [torch.randn(latent, generator=generator) for _ in range(shape.batch)],
        "t": torch.full((shape.batch,), 0.5),
        "cap_feats": [torch.randn(text, generator=generator) for _ in range(shape.batch)],
        "return_dict": False,
    }


def _z_image_tables(model: Any) -> None:
    """Compute the tables of the rotary embedding in advance, because the model computes them in a device context, which
    Dynamo does not support."""
    rope, device = model.rope_embedder, next(model.parameters()).device
    tables = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)
    rope.freqs_cis = [table.to(device) for table in tables]


def _ltx_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Return inputs for LTX-Video, for video at 25 frames per second."""
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


def _hunyuan15_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Return inputs for HunyuanVideo-1.5.  There is no image, so its 729 tokens are zeros.  The prompt contains no quoted
    text to render, which ByT5 would encode in 256 tokens."""
    latent = (shape.batch, config["in_channels"], shape.frames, shape.height, shape.width)
    text = (shape.batch, shape.text, config["text_embed_dim"])
    return {
        "hidden_states": torch.randn(latent, generator=generator),
        "timestep": torch.full((shape.batch,), 500.0),
        "encoder_hidden_states": torch.randn(text, generator=generator),
        "encoder_attention_mask": torch.ones(shape.batch, shape.text),
        "encoder_hidden_states_2": torch.zeros(shape.batch, 256, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": torch.zeros(shape.batch, 256),
        "image_embeds": torch.zeros(shape.batch, 729, config["image_embed_dim"]),
        "return_dict": False,
    }


def _without_branches(model: Any) -> None:
    """Replace the forward of a HunyuanVideo-1.5 model by a function that can be traced.

    The original forward depends on whether there is an image, and moves a number of tokens that depends on a mask.
    """
    model.forward = MethodType(_hunyuan15_forward, model)


def _hunyuan15_forward(
    self: Any,
    hidden_states: torch.Tensor,
    timestep: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_attention_mask: torch.Tensor,
    encoder_hidden_states_2: torch.Tensor,
    encoder_attention_mask_2: torch.Tensor,
    image_embeds: torch.Tensor,
    return_dict: bool = False,
) -> tuple[torch.Tensor]:
    """Compute the same outputs as the forward of the class, bit for bit, for latents in patches of one element.

    Unlike the original, this function does not set masked tokens to zero, because nothing reads them.
    """
    latent = hidden_states.shape[2:]
    rotary, temb = self.rope(hidden_states), self.time_embed(timestep)
    hidden_states = self.x_embedder(hidden_states)
    parts = (
        self.image_embedder(image_embeds),
        self.context_embedder_2(encoder_hidden_states_2),
        self.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask),
    )
    kinds = [torch.full_like(part[..., 0], kind, dtype=torch.long) for part, kind in zip(parts, (2, 1, 0), strict=True)]
    context = torch.cat([part + self.cond_type_embed(kind) for part, kind in zip(parts, kinds, strict=True)], dim=1)
    has_image = (image_embeds != 0).any().expand(kinds[0].shape)
    mask = torch.cat([has_image, encoder_attention_mask_2.bool(), encoder_attention_mask.bool()], dim=1)
    order = torch.argsort(mask.logical_not(), dim=1, stable=True)  # move padding to the end
    context, mask = context.gather(1, order[..., None].expand_as(context)), mask.gather(1, order)
    for block in self.transformer_blocks:
        hidden_states, context = block(hidden_states, context, temb, mask, rotary)
    found = self.proj_out(self.norm_out(hidden_states, temb))
    return (found.unflatten(1, latent).permute(0, 4, 1, 2, 3),)


def _longcat_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Return inputs for LongCat-Image: the inputs of FLUX without pooled text and guidance."""
    inputs = _flux_inputs(config, shape, generator)
    return {name: value for name, value in inputs.items() if name not in ("pooled_projections", "guidance")}


def _minimax_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Return inputs for MiniMax-H3: a sequence of text, stereo audio with 40 latents per second, and patches of video at
    24 frames per second.  Text and video share a timestep, and audio has its own."""
    frames = (shape.frames - 2) // 5 * 17 + 5  # the number of frames in the output
    sizes = shape.text, 2 * round(40 * frames / 24), shape.frames * shape.height * shape.width
    text, audio, video = torch.arange(sum(sizes)).split(sizes)
    tags = torch.cat([torch.full_like(text, 1), torch.full_like(audio, 2), torch.zeros_like(video)])
    before = torch.cartesian_prod(torch.arange(sizes[0] + sizes[1]), torch.arange(1), torch.arange(1))
    grid = torch.cartesian_prod(*map(torch.arange, (shape.frames, shape.height, shape.width)))
    patch = config["in_channels"] * math.prod(config["patch_size"])
    return {
        "hidden_states": torch.randn(shape.batch, sizes[2], patch, generator=generator),
        "audio_hidden_states": torch.randn(shape.batch, sizes[1], config["audio_in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(shape.batch, sizes[0], config["text_dim"], generator=generator),
        "timestep": torch.tensor([0.5, 0.75]),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": torch.cat([before, grid]).double(),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
        "return_dict": False,
    }


def _ltx2_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """Return inputs for LTX-2, for video at 24 frames per second and audio with 25 latents per second.  No text is
    masked, because the connectors in the pipeline replace padding."""
    batch, tokens = shape.batch, shape.frames * shape.height * shape.width
    audio = round(25 * (8 * (shape.frames - 1) + 1) / 24)
    text, mask = (batch, shape.text, config["caption_channels"]), torch.ones(batch, shape.text, dtype=torch.long)
    timestep = torch.full((batch,), 500.0)
    grid = torch.cartesian_prod(*map(torch.arange, (shape.frames, shape.height, shape.width))).T
    video_coords = torch.stack([grid, grid + 1], dim=-1) * torch.tensor([8, 32, 32])[:, None, None]
    audio_coords = torch.stack([torch.arange(audio), torch.arange(audio) + 1], dim=-1) / 25
    return {
        "hidden_states": torch.randn(batch, tokens, config["in_channels"], generator=generator),
        "audio_hidden_states": torch.randn(batch, audio, config["audio_in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(text, generator=generator),
        "audio_encoder_hidden_states": torch.randn(text, generator=generator),
        "timestep": timestep,
        "sigma": timestep,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": shape.frames,
        "height": shape.height,
        "width": shape.width,
        "fps": 24.0,
        "audio_num_frames": audio,
        "video_coords": video_coords.float().expand(batch, -1, -1, -1),
        "audio_coords": audio_coords.expand(batch, 1, -1, -1),
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
        Family("hunyuanvideo-1.5", "HunyuanVideo15Transformer3DModel", _hunyuan15_inputs, _without_branches),
        Family("longcat-image", "LongCatImageTransformer2DModel", _longcat_inputs),
        Family("minimax-h3", "MiniMaxH3Transformer3DModel", _minimax_inputs),
        Family("ltx-2", "LTX2VideoTransformer3DModel", _ltx2_inputs),
    )
}
