"""Whole pipelines at their published sizes, without weights: encoders, transformers, VAE, and how often each is called.

Configurations are from the models' repositories (``text_encoder/config.json``, ``vae/config.json``).  Imports torch when a
model is made, as ``presets`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunkflow_compile.passes.errors import ChunkflowError

from .presets import PRESETS, OutputSizes, Preset

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A text encoder.  ``build``: makes it.  ``tokens``: of a prompt.  ``calls``: in a generation."""

    name: str
    build: Callable[[], nn.Module]
    tokens: int
    calls: int = 1

    def inputs(self) -> dict[str, Any]:
        """The arguments of a call."""
        import torch

        return {"input_ids": torch.zeros(1, self.tokens, dtype=torch.long), "return_dict": False}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A pipeline.  ``transformer``: its preset.  ``experts``: how many of them take turns.  ``vae``: makes it.
    ``channels``, ``scale``: of its latents, and pixels for each of their elements.  ``steps``: of a generation, as in the
    model's repository."""

    transformer: Preset
    experts: int = 1
    encoders: tuple[Encoder, ...]
    vae: Callable[[], nn.Module]
    channels: int
    scale: int
    steps: int

    @property
    def name(self) -> str:
        return self.transformer.name

    def decode(self, sizes: OutputSizes) -> Callable[[], tuple[nn.Module, Callable[[nn.Module], Any]]]:
        """Returns the VAE and a call that decodes latents of ``sizes``."""
        frames = self.transformer.shape(sizes).frames
        still = (sizes.batch, self.channels, sizes.height // self.scale, sizes.width // self.scale)

        def build() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
            import torch

            vae = self.vae()
            video = "3d" in type(getattr(vae, "decoder", vae)).__name__.lower()
            latents = torch.randn((*still[:2], frames, *still[2:]) if video else still)
            return vae, lambda model: model.decode(latents)

        return build


def published(name: str) -> Published:
    """The pipeline called ``name``.  Raises ChunkflowError if there is none."""
    if name not in PUBLISHED:
        raise ChunkflowError(f"There is no pipeline {name!r}: use one of {', '.join(PUBLISHED)}.")
    return PUBLISHED[name]


def _clip_l() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    )


def _t5_xxl() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_XXL, vocab_size=32128))


def _umt5_xxl() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_XXL, vocab_size=256384))


_XXL: Mapping[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
}


def _llama_8b() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=128320,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            use_cache=False,
        )
    )


def _qwen_7b() -> nn.Module:
    """The language model of Qwen2.5-VL 7B, which encodes text; its vision tower (1.3 GB) is not called for a text."""
    from transformers import Qwen2Config, Qwen2Model

    return Qwen2Model(
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def _flux_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    vae: nn.Module = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=16,
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return vae


def _wan_vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    vae: nn.Module = AutoencoderKLWan()
    return vae


def _qwen_vae() -> nn.Module:
    from diffusers import AutoencoderKLQwenImage

    vae: nn.Module = AutoencoderKLQwenImage()
    return vae


def _hunyuan_vae() -> nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo

    vae: nn.Module = AutoencoderKLHunyuanVideo()
    vae.enable_tiling()  # type: ignore[operator]  # as the model's own example does: whole frames take 50 GiB
    return vae


PUBLISHED: Mapping[str, Published] = {
    p.name: p
    for p in (
        Published(
            transformer=PRESETS["flux.1-dev"],
            encoders=(
                Encoder(name="text_encoder", build=_clip_l, tokens=77),
                Encoder(name="text_encoder_2", build=_t5_xxl, tokens=512),
            ),
            vae=_flux_vae,
            channels=16,
            scale=8,
            steps=28,
        ),
        Published(
            transformer=PRESETS["wan2.2-t2v-a14b"],
            experts=2,
            encoders=(Encoder(name="text_encoder", build=_umt5_xxl, tokens=512, calls=2),),
            vae=_wan_vae,
            channels=16,
            scale=8,
            steps=40,
        ),
        Published(
            transformer=PRESETS["qwen-image"],
            encoders=(Encoder(name="text_encoder", build=_qwen_7b, tokens=512, calls=2),),
            vae=_qwen_vae,
            channels=16,
            scale=8,
            steps=50,
        ),
        Published(
            transformer=PRESETS["hunyuanvideo"],
            encoders=(
                Encoder(name="text_encoder", build=_llama_8b, tokens=351),
                Encoder(name="text_encoder_2", build=_clip_l, tokens=77),
            ),
            vae=_hunyuan_vae,
            channels=16,
            scale=8,
            steps=50,
        ),
    )
}
