"""The published configurations of the presets' transformers, with their sources.

Most configurations are from ``transformer/config.json`` in the model's repository.  For FLUX.1, FLUX.2-dev, HunyuanVideo,
Qwen-Image, Z-Image and LTX-Video 0.9, the defaults of the diffusers class are the published sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from .sizes import Config


def _wan(*, heads: int, layers: int, mlp: int, channels: int, out: int = 16, **more: int) -> Config:
    return {
        "patch_size": (1, 2, 2),
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "num_layers": layers,
        "ffn_dim": mlp,
        "in_channels": channels,
        "out_channels": out,
        "text_dim": 4096,
        "freq_dim": 256,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        **more,
    }


def _flux2(*, layers: int, singles: int, heads: int, text: int, guidance: bool) -> Config:
    return {
        "in_channels": 128,
        "num_layers": layers,
        "num_single_layers": singles,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "joint_attention_dim": text,
        "guidance_embeds": guidance,
    }


CONFIGS: Mapping[str, Config] = {
    "wan2.2-ti2v-5b": _wan(heads=24, layers=30, mlp=14336, channels=48, out=48),
    "wan2.2-t2v-a14b": _wan(heads=40, layers=40, mlp=13824, channels=16),
    "wan2.1-i2v-14b": _wan(heads=40, layers=40, mlp=13824, channels=36, image_dim=1280, added_kv_proj_dim=5120),
    "wan2.1-t2v-14b": _wan(heads=40, layers=40, mlp=13824, channels=16),
    "wan2.1-t2v-1.3b": _wan(heads=12, layers=30, mlp=8960, channels=16),
    "flux.1-dev": {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
    },
    "hunyuanvideo": {
        "in_channels": 16,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
    },
    "qwen-image": {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
    },
    "flux.2-dev": _flux2(layers=8, singles=48, heads=48, text=15360, guidance=True),
    "flux.2-klein-4b": _flux2(layers=5, singles=20, heads=24, text=7680, guidance=False),
    "z-image-turbo": {
        "in_channels": 16,
        "dim": 3840,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "n_heads": 30,
        "n_kv_heads": 30,
        "cap_feat_dim": 2560,
    },
    "sd3.5-large": {
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 38,
        "attention_head_dim": 64,
        "num_attention_heads": 38,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 2432,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
    "ltx-video": {
        "in_channels": 128,
        "out_channels": 128,
        "num_layers": 28,
        "attention_head_dim": 64,
        "num_attention_heads": 32,
        "cross_attention_dim": 2048,
        "caption_channels": 4096,
    },
    # hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v.  The configuration is 480p_t2v in the conversion script
    # of diffusers, convert_hunyuan_video1_5_to_diffusers.py.  The model has 8.3 billion parameters.
    "hunyuanvideo-1.5": {
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "text_embed_dim": 3584,
        "text_embed_2_dim": 1472,
        "image_embed_dim": 1152,
        "target_size": 640,
        "task_type": "t2v",
    },
    # meituan-longcat/LongCat-Image.  The defaults of the class (19 and 38 layers, 11.9 billion parameters) are not its
    # sizes: the published transformer has 6.27 billion parameters (12.54 GB).
    "longcat-image": {
        "in_channels": 64,
        "num_layers": 10,
        "num_single_layers": 20,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "pooled_projection_dim": 3584,
    },
    # MiniMaxAI/MiniMax-H3: the defaults of the class, and MINIMAX_H3_TRANSFORMER_CONFIG in the conversion script of
    # diffusers, convert_minimax_h3_to_diffusers.py.
    "minimax-h3": {
        "num_attention_heads": 56,
        "attention_head_dim": 128,
        "hidden_size": 5376,
        "num_layers": 50,
        "num_refiner_layers": 2,
        "ffn_dim": 14336,
        "in_channels": 24,
        "audio_in_channels": 32,
        "patch_size": (1, 2, 2),
        "text_dim": 5120,
        "time_embed_hidden_dim": 5376,
        "time_embed_dim": 2688,
    },
    # Lightricks/LTX-2 (2.0): the defaults of the class, except for rope_type, as in the conversion script of diffusers,
    # convert_ltx2_to_diffusers.py.
    "ltx-2": {
        "in_channels": 128,
        "out_channels": 128,
        "num_attention_heads": 32,
        "attention_head_dim": 128,
        "cross_attention_dim": 4096,
        "audio_in_channels": 128,
        "audio_out_channels": 128,
        "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64,
        "audio_cross_attention_dim": 2048,
        "num_layers": 48,
        "caption_channels": 3840,
        "rope_type": "split",
    },
}
