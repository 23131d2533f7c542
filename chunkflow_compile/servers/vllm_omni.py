"""Plug-in for vLLM-Omni: its workers stream the weights of the diffusion transformer within ``CHUNKFLOW_MEMORY``.

vLLM-Omni calls ``plug_in`` in each of its processes, by the entry point ``vllm_omni.general_plugins``, before it loads a
model.  vLLM-Omni has no hooks for plug-ins, so ``plug_in`` wraps three of its functions: one wrapper makes the loader leave
the model on the host, one offloads the transformers before the server installs its own offloading, and one compiles the
transformers with ChunkFlow instead of the server.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.servers.settings import MEMORY, PluginSettings, settings_from

_log = logging.getLogger("vllm_omni.chunkflow")  # The server shows only loggers below vllm_omni.
_DIT = "dit"  # The server's name for the transformers as an offloaded component.


def plug_in() -> None:
    """Wrap the functions of the server if ``CHUNKFLOW_MEMORY`` is set.

    Raises ChunkflowError if a setting is invalid or the release of vLLM-Omni is not supported.  The error ends the process.
    """
    settings = settings_from(os.environ)
    if settings is None:
        return
    settings.check_release("vllm-omni", "0.30", "0.31")
    from vllm_omni.diffusion import offloader
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
    from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

    from chunkflow_compile.servers.scrape import Scrape

    _wrap(DiffusersPipelineLoader, "load_model", _load_on_the_host)
    _wrap(offloader, "get_offload_backend", functools.partial(_backend, settings))
    _wrap(DiffusionModelRunner, "_compile_transformer", functools.partial(_compile, settings, Scrape(settings.port)))
    _declare_collectives()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Wrap a function unless it is wrapped already.  ``around``: called with the original function and then the arguments."""
    theirs = getattr(owner, name)
    if hasattr(theirs, "_chunkflow"):
        return
    ours = functools.wraps(theirs)(lambda *args, **kwargs: around(theirs, *args, **kwargs))
    ours._chunkflow = True  # type: ignore[attr-defined]
    setattr(owner, name, ours)


def _load_on_the_host(theirs: Callable[..., Any], loader: Any, load_device: str, *args: Any, **kwargs: Any) -> Any:
    """Load the pipeline on the CPU, because it may be too large for the device."""
    _check(loader.od_config)
    return theirs(loader, "cpu", *args, **kwargs)


def _check(config: Any) -> None:
    """Raise ChunkflowError for server settings with which no weights would be streamed."""
    from vllm_omni.diffusion.offloader.config import OffloadStrategy, resolve_offload

    offload = resolve_offload(config)
    if config.enforce_eager:
        raise ChunkflowError(
            f"enforce_eager leaves the transformer uncompiled, and only compiled code streams weights: leave out "
            f"--enforce-eager, or unset {MEMORY}."
        )
    if offload.strategy is not OffloadStrategy.NONE and offload.offloads(_DIT):
        raise ChunkflowError(
            f"The server offloads the transformer itself ({offload.strategy.value}), and so does ChunkFlow: leave out "
            f"--enable-cpu-offload, --enable-layerwise-offload and, in the offload config, the component 'dit', or unset "
            f"{MEMORY}."
        )


class _Backend:
    """An OffloadBackend of the server: offloads the transformers, then lets the server place everything else."""

    def __init__(self, settings: PluginSettings, theirs: Any, device: Any) -> None:
        self._settings, self._theirs, self._device = settings, theirs, device
        self._models: list[Any] = []

    def enable(self, pipeline: Any) -> None:
        if hasattr(pipeline, "setup_compile"):
            raise ChunkflowError(
                f"{type(pipeline).__name__} compiles itself (setup_compile), so its transformer cannot be streamed: "
                f"unset {MEMORY}."
            )
        if not (names := _transformers(pipeline)):
            raise ChunkflowError(
                f"{type(pipeline).__name__} has no transformer that the server compiles: unset {MEMORY}."
            )
        for name in names:
            self._models.append(self._settings.place(getattr(pipeline, name), self._device))
        if self._theirs is not None:
            self._theirs.enable(pipeline)
        else:
            pipeline.to(self._device)  # moves everything else: offloaded weights stay on the host

    def disable(self) -> None:
        from chunkflow_compile.frontend.compile import restore

        if self._theirs is not None:
            self._theirs.disable()
        while self._models:
            restore(self._models.pop())

    def shutdown(self) -> None:
        """Called at the end of the process.  Offloaded weights need no cleanup, because the process frees their memory."""
        if self._theirs is not None:
            self._theirs.shutdown()

    def is_enabled(self) -> bool:
        return bool(self._models)


def _backend(
    settings: PluginSettings, theirs: Callable[..., Any], config: Any, device: Any = None, **kwargs: Any
) -> Any:
    return _Backend(settings, theirs(config, device=device, **kwargs), device)


def _compile(settings: PluginSettings, scrape: Any, theirs: Callable[..., Any], runner: Any, name: str) -> None:
    """Compile a transformer by block type, whatever granularity the server uses.  ``scrape``: metrics server."""
    from chunkflow_compile.frontend.compile import compile

    if name not in _transformers(runner.pipeline):
        return
    model = getattr(runner.pipeline, name)
    dynamic = runner.od_config.diffusion_compile_dynamic
    options: dict[str, Any] = {**settings.options, "memory": settings.memory}
    compile(model, dynamic=dynamic, **options)
    scrape.add(model)
    _log.info("%s (%s) is offloaded, and its steps stream within %s", name, type(model).__name__, settings.memory)


def _transformers(pipeline: Any) -> list[str]:
    """Return the names of the attributes of a pipeline that the server compiles.  The server does not compile nested modules
    such as "model.dit"."""
    names = getattr(pipeline, "_dit_modules", None) or ("transformer", "transformer_2")
    return [name for name in names if getattr(pipeline, name, None) is not None]


def _declare_collectives() -> None:
    """Declare the ops of ``ulysses_a2a_permute`` as all-to-alls: they are kernels that read the GPU memory of other ranks."""
    from vllm_omni.diffusion.distributed import a2a_permute

    from chunkflow_compile.passes.graph.declared_collectives import register_collective

    for op in (a2a_permute.ulysses_qkv_fwd, a2a_permute.ulysses_o_rev):
        register_collective(op, "all-to-all")
