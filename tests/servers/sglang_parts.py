"""Parts of SGLang-diffusion for tests: its transformers at two blocks, its arguments, its denoising stage, on a CPU; and what
stands in for modules and kernels that it has no build of there."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from stand_ins import Finder
from torch.nn import functional

HERE = Path(__file__).parent

# Weights of 4 KiB are large; on this machine all copies hide, so that as much streams as the budget asks for.
OPTIONS = {
    "min_bytes": 4096,
    "chunk_bytes": 4096,
    "group_bytes": 1 << 18,
    "lowering": "eager",
    "hardware": str(HERE.parent / "slow_compute.json"),
}
MEMORY = "1MiB"


# Module -> why it is not the real one.
STANDS_IN = {
    "IPython": "only notebooks need it, and it brings a dozen packages",
    "sgl_kernel": "on PyPI it is built for CUDA",
    "torchvision": "on PyPI it is built for CUDA, beside another torch",
}


def stand_in() -> None:
    """Let imports of the modules find their stand-ins, and SGLang the kernels that a build of sgl_kernel for CPUs has."""

    def norm(x: Any, weight: Any, bias: Any, scale: Any, shift: Any, kind: str, eps: float) -> Any:
        if kind == "rms":
            found = functional.rms_norm(x.float(), x.shape[-1:], weight, eps)
        else:
            found = functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
        return (found * (1 + scale) + shift).to(x.dtype)

    def scale_shift(x: Any, scale: Any, shift: Any, constant: float) -> Any:
        return x * (constant + scale) + shift

    def gated_norm(
        residual: Any, x: Any, gate: Any, weight: Any, bias: Any, scale: Any, shift: Any, kind: str, eps: float
    ) -> Any:
        total = residual + (x if gate is None else x * gate)
        return norm(total, weight, bias, scale, shift, kind, eps), total

    library = torch.library.Library("sgl_kernel", "DEF")
    for schema, kernel in (
        ("fused_norm_scale_shift_cpu(T x, T? w, T? b, T scale, T shift, str kind, float eps) -> T", norm),
        ("fused_scale_shift_cpu(T x, T scale, T shift, float constant) -> T", scale_shift),
        (
            "fused_scale_residual_norm_scale_shift_cpu(T residual, T x, T? gate, T? w, T? b, T scale, T shift, str kind, "
            "float eps) -> (T, T)",
            gated_norm,
        ),
    ):
        name = library.define(re.sub(r"\bT\b", "Tensor", schema))
        library.impl(name, kernel, "CompositeExplicitAutograd")
    finder = Finder(STANDS_IN)
    finder.kernels = library  # which last as long as it
    sys.meta_path.append(finder)


def bind_fallbacks() -> None:
    """Let SGLang take the function that stands for a Triton kernel on a CPU when it is asked for, not at each call.

    It imports the module of that function in each call, where Dynamo breaks the graph; on a GPU nothing does so.
    """
    from sglang.kernels.ops.diffusion.common import platform

    def bound(kind: str, name: str) -> Any:
        try:
            return getattr(import_module(f"sglang.kernels.ops.diffusion.common.fallback_{kind}"), name)
        except ImportError:  # of other machines
            return None

    platform.lazy_fallback = bound


def load_sglang() -> None:
    """Load the plug-in as a worker of the server does, by its entry point, and let SGLang put its hooks."""
    os.environ |= {
        "CHUNKFLOW_MEMORY": MEMORY,
        "CHUNKFLOW_OPTIONS": json.dumps(OPTIONS),
        "CHUNKFLOW_PROGRESS": "0",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    stand_in()
    bind_fallbacks()
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks, load_plugins

    load_plugins()
    apply_plugin_hooks()


def join_ranks() -> None:
    """SGLang's groups in the process group that there is: Ulysses over all of its ranks."""
    from sglang.multimodal_gen.runtime.distributed import parallel_state

    world = dist.get_world_size()
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    parallel_state.maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=world, ulysses_degree=world)


# The sizes of a small transformer; those of one for images.
SIZES = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64, "hidden_size": 128}
OF_IMAGES = {**SIZES, "in_channels": 16, "out_channels": 16, "num_channels_latents": 16}
OF_IMAGES |= {"axes_dims_rope": (16, 24, 24), "joint_attention_dim": 64}
# Name -> its pipeline, the name of a model, where its class is, its sizes.
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "wan": (
        *("WanPipeline", "Wan2.1-T2V-1.3B-Diffusers", "wanvideo.WanTransformer3DModel"),
        {**SIZES, "ffn_dim": 256, "text_dim": 64, "freq_dim": 64},
    ),
    "flux": (
        *("FluxPipeline", "FLUX.1-dev", "flux.FluxTransformer2DModel"),
        {**OF_IMAGES, "num_single_layers": 2, "pooled_projection_dim": 32},
    ),
    "qwen-image": (
        *("QwenImagePipeline", "Qwen-Image", "qwen_image.QwenImageTransformer2DModel"),
        {**OF_IMAGES, "patch_size": 1},
    ),
    "hunyuan-video": (
        *("HunyuanVideoPipeline", "HunyuanVideo", "hunyuanvideo.HunyuanVideoTransformer3DModel"),
        {**SIZES, "num_single_layers": 2, "rope_axes_dim": (16, 24, 24), "num_refiner_layers": 1, "text_embed_dim": 64}
        | {"pooled_projection_dim": 32},
    ),
}


def step_inputs(name: str, size: int) -> dict[str, Any]:
    """Random arguments of a denoising step.  ``size``: of the latents, in one direction."""
    video = name in ("wan", "hunyuan-video")
    given: dict[str, Any] = {
        "hidden_states": torch.randn(1, 16, 2, size, 8) if video else torch.randn(1, 4 * size, 16),
        "encoder_hidden_states": torch.randn(1, 17 if name == "hunyuan-video" else 16, 64),
        "timestep": torch.randint(1000, (1,)) if video else torch.randint(1000, (1,)).float(),
    }
    image, text = torch.rand(4 * size, 32), torch.rand(16, 32)
    if name == "flux":
        angles = torch.cat([text, image])
        given |= {"pooled_projections": torch.randn(1, 32), "guidance": torch.tensor([3500.0])}
        given["freqs_cis"] = angles.cos(), angles.sin()
    if name == "qwen-image":
        given["freqs_cis"] = tuple(torch.cat([a.cos(), a.sin()], dim=-1) for a in (image, text))
    return given


def arguments(folder: Path, name: str = "wan", **given: Any) -> Any:
    """SGLang's arguments for a model that a folder seems to hold."""
    from sglang.multimodal_gen.runtime.server_args.server_args import ServerArgs, set_global_server_args

    pipeline, model_id, _, _ = MODELS[name]
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    (folder / "transformer" / "config.json").write_text("{}")
    index = {"_class_name": pipeline, "_diffusers_version": "0.37.0", "transformer": ["diffusers", "X"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    args = ServerArgs.from_kwargs(model_path=str(folder), model_id=model_id, **{"enable_torch_compile": True, **given})
    set_global_server_args(args)
    return args


def transformer(args: Any, name: str) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """A transformer with random weights, the same for each call, and what makes inputs of a size for it."""
    from pkgutil import resolve_name

    config = args.pipeline_config.dit_config
    for size, value in MODELS[name][3].items():
        setattr(config.arch_config, size, value)
    model = resolve_name(f"sglang.multimodal_gen.runtime.models.dits.{MODELS[name][2]}")(config, {})
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return model.eval().requires_grad_(False), partial(step_inputs, name)


def pipeline(model: Any, args: Any, staged: bool = True) -> Any:
    """A pipeline of SGLang with a transformer alone; with its stage it has placed and compiled it."""
    from sglang.multimodal_gen.runtime.pipelines_core.lora.pipeline import LoRAPipeline
    from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage

    class Pipeline(LoRAPipeline):
        def load_modules(self, server_args: Any, loaded_modules: Any = None) -> Any:
            return loaded_modules

        def initialize_pipeline(self, server_args: Any) -> None:
            pass

        def create_pipeline_stages(self, server_args: Any) -> None:
            if staged:
                self.add_stage(DenoisingStage(self.modules["transformer"], scheduler=None, pipeline=self))

    return Pipeline(args.model_path, args, loaded_modules={"transformer": model})


def residency(pipe: Any, args: Any) -> Any:
    """What moves the components of a pipeline between its requests."""
    from sglang.multimodal_gen.runtime.managers.memory_managers.component_manager import ComponentResidencyManager

    return ComponentResidencyManager(pipe, args)


@contextmanager
def request(world: int = 1) -> Iterator[None]:
    """What SGLang has around the calls of a request."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    batch = SimpleNamespace(
        enable_sequence_shard=world > 1,
        enable_teacache=False,
        enable_spectrum=False,
        extra={},
        runtime_lora_scale=1.0,
        sampling_params=SimpleNamespace(quality=None),
    )
    with torch.no_grad(), set_forward_context(0, None, batch):
        yield
