"""Whole pipelines at their published sizes, without weights: encoders, transformer and VAE, and the number of calls of
each.

Configurations are from the models' repositories (``text_encoder/config.json``, ``vae/config.json``).  Like in
``presets``, torch is imported only when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chunkflow_compile.passes.errors import ChunkflowError

from .presets import PRESETS, OutputSizes, Preset
from .sizes import Config, build_model

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A text encoder from transformers.  ``tokens``: the number of tokens per prompt.  ``calls``: the number of calls per
    generation."""

    name: str
    class_name: str
    config: Config
    tokens: int
    calls: int = 1

    def model_and_inputs(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the encoder and the arguments of a call."""
        import torch

        inputs = {"input_ids": torch.zeros(1, self.tokens, dtype=torch.long), "return_dict": False}
        return build_model(self.class_name, **self.config), inputs


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published pipeline.

    ``transformer``: the preset of the transformer.  ``experts``: the number of transformers with this preset; each is
    used in a part of the steps.  ``vae``: the class of the VAE.  ``channels``: the number of channels of the latents.
    ``scale``: the number of pixels per latent element in each direction.  ``tiled``: whether the VAE decodes in tiles, as
    in the example in the model's repository.  ``steps``: the number of denoising steps per generation, as in the model's
    repository.
    """

    transformer: Preset
    experts: int = 1
    encoders: tuple[Encoder, ...]
    vae: str
    vae_config: Config = field(default_factory=dict)
    tiled: bool = False
    channels: int
    scale: int
    steps: int

    @property
    def name(self) -> str:
        return self.transformer.name

    def vae_and_latents(self, sizes: OutputSizes) -> tuple[nn.Module, dict[str, Any]]:
        """Return the VAE and the arguments with which its ``decode`` generates an output of the given sizes."""
        import torch

        vae: Any = build_model(self.vae, **self.vae_config)
        if self.tiled:
            vae.enable_tiling()
        video = "3d" in type(getattr(vae, "decoder", vae)).__name__.lower()
        frames = (self.transformer.shape(sizes).frames,) if video else ()
        edges = sizes.height // self.scale, sizes.width // self.scale
        return vae, {"z": torch.randn(sizes.batch, self.channels, *frames, *edges)}


def published(name: str) -> Published:
    """Return the pipeline called ``name``.  Raises ChunkflowError if there is none."""
    if name not in PUBLISHED:
        raise ChunkflowError(f"There is no pipeline {name!r}: use one of {', '.join(PUBLISHED)}.")
    return PUBLISHED[name]


_CLIP_L: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
_T5_XXL: Config = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
}
_LLAMA_8B: Config = {
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
}
# The language model in Qwen2.5-VL 7B, which encodes text.  The vision tower (1.3 GB) is left out, because it is not
# called for text.
_QWEN_7B: Config = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "use_cache": False,
}
# Mistral Small 3 24B without its vision tower, which is not called for text.
_MISTRAL_24B: Config = {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_cache": False,
}
_QWEN3_4B: Config = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_cache": False,
}
_CLIP_G: Config = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
_WAN_5B_VAE: Config = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
_FLUX_VAE: Config = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _wan(
    name: str, *, steps: int, experts: int = 1, channels: int = 16, scale: int = 8, vae: Config | None = None
) -> Published:
    umt5: Config = {**_T5_XXL, "vocab_size": 256384}
    return Published(
        transformer=PRESETS[name],
        experts=experts,
        encoders=(Encoder(name="text_encoder", class_name="UMT5EncoderModel", config=umt5, tokens=512, calls=2),),
        vae="AutoencoderKLWan",
        vae_config=vae or {},
        channels=channels,
        scale=scale,
        steps=steps,
    )


_T5: Config = {**_T5_XXL, "vocab_size": 32128}

PUBLISHED: Mapping[str, Published] = {
    p.name: p
    for p in (
        Published(
            transformer=PRESETS["flux.1-dev"],
            encoders=(
                Encoder(name="text_encoder", class_name="CLIPTextModel", config=_CLIP_L, tokens=77),
                Encoder(
                    name="text_encoder_2",
                    class_name="T5EncoderModel",
                    config=_T5,
                    tokens=512,
                ),
            ),
            vae="AutoencoderKL",
            vae_config=_FLUX_VAE,
            channels=16,
            scale=8,
            steps=28,
        ),
        _wan("wan2.2-t2v-a14b", steps=40, experts=2),
        _wan("wan2.2-ti2v-5b", steps=50, channels=48, scale=16, vae=_WAN_5B_VAE),
        _wan("wan2.1-t2v-14b", steps=50),
        _wan("wan2.1-t2v-1.3b", steps=50),
        Published(
            transformer=PRESETS["qwen-image"],
            encoders=(Encoder(name="text_encoder", class_name="Qwen2Model", config=_QWEN_7B, tokens=512, calls=2),),
            vae="AutoencoderKLQwenImage",
            channels=16,
            scale=8,
            steps=50,
        ),
        Published(
            transformer=PRESETS["hunyuanvideo"],
            encoders=(
                Encoder(name="text_encoder", class_name="LlamaModel", config=_LLAMA_8B, tokens=351),
                Encoder(name="text_encoder_2", class_name="CLIPTextModel", config=_CLIP_L, tokens=77),
            ),
            vae="AutoencoderKLHunyuanVideo",
            tiled=True,  # because decoding whole frames takes 50 GiB
            channels=16,
            scale=8,
            steps=50,
        ),
        Published(
            transformer=PRESETS["flux.2-dev"],
            encoders=(Encoder(name="text_encoder", class_name="MistralModel", config=_MISTRAL_24B, tokens=512),),
            vae="AutoencoderKLFlux2",
            channels=32,
            scale=8,
            steps=50,
        ),
        Published(
            transformer=PRESETS["flux.2-klein-4b"],
            encoders=(Encoder(name="text_encoder", class_name="Qwen3Model", config=_QWEN3_4B, tokens=512),),
            vae="AutoencoderKLFlux2",
            channels=32,
            scale=8,
            steps=4,
        ),
        Published(
            transformer=PRESETS["z-image-turbo"],
            encoders=(Encoder(name="text_encoder", class_name="Qwen3Model", config=_QWEN3_4B, tokens=512),),
            vae="AutoencoderKL",
            vae_config=_FLUX_VAE,
            channels=16,
            scale=8,
            steps=9,
        ),
        Published(
            transformer=PRESETS["sd3.5-large"],
            encoders=(
                Encoder(
                    name="text_encoder",
                    class_name="CLIPTextModelWithProjection",
                    config={**_CLIP_L, "projection_dim": 768},
                    tokens=77,
                    calls=2,
                ),
                Encoder(
                    name="text_encoder_2",
                    class_name="CLIPTextModelWithProjection",
                    config=_CLIP_G,
                    tokens=77,
                    calls=2,
                ),
                Encoder(name="text_encoder_3", class_name="T5EncoderModel", config=_T5, tokens=256, calls=2),
            ),
            vae="AutoencoderKL",
            vae_config=_FLUX_VAE,
            channels=16,
            scale=8,
            steps=28,
        ),
        Published(
            transformer=PRESETS["ltx-video"],
            encoders=(Encoder(name="text_encoder", class_name="T5EncoderModel", config=_T5, tokens=128, calls=2),),
            vae="AutoencoderKLLTXVideo",
            channels=128,
            scale=32,
            steps=50,
        ),
    )
}
