"""vLLM-Omni's worker without its processes: its runner loads, offloads and compiles a small transformer of its own on a CPU.

Import nothing of vllm_omni before this module: it puts the stand-ins in place, and a platform.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from stand_ins import Finder
from torch import nn

# Module -> why it is not the real one.  Each is imported at the top of some module of the server, beside its transformers;
# nothing of it runs on the way of a denoising step.
STANDS_IN = {
    "av": "video files, 40 MB: the outputs of a pipeline are not encoded here",
    "soxr": "resampling of audio",
    "torchaudio": "audio; its CPU builds are not on PyPI",
    "torchcodec": "decodes videos with libraries of FFmpeg, which a machine may lack",
    "torchvision": "transforms of images; the build on PyPI needs the CUDA build of torch",
    "cv2": "images, 60 MB",
}
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
sys.meta_path.insert(0, Finder(STANDS_IN, importers=("vllm", "vllm_omni")))

import vllm_omni.platforms as platforms  # noqa: E402
from vllm_omni.platforms.interface import UnspecifiedOmniPlatform  # noqa: E402


def _returns(value: object) -> Any:
    return classmethod(lambda cls, *args, **kwargs: value)


class CpuPlatform(UnspecifiedOmniPlatform):
    """vLLM-Omni has no platform for a CPU; attention is torch's own."""

    dist_backend = "gloo"
    get_diffusion_attn_backend_cls = _returns("vllm_omni.diffusion.attention.backends.sdpa.SDPABackend")
    get_torch_device = _returns(torch.device("cpu"))
    get_device_count = _returns(1)
    supports_torch_inductor = supports_cpu_offload = _returns(True)
    get_free_memory = _returns(1 << 34)
    synchronize = set_device = _returns(None)


platforms._current_omni_platform = CpuPlatform()

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm_omni.diffusion import offloader  # noqa: E402
from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl  # noqa: E402
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig, TransformerConfig  # noqa: E402
from vllm_omni.diffusion.distributed import parallel_state  # noqa: E402
from vllm_omni.diffusion.forward_context import set_forward_context  # noqa: E402
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader  # noqa: E402
from vllm_omni.diffusion.registry import _apply_sequence_parallel_if_enabled  # noqa: E402
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner  # noqa: E402

# On a platform that it does not know, it has no forward; that of CUDA calls torch's attention here.
AttentionImpl.forward = lambda self, *args, **kwargs: self.forward_cuda(*args, **kwargs)
# vLLM on a CPU repacks the weights of a linear layer for kernels of its own; on a GPU it leaves them, and calls this.
linear.UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: None
linear.UnquantizedLinearMethod.apply = lambda self, layer, x, bias=None: nn.functional.linear(x, layer.weight, bias)

# Where a transformer is, and its sizes besides those of each.
_SIZES = {"num_attention_heads": 2, "attention_head_dim": 64}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Wan": (
        "wan2_2.wan2_2_transformer.WanTransformer3DModel",
        {"text_dim": 64, "freq_dim": 64, "ffn_dim": 256, "num_layers": 2},
    ),
    "FLUX": (
        "flux.flux_transformer.FluxTransformer2DModel",
        {"num_single_layers": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64}
        | {"axes_dims_rope": (16, 24, 24), "in_channels": 16},
    ),
    "Qwen-Image": (
        "qwen_image.qwen_image_transformer.QwenImageTransformer2DModel",
        {"num_layers": 2, "joint_attention_dim": 64, "axes_dims_rope": (16, 24, 24)}
        | {"in_channels": 16, "out_channels": 4},
    ),
    "HunyuanVideo-1.5": (
        "hunyuan_video.hunyuan_video_15_transformer.HunyuanVideo15Transformer3DModel",
        {"num_layers": 2, "num_refiner_layers": 1, "in_channels": 9, "out_channels": 4, "text_embed_dim": 64}
        | {"text_embed_2_dim": 64, "image_embed_dim": 64, "rope_axes_dim": (16, 24, 24)},
    ),
}
NAMES = tuple(_MODELS)
# What the plug-in wraps.
WRAPPED: tuple[tuple[Any, str], ...] = (
    (DiffusersPipelineLoader, "load_model"),
    (offloader, "get_offload_backend"),
    (DiffusionModelRunner, "_compile_transformer"),
)
ULYSSES = tuple(name for name in NAMES if name != "FLUX")  # the server has no plan of sequence parallelism for FLUX


class Pipeline(nn.Module):
    """A pipeline of the server with one transformer, and an encoder and a VAE beside it."""

    _dit_modules = ("transformer",)

    def __init__(self, od_config: Any) -> None:
        super().__init__()
        self.od_config = od_config
        path, more = _MODELS[od_config.model_class_name]
        sizes = {**_SIZES, **more}
        module, _, name = path.rpartition(".")
        made = getattr(import_module(f"vllm_omni.diffusion.models.{module}"), name)
        self.transformer = made(**sizes) if name.startswith("Wan") else made(od_config, **sizes)
        self.text_encoder, self.vae = nn.Linear(4, 4), nn.Linear(4, 4)
        torch.manual_seed(0)
        for parameter in self.transformer.parameters():
            nn.init.normal_(parameter, std=0.02)
        self.requires_grad_(False)
        _apply_sequence_parallel_if_enabled(self, od_config)

    def load_weights(self, weights: Any) -> None:
        """Its weights are there."""


def inputs(name: str, step: int, size: int = 8) -> dict[str, Any]:
    """Arguments of a denoising step.  ``size``: height and width of the latents, even."""
    torch.manual_seed(100 + step)
    time, text = torch.tensor([900.0 - 100 * step]), torch.randn(1, 16, 64)
    if name == "Wan":
        return {"hidden_states": torch.randn(1, 16, 2, size, size), "timestep": time, "encoder_hidden_states": text}
    if name == "HunyuanVideo-1.5":
        mask = torch.ones(1, 16)
        given = {"hidden_states": torch.randn(1, 9, 2, size // 2, size // 2), "timestep": time}
        given |= {"encoder_hidden_states": text, "encoder_attention_mask": mask, "encoder_attention_mask_2": mask}
        return given | {"encoder_hidden_states_2": torch.randn(1, 16, 64), "image_embeds": torch.zeros(1, 4, 64)}
    tokens = size * size // 4
    given = {"hidden_states": torch.randn(1, tokens, 16), "timestep": time / 1000, "encoder_hidden_states": text}
    if name == "Qwen-Image":
        return given | {"img_shapes": [[(1, size // 2, size // 2)]], "txt_seq_lens": [16]}
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(size / 2), torch.arange(size / 2))
    given |= {"img_ids": places, "txt_ids": torch.zeros(16, 3), "guidance": torch.tensor([3.5])}
    return given | {"pooled_projections": torch.randn(1, 64)}


def call(model: nn.Module, name: str, step: int, size: int = 8) -> torch.Tensor:
    """What a denoising step returns."""
    found = model(**inputs(name, step, size), return_dict=False)
    return (found[0] if isinstance(found, tuple) else found.sample).clone()


class Worker:
    """A worker that serves one model: ``runner`` loads it, ``request`` is what a request of the server runs in.

    ``fused``: with the server's option ``ulysses_a2a_permute``.
    """

    def __init__(self, name: str, rank: int, world: int, fused: bool = False, **given: Any) -> None:
        self.name, self._vllm_config = name, VllmConfig()
        parallel = DiffusionParallelConfig(
            ulysses_degree=world, sequence_parallel_size=world, ulysses_a2a_permute=fused
        )
        self.config = OmniDiffusionConfig(
            model="small",
            model_class_name=name,
            tf_model_config=TransformerConfig.from_dict({"num_layers": 2}),
            dtype=torch.float32,
            num_gpus=world,
            parallel_config=parallel,
            **given,
        )
        with self.request():
            self.runner = DiffusionModelRunner(self._vllm_config, self.config, torch.device("cpu"))

    @contextmanager
    def request(self) -> Iterator[None]:
        context = set_forward_context(vllm_config=self._vllm_config, omni_diffusion_config=self.config)
        with set_current_vllm_config(self._vllm_config), context:
            yield

    def load(self) -> nn.Module:
        """The transformer, loaded as in the server: onto its device or the host, its offloading, its compilation."""
        with self.request():
            self.runner.load_model(load_format="custom_pipeline", custom_pipeline_name=Pipeline)
        found: nn.Module = self.runner.pipeline.transformer
        return found

    def twin(self) -> Pipeline:
        """The same pipeline, as it is without a runner: eager, on the same weights."""
        with self.request():
            return Pipeline(self.config)


@contextmanager
def ranks(meeting: str, rank: int = 0, world: int = 1) -> Iterator[None]:
    """The server's groups, in the process group that there is, or else in one of their own."""
    parallel_state.init_distributed_environment(world, rank, f"file://{meeting}", rank, "gloo")
    try:
        with set_current_vllm_config(VllmConfig()):
            parallel_state.initialize_model_parallel(sequence_parallel_size=world, ulysses_degree=world, backend="gloo")
        yield
    finally:
        parallel_state.destroy_distributed_env()


@contextmanager
def plugged_in(memory: str, **options: Any) -> Iterator[None]:
    """With the plug-ins that the server's own loader finds, as in a worker; without them again at the end."""
    import vllm_omni.plugins

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WRAPPED:
            patch.setattr(owner, name, getattr(owner, name))
        patch.setattr(vllm_omni.plugins, "omni_plugins_loaded", False)
        patch.setenv("CHUNKFLOW_MEMORY", memory)
        patch.setenv("CHUNKFLOW_OPTIONS", json.dumps(options))
        vllm_omni.plugins.load_omni_general_plugins()
        yield
