"""Plug-in for SGLang-diffusion: if ``CHUNKFLOW_MEMORY`` is set, its transformers stream their weights within this limit.

SGLang calls :func:`plugin` in each of its processes, before it imports its serving code.  Then SGLang installs the registered
hooks around its own functions.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.servers.settings import MEMORY, PluginSettings, settings_from

# The hooks wrap functions outside SGLang's public interface: only tested releases are supported.
OLDEST, BEFORE = "0.5.23", "0.5.24"

_log = logging.getLogger(__name__)

_RUNTIME = "sglang.multimodal_gen.runtime."
_STAGES = f"{_RUNTIME}pipelines_core.stages."
_RESIDENCY = f"{_RUNTIME}managers.memory_managers.component_manager."


def plugin() -> None:
    """Register the hooks if ``CHUNKFLOW_MEMORY`` is set.  Raises SystemExit with an explanation if a setting is invalid or
    the release of SGLang is not supported."""
    try:
        settings = settings_from(os.environ)
        if settings is None:
            return
        settings.check_release("sglang", OLDEST, BEFORE)
    except ChunkflowError as error:
        raise SystemExit(
            str(error)
        ) from error  # SGLang catches and logs an Exception, and then serves without the plug-in
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    hooks = Hooks(settings)
    for target, hook, kind in (
        (f"{_RUNTIME}server_args.server_args.ServerArgs._adjust_parameters", load_on_the_host, HookType.BEFORE),
        (f"{_STAGES}denoising.DenoisingStage._maybe_offload_during_compile", hooks.place, HookType.REPLACE),
        (f"{_RUNTIME}utils.torch_compile.CompiledModuleRegistry.compile_once", hooks.compile, HookType.AROUND),
        (f"{_RUNTIME}utils.torch_compile.CompiledModuleRegistry.compile_regions_once", hooks.compile, HookType.AROUND),
        (f"{_RESIDENCY}build_component_residency_strategy", residency_strategy, HookType.AROUND),
        (f"{_RESIDENCY}ComponentResidencyManager.finish_request", hooks.report, HookType.AFTER),
        (f"{_RUNTIME}pipelines_core.lora.pipeline.LoRAPipeline._merge_cache_for", merge_in_place, HookType.AROUND),
        (f"{_RUNTIME}layers.layernorm.FP32LayerNorm._cached_fp32_param", fp32_param, HookType.REPLACE),
        (f"{_RUNTIME}models.dits.qwen_image._qwen_modulation_cache_key", no_key, HookType.REPLACE),
    ):
        HookRegistry.register(target, hook, kind)


def load_on_the_host(args: Any) -> None:
    """Runs BEFORE ``ServerArgs`` adjusts its arguments: makes SGLang load the transformers into host memory.

    Raises ChunkflowError for arguments of the server that exclude streaming.
    """
    from sglang.multimodal_gen.runtime.managers.memory_managers.component_residency import normalize_component_residency

    args.component_residency = normalize_component_residency(args.component_residency) or {}
    mode = args.explicit_residency_mode("transformer")
    if mode not in (None, "component-offload") or args.dit_layerwise_offload:
        raise ChunkflowError(
            f"{MEMORY} streams the weights of the transformer, and the arguments of the server keep them otherwise "
            f"({mode or 'layerwise-offload'}): leave out --dit-layerwise-offload, --dit-cpu-offload and what "
            "--component-residency and --layerwise-offload-components say of the transformer."
        )
    if args.enable_breakable_cuda_graph:
        raise ChunkflowError(
            f"{MEMORY} and CUDA graphs exclude each other: a captured step would replay no copies; leave out "
            "--enable-breakable-cuda-graph."
        )
    if not args.enable_torch_compile:
        raise ChunkflowError(f"{MEMORY} streams weights through compiled code: add --enable-torch-compile.")
    # If the residency of the transformer is set, SGLang does not choose one.  By default, it chooses layerwise offload, FSDP
    # or CUDA graphs.
    args.component_residency["dit"] = "component-offload"


class Hooks:
    """The hooks that depend on the settings.  ``settings``: settings from the environment."""

    def __init__(self, settings: PluginSettings) -> None:
        from chunkflow_compile.servers.scrape import Scrape

        self._settings = settings
        self._scrape = Scrape(settings.port)
        self._reported: weakref.WeakSet[Any] = weakref.WeakSet()

    def place(self, stage: Any, module: Any) -> None:
        """REPLACES layerwise offload during compilation: offloads the transformer of a stage, so that its weights stay on
        the host."""
        from sglang.multimodal_gen.runtime.distributed import get_local_torch_device
        from torch import nn

        if isinstance(module, nn.Module) and not _streams(module):
            self._settings.place(module, get_local_torch_device())
            self._scrape.add(module)
            name, most = type(module).__name__, self._settings.memory
            _log.info("%s is placed: its weights stream, at most %s on the device", name, most)

    def compile(self, original: Callable[..., Any], registry: Any, module: Any, *, compile_kwargs: Any) -> Any:
        """Runs AROUND the compilation of a module, whole or by regions: a placed module is compiled by block type.

        Compiling by block type traces the blocks only.  Outside the blocks, SGLang's transformers shard text, build masks
        on the host, use the addresses of tensors as cache keys and read the context of the request; all of this would break
        a graph of the whole model.
        """
        from chunkflow_compile.frontend.compile import compile as compile_by_kind

        if not _streams(module):
            return original(registry, module, compile_kwargs=compile_kwargs)
        if all(part._compiled_call_impl is None for part in module.modules()):  # Another stage may have compiled it.
            # False, because SGLANG_TORCH_COMPILE_MODE may request CUDA graphs.
            given = {"cudagraphs": False, **self._settings.options}
            given["memory"] = self._settings.memory
            compile_by_kind(module, mode=compile_kwargs.get("mode"), **given)
        registry.module_ids.add(id(module))
        return True

    def report(self, result: None, manager: Any) -> None:
        """Runs AFTER a request: logs once per transformer how much its steps copy."""
        from chunkflow_compile.placed.offload import cycles
        from chunkflow_compile.units import size

        for module in manager.pipeline.modules.values():
            if getattr(module, "_chunkflow_placement", None) is None or module in self._reported:
                continue
            for running in cycles(module)[:1]:
                plan = running.cycle.plan
                self._reported.add(module)
                _log.info(
                    "%s streams: a step copies %s, and %s of its weights are on the device",
                    type(module).__name__,
                    size(plan.moved_bytes),
                    size(plan.device_bytes),
                )


def _streams(module: Any) -> bool:
    """Whether a module is placed."""
    from chunkflow_compile.placed.placement import placement_of  # Here, because it imports torch.

    return placement_of(module) is not None


def residency_strategy(original: Callable[..., Any], name: str, module: Any, args: Any, **more: Any) -> Any:
    """Runs AROUND the choice of a component's residency strategy: a placed component is never moved between requests."""
    from sglang.multimodal_gen.runtime.managers.memory_managers import component_residency_strategies as strategies
    from sglang.multimodal_gen.runtime.managers.memory_managers import layerwise_offload_components as components

    if _streams(module):
        return strategies.ComponentResidencyStrategy()
    if components.is_dit_component_name(name):
        _log.warning("%s (%s) does not stream: its stage does not compile it as others do", name, type(module).__name__)
    return original(name, module, args, **more)


def merge_in_place(original: Callable[..., Any], pipe: Any, name: str, *args: Any, **more: Any) -> Any:
    """Runs AROUND the choice of cache files for merged LoRA weights: for a placed component, there is no cache.

    To back up a weight, SGLang keeps the tensor with the original values and gives the parameter new memory.  For a placed
    weight, this tensor and the parameter are one object, so there would be no backup.
    """
    return None if _streams(pipe.modules[name]) else original(pipe, name, *args, **more)


def fp32_param(norm: Any, attr: str, param: Any, device: Any) -> Any:
    """REPLACES a cache that calls ``data_ptr()``, which breaks the graph of each block under Dynamo, also on GPUs."""
    return None if param is None else param.float().to(device)


def no_key(*args: Any) -> None:
    """REPLACES the key of a cache that lets both guidance branches share the values that a block computes from the timestep.

    With the key, each branch would be compiled into separate programs.  SGLang itself omits the key when it compiles a whole
    model.
    """
