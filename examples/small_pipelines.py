"""Small random diffusers pipelines, whole: text encoders, transformers, VAEs and tokenizers that need no files.

For the examples with ``--tiny``, and for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from small_encoders import TEXT, TextAndImages, clip, llama, qwen3, qwen_vl, t5, tokenizer, umt5

from chunkflow_compile.catalog.sizes import Config, build_model

Components = dict[str, Any]


@dataclass(frozen=True)
class SmallPipeline:
    """A pipeline of diffusers.  ``components``: makes them.  ``call``: arguments of one small generation.

    ``image``: whether a generation takes an image too.
    """

    class_name: str
    components: Callable[[], Components]
    call: Mapping[str, Any]
    image: bool = False

    def build(self, seed: int = 0) -> Any:
        """A pipeline with random weights in evaluation mode; the same seed gives the same weights."""
        import diffusers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pipe = getattr(diffusers, self.class_name)(**self.components())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate(self, pipe: Any, seed: int = 0, **changed: Any) -> torch.Tensor:
        """What ``pipe`` generates from the small call, with some arguments changed."""
        call = {**self.call, **changed}
        if self.image:
            from PIL import Image

            call["image"] = Image.new("RGB", (32, 32), (120, 30, 200))
        found = pipe(**call, generator=torch.Generator().manual_seed(seed))[0]
        return found if isinstance(found, torch.Tensor) else torch.as_tensor(found[0])


def small_pipeline(name: str, seed: int = 0) -> Any:
    """The small pipeline called ``name``."""
    return SMALL_PIPELINES[name].build(seed)


def _scheduler(**config: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def parts(transformer: Any, vae: Any, text_encoder: Any, tokens: int = 512, **more: Any) -> Components:
    """The components of a pipeline.  ``tokens``: most in a prompt.  ``more``: others, or one in place of these."""
    found = {"transformer": transformer, "vae": vae, "scheduler": _scheduler(), "text_encoder": text_encoder}
    return {**found, "tokenizer": tokenizer(tokens), **more}


# Of all transformers but Z-Image's.
HEADS: Config = {"num_attention_heads": 4, "attention_head_dim": 16}
# Of AutoencoderKL and AutoencoderKLFlux2.
_IMAGE_VAE: Config = {
    "sample_size": 32,
    "latent_channels": 4,
    "block_out_channels": (32, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _image_vae() -> Any:
    return build_model("AutoencoderKL", **_IMAGE_VAE, shift_factor=0.1, scaling_factor=1.5)


def _wan_transformer(channels: int = 16, **config: Any) -> Any:
    return build_model(
        "WanTransformer3DModel",
        **HEADS,
        patch_size=(1, 2, 2),
        in_channels=channels,
        out_channels=16,
        text_dim=TEXT,
        freq_dim=64,
        ffn_dim=256,
        num_layers=3,
        rope_max_seq_len=64,
        **config,
    )


def _wan() -> Components:
    transformer = _wan_transformer()
    vae = build_model(
        "AutoencoderKLWan",
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return parts(transformer, vae, umt5(), scheduler=_scheduler(shift=7.0), transformer_2=None)


def _wan_two_experts() -> Components:
    return {**_wan(), "transformer_2": _wan_transformer(), "boundary_ratio": 0.875}


_VISION: Config = {
    "hidden_size": TEXT,
    "intermediate_size": 4 * TEXT,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": TEXT,
}


def _wan_from_image() -> Components:
    from transformers import CLIPImageProcessor

    return {
        **_wan(),
        "transformer": _wan_transformer(36, image_dim=TEXT, added_kv_proj_dim=TEXT),
        "image_encoder": build_model("CLIPVisionModel", **_VISION),
        "image_processor": CLIPImageProcessor(crop_size=32, size=32),
    }


_FLUX: Config = {**HEADS, "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 3}


def _flux() -> Components:
    transformer = build_model(
        "FluxTransformer2DModel",
        **_FLUX,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return parts(transformer, _image_vae(), clip(), 77, text_encoder_2=t5(), tokenizer_2=tokenizer())


def _flux2() -> Components:
    transformer = build_model(
        "Flux2Transformer2DModel",
        **_FLUX,
        joint_attention_dim=2 * TEXT,
        timestep_guidance_channels=64,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return parts(transformer, build_model("AutoencoderKLFlux2", **_IMAGE_VAE), qwen3())


def _qwen_image(levels: int = 2) -> Components:
    """``levels``: of the VAE, each with half the edge of the one before."""
    transformer = build_model(
        "QwenImageTransformer2DModel",
        **HEADS,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=TEXT,
        axes_dims_rope=(8, 4, 4),
    )
    vae = build_model(
        "AutoencoderKLQwenImage",
        base_dim=16,
        z_dim=4,
        dim_mult=[*(1,) * (levels - 1), 2, 4],
        num_res_blocks=1,
        temperal_downsample=[*(False,) * (levels - 1), True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return parts(transformer, vae, qwen_vl(), 2048)


def _qwen_image_edit() -> Components:
    found = _qwen_image(levels=5)  # diffusers makes the image 1024x1024, and attention then has 1024 tokens
    return {**found, "processor": TextAndImages(found["tokenizer"])}


def _hunyuan_video() -> Components:
    transformer = build_model(
        "HunyuanVideoTransformer3DModel",
        **HEADS,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=TEXT,
        pooled_projection_dim=TEXT,
        rope_axes_dim=(8, 4, 4),
    )
    vae = build_model(
        "AutoencoderKLHunyuanVideo",
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return parts(
        transformer, vae, llama(), scheduler=_scheduler(shift=7.0), text_encoder_2=clip(), tokenizer_2=tokenizer(77)
    )


def _ltx() -> Components:
    transformer = build_model(
        "LTXVideoTransformer3DModel",
        **HEADS,
        in_channels=8,
        out_channels=8,
        cross_attention_dim=64,
        num_layers=3,
        caption_channels=TEXT,
    )
    vae = build_model(
        "AutoencoderKLLTXVideo",
        latent_channels=8,
        block_out_channels=(16, 16, 16, 16),
        decoder_block_out_channels=(16, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
    )
    return parts(transformer, vae, t5())


def _z_image() -> Components:
    transformer = build_model(
        "ZImageTransformer2DModel",
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=64,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return parts(transformer, _image_vae(), qwen3())


def _sd3(**config: Any) -> Components:
    transformer = build_model(
        "SD3Transformer2DModel",
        **HEADS,
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        joint_attention_dim=2 * TEXT,
        caption_projection_dim=64,
        pooled_projection_dim=2 * TEXT,
        out_channels=4,
        **config,
    )
    projected = "CLIPTextModelWithProjection"
    return parts(
        transformer,
        _image_vae(),
        clip(projected),
        77,
        text_encoder_2=clip(projected),
        tokenizer_2=tokenizer(77),
        text_encoder_3=t5(2 * TEXT),
        tokenizer_3=tokenizer(),
    )


def _sd35() -> Components:
    return _sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1))


_FEW_STEPS = {"num_inference_steps": 3, "output_type": "pt"}
_IMAGE = {"prompt": "a paper boat", "height": 32, "width": 32, "max_sequence_length": 32, **_FEW_STEPS}
_VIDEO = {**_IMAGE, "num_frames": 5, "negative_prompt": "rain"}

SMALL_PIPELINES: Mapping[str, SmallPipeline] = {
    "wan": SmallPipeline("WanPipeline", _wan, {**_VIDEO, "guidance_scale": 4.0}),
    "wan2.2": SmallPipeline("WanPipeline", _wan_two_experts, {**_VIDEO, "guidance_scale": 4.0}),
    "wan-i2v": SmallPipeline("WanImageToVideoPipeline", _wan_from_image, {**_VIDEO, "guidance_scale": 4.0}, image=True),
    "flux": SmallPipeline("FluxPipeline", _flux, _IMAGE),
    "flux2": SmallPipeline(
        "Flux2KleinPipeline", _flux2, {**_IMAGE, "guidance_scale": 4.0, "text_encoder_out_layers": (1, 2)}
    ),
    "qwen-image": SmallPipeline("QwenImagePipeline", _qwen_image, {**_IMAGE, "negative_prompt": "rain"}),
    "qwen-image-edit": SmallPipeline(
        "QwenImageEditPipeline",
        _qwen_image_edit,
        {**_IMAGE, "height": 64, "width": 64, "negative_prompt": "rain", "true_cfg_scale": 4.0},
        image=True,
    ),
    "hunyuanvideo": SmallPipeline(
        "HunyuanVideoPipeline",
        _hunyuan_video,
        {
            **{k: v for k, v in _VIDEO.items() if k != "negative_prompt"},
            "prompt_template": {"template": "{}", "crop_start": 0},
        },
    ),
    "ltx": SmallPipeline("LTXPipeline", _ltx, {**_VIDEO, "num_frames": 9}),
    "z-image": SmallPipeline("ZImagePipeline", _z_image, {**_IMAGE, "guidance_scale": 4.0, "negative_prompt": "rain"}),
    "sd3": SmallPipeline("StableDiffusion3Pipeline", _sd3, {**_IMAGE, "negative_prompt": "rain"}),
    "sd3.5": SmallPipeline(
        "StableDiffusion3Pipeline",
        _sd35,
        {**_IMAGE, "negative_prompt": "rain", "skip_guidance_layers": [1], "skip_layer_guidance_stop": 0.9},
    ),
}
