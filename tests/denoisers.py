"""Small pipelines of diffusers that denoise given prompt embeddings, or a prompt, and return latents: none decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from small_encoders import TEXT, qwen_vl
from small_pipelines import HEADS, SmallPipeline, parts

from chunkflow_compile.catalog.sizes import Config, build_model

# Text tokens of a prompt.
_TOKENS = 8
_CALL: Config = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "latent"}


def _longcat() -> dict[str, Any]:
    transformer = build_model(
        "LongCatImageTransformer2DModel",
        **HEADS,
        in_channels=64,
        num_layers=2,
        num_single_layers=3,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        axes_dims_rope=[4, 4, 8],
    )
    return parts(transformer, None, qwen_vl(), text_processor=None)


def hunyuan15_transformer() -> Any:
    """A small transformer of HunyuanVideo-1.5."""
    return build_model(
        "HunyuanVideo15Transformer3DModel",
        **HEADS,
        in_channels=9,
        out_channels=4,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(4, 4, 8),
        target_size=64,
        task_type="t2v",
    )


def _hunyuan15() -> dict[str, Any]:
    from diffusers import ClassifierFreeGuidance

    vae = build_model(
        "AutoencoderKLHunyuanVideo15", latent_channels=4, block_out_channels=(32,) * 5, layers_per_block=1
    )
    encoders = dict.fromkeys(("tokenizer", "text_encoder_2", "tokenizer_2"))
    guider = ClassifierFreeGuidance(guidance_scale=6.0)
    return parts(hunyuan15_transformer(), vae, None, guider=guider, **encoders)


def _two_texts(sign: str) -> dict[str, torch.Tensor]:
    """What two encoders make of a prompt, or of a negative one."""
    text, drawn = torch.ones(1, _TOKENS, TEXT), torch.zeros(1, 16, 32)
    masks = {"prompt_embeds_mask": torch.ones(1, _TOKENS), "prompt_embeds_mask_2": torch.zeros(1, 16)}
    return {
        f"{sign}{name}": value for name, value in {"prompt_embeds": text, "prompt_embeds_2": drawn, **masks}.items()
    }


def _ltx2() -> dict[str, Any]:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    transformer = build_model(
        "LTX2VideoTransformer3DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=64,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=4,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT,
        rope_type="split",
    )
    connectors = LTX2TextConnectors(
        caption_channels=TEXT,
        text_proj_in_factor=2,
        **{f"{kind}_connector_num_attention_heads": 4 for kind in ("video", "audio")},
        **{f"{kind}_connector_attention_head_dim": 16 for kind in ("video", "audio")},
        **{f"{kind}_connector_num_layers": 1 for kind in ("video", "audio")},
        **{f"{kind}_connector_num_learnable_registers": _TOKENS for kind in ("video", "audio")},
        rope_type="split",
    )
    vae = build_model(
        "AutoencoderKLLTX2Video",
        latent_channels=4,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 3,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    audio_vae = build_model(
        "AutoencoderKLLTX2Audio", base_channels=4, ch_mult=(1,), num_res_blocks=1, latent_channels=2, mel_bins=8
    )
    return parts(transformer, vae, None, tokenizer=None, connectors=connectors, audio_vae=audio_vae, vocoder=None)


def _ltx2_texts(sign: str) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, _TOKENS, dtype=torch.long)
    return {f"{sign}prompt_embeds": torch.ones(1, _TOKENS, 2 * TEXT), f"{sign}prompt_attention_mask": mask}


class ModularDenoiser(SmallPipeline):
    """The part of a modular pipeline that denoises, whose class is ``class_name``."""

    def build(self, seed: int = 0) -> Any:
        from diffusers.modular_pipelines.minimax_h3 import modular_blocks_minimax_h3 as blocks

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pipe = getattr(blocks, self.class_name)().init_pipeline()
            pipe.update_components(**self.components())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate(self, pipe: Any, seed: int = 0, **changed: Any) -> torch.Tensor:
        call = {**self.call, **changed}
        call["num_inference_steps"] += 1  # MiniMax-H3 counts the end of its schedule
        latents: torch.Tensor = pipe(**call, output="latents")
        return latents


def _minimax() -> dict[str, Any]:
    from diffusers import MiniMaxH3Scheduler

    transformer = build_model(
        "MiniMaxH3Transformer3DModel",
        **HEADS,
        hidden_size=64,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=128,
        text_dim=TEXT,
        freq_dim=16,
        time_embed_hidden_dim=64,
        time_embed_dim=32,
        rope_freq_dim=2,
    )
    schedulers = {"scheduler": MiniMaxH3Scheduler(shift=12.0), "audio_scheduler": MiniMaxH3Scheduler(shift=3.0)}
    return {"transformer": transformer, **schedulers}


DENOISERS: Mapping[str, SmallPipeline] = {
    "longcat-image": SmallPipeline(
        "LongCatImagePipeline", _longcat, {**_CALL, "prompt": "a paper boat", "enable_prompt_rewrite": False}
    ),
    "hunyuanvideo-1.5": SmallPipeline(
        "HunyuanVideo15Pipeline", _hunyuan15, {**_CALL, "num_frames": 5, **_two_texts(""), **_two_texts("negative_")}
    ),
    "minimax-h3": ModularDenoiser(
        "MiniMaxH3CoreDenoiseStep",
        _minimax,
        {
            **{name: _CALL[name] for name in ("height", "width", "num_inference_steps")},
            "num_frames": 124,
            "prompt_embeds": torch.ones(1, _TOKENS, TEXT),
            "text_token_tags": torch.ones(_TOKENS, dtype=torch.long),
        },
    ),
    "ltx-2": SmallPipeline(
        "LTX2Pipeline", _ltx2, {**_CALL, "num_frames": 17, **_ltx2_texts(""), **_ltx2_texts("negative_")}
    ),
}
