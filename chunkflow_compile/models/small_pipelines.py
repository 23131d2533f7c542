"""Small random diffusers pipelines, whole: text encoders, transformers, VAEs and tokenizers that need no files.

For tests, and for the examples with ``--tiny``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Components = dict[str, Any]

# Width of the text encoders, and so of the prompt embeddings.
_TEXT = 64
_MARKS = ("<pad>", "</s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


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
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
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


def _tokenizer(longest: int = 512) -> Any:
    """A tokenizer of bytes, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {mark: i for i, mark in enumerate(_MARKS)}
    words |= {letter: len(words) + i for i, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<pad>", model_max_length=longest
    )
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return tokenizer


_VOCABULARY = len(_MARKS) + 256


def _scheduler(**config: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def _parts(transformer: Any, vae: Any, text_encoder: Any, tokens: int = 512, **more: Any) -> Components:
    """The components of a pipeline.  ``tokens``: most in a prompt.  ``more``: others, or one in place of these."""
    found = {"transformer": transformer, "vae": vae, "scheduler": _scheduler(), "text_encoder": text_encoder}
    return {**found, "tokenizer": _tokenizer(tokens), **more}


def _t5(width: int = _TEXT) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=_VOCABULARY, d_model=width, d_kv=16, d_ff=256, num_heads=4, num_layers=2))


def _umt5() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=_VOCABULARY, d_model=_TEXT, d_kv=16, d_ff=4 * _TEXT, num_heads=4, num_layers=2)
    )


def _clip(projected: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_TEXT,
        intermediate_size=4 * _TEXT,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=_TEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=_TEXT,
            intermediate_size=4 * _TEXT,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    )


def _qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    mark = {name: i for i, name in enumerate(_MARKS)}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": _VOCABULARY,
            "hidden_size": _TEXT,
            "intermediate_size": 4 * _TEXT,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        },
        vision_config={
            "depth": 2,
            "hidden_size": _TEXT,
            "intermediate_size": 2 * _TEXT,
            "num_heads": 4,
            "out_hidden_size": _TEXT,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=mark["<|vision_start|>"],
        vision_end_token_id=mark["<|vision_end|>"],
        image_token_id=mark["<|image_pad|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=_TEXT,
            intermediate_size=4 * _TEXT,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
        )
    )


# Of AutoencoderKL and AutoencoderKLFlux2.
_IMAGE_VAE: Mapping[str, Any] = {
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
    from diffusers import AutoencoderKL

    return AutoencoderKL(**_IMAGE_VAE, shift_factor=0.1, scaling_factor=1.5)


def _wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=16, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def _wan_transformer(channels: int = 16, **config: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=16,
        text_dim=_TEXT,
        freq_dim=64,
        ffn_dim=256,
        num_layers=3,
        rope_max_seq_len=64,
        **config,
    )


def _wan() -> Components:
    return _parts(_wan_transformer(), _wan_vae(), _umt5(), scheduler=_scheduler(shift=7.0), transformer_2=None)


def _wan_two_experts() -> Components:
    return {**_wan(), "transformer_2": _wan_transformer(), "boundary_ratio": 0.875}


def _wan_from_image() -> Components:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    vision = CLIPVisionConfig(
        hidden_size=_TEXT,
        intermediate_size=4 * _TEXT,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
        projection_dim=_TEXT,
    )
    return {
        **_wan(),
        "transformer": _wan_transformer(36, image_dim=_TEXT, added_kv_proj_dim=_TEXT),
        "image_encoder": CLIPVisionModel(vision),
        "image_processor": CLIPImageProcessor(crop_size=32, size=32),
    }


def _flux() -> Components:
    from diffusers import FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=_TEXT,
        pooled_projection_dim=_TEXT,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return _parts(transformer, _image_vae(), _clip(), 77, text_encoder_2=_t5(), tokenizer_2=_tokenizer())


def _flux2() -> Components:
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=2 * _TEXT,
        timestep_guidance_channels=64,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return _parts(transformer, AutoencoderKLFlux2(**_IMAGE_VAE), _qwen3())


def _qwen_image(levels: int = 2) -> Components:
    """``levels``: of the VAE, each with half the edge of the one before."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=_TEXT,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=4,
        dim_mult=[*(1,) * (levels - 1), 2, 4],
        num_res_blocks=1,
        temperal_downsample=[*(False,) * (levels - 1), True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return _parts(transformer, vae, _qwen_vl(), 2048)


class _TextAndImages:
    """What Qwen's processor does, without torchvision: the pixels as patches, and a mark in the text for each four."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tokenizer
        self._pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56})

    def __call__(self, *, text: list[str], images: Any, **_: Any) -> Any:
        from transformers import BatchFeature

        pixels = self._pixels(images=images, return_tensors="pt")
        marks = "<|image_pad|>" * (int(pixels["image_grid_thw"][0].prod()) // 4)
        tokens = self.tokenizer([t.replace("<|image_pad|>", marks) for t in text], padding=True, return_tensors="pt")
        return BatchFeature({**tokens, **pixels})


def _qwen_image_edit() -> Components:
    found = _qwen_image(levels=5)  # diffusers makes the image 1024x1024, and attention then has 1024 tokens
    return {**found, "processor": _TextAndImages(found["tokenizer"])}


def _hunyuan_video() -> Components:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=_TEXT,
        pooled_projection_dim=_TEXT,
        rope_axes_dim=(8, 4, 4),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return _parts(
        transformer, vae, _llama(), scheduler=_scheduler(shift=7.0), text_encoder_2=_clip(), tokenizer_2=_tokenizer(77)
    )


def _ltx() -> Components:
    from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel

    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        num_layers=3,
        caption_channels=_TEXT,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(16, 16, 16, 16),
        decoder_block_out_channels=(16, 16, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
    )
    return _parts(transformer, vae, _t5())


def _z_image() -> Components:
    from diffusers import ZImageTransformer2DModel

    transformer = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=64,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=_TEXT,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return _parts(transformer, _image_vae(), _qwen3())


def _sd3(**config: Any) -> Components:
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=2 * _TEXT,
        caption_projection_dim=64,
        pooled_projection_dim=2 * _TEXT,
        out_channels=4,
        **config,
    )
    return _parts(
        transformer,
        _image_vae(),
        _clip(projected=True),
        77,
        text_encoder_2=_clip(projected=True),
        tokenizer_2=_tokenizer(77),
        text_encoder_3=_t5(2 * _TEXT),
        tokenizer_3=_tokenizer(),
    )


def _sd35() -> Components:
    return _sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1))


_STEPS = {"num_inference_steps": 3, "output_type": "pt"}
_IMAGE = {"prompt": "a paper boat", "height": 32, "width": 32, "max_sequence_length": 32, **_STEPS}
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
