"""Run diffusion transformers that are too large for GPU memory: ``torch.compile(model, backend="chunkflow")``.

Weights stay in host memory, and the compiled graph streams them to the device while it computes.  The README shows how to
use it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkflow_compile.catalog.branches import exchange_branches as exchange_branches
    from chunkflow_compile.catalog.ulysses import enable_ulysses as enable_ulysses
    from chunkflow_compile.frontend.adapters import enable_adapters as enable_adapters
    from chunkflow_compile.passes.errors import ChunkflowError as ChunkflowError
    from chunkflow_compile.passes.graph.declared_collectives import register_collective as register_collective
    from chunkflow_compile.pipeline.api import compile as compile
    from chunkflow_compile.pipeline.api import restore as restore
    from chunkflow_compile.pipeline.apply import apply as apply
    from chunkflow_compile.pipeline.apply import remove as remove
    from chunkflow_compile.pipeline.explain import explain as explain
    from chunkflow_compile.pipeline.metrics import metrics as metrics
    from chunkflow_compile.pipeline.request_adapters import use_adapters as use_adapters
    from chunkflow_compile.pipeline.spans import spans as spans
    from chunkflow_compile.placed.offload import cycles as cycles
    from chunkflow_compile.placed.offload import offload as offload
    from chunkflow_compile.placed.offload import programs as programs
    from chunkflow_compile.placed.replan import replan as replan
    from chunkflow_compile.runtime.arena import Arena as Arena
    from chunkflow_compile.servers.admit import admit as admit

__version__ = "0.1.0"

_HOMES = {
    "admit": "chunkflow_compile.servers.admit",
    "Arena": "chunkflow_compile.runtime.arena",
    "ChunkflowError": "chunkflow_compile.passes.errors",
    "apply": "chunkflow_compile.pipeline.apply",
    "compile": "chunkflow_compile.pipeline.api",
    "cycles": "chunkflow_compile.placed.offload",
    "enable_adapters": "chunkflow_compile.frontend.adapters",
    "enable_ulysses": "chunkflow_compile.catalog.ulysses",
    "exchange_branches": "chunkflow_compile.catalog.branches",
    "explain": "chunkflow_compile.pipeline.explain",
    "metrics": "chunkflow_compile.pipeline.metrics",
    "offload": "chunkflow_compile.placed.offload",
    "programs": "chunkflow_compile.placed.offload",
    "register_collective": "chunkflow_compile.passes.graph.declared_collectives",
    "remove": "chunkflow_compile.pipeline.apply",
    "replan": "chunkflow_compile.placed.replan",
    "restore": "chunkflow_compile.pipeline.api",
    "spans": "chunkflow_compile.pipeline.spans",
    "use_adapters": "chunkflow_compile.pipeline.request_adapters",
}
__all__ = sorted([*_HOMES, "__version__"])


def __dir__() -> list[str]:
    """List the public names, without the modules and helpers that this file imports."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "torch._dynamo" in sys.modules:
        return getattr(importlib.import_module(_HOMES[name]), name)
    from chunkflow_compile.hardware.caches import importing_torch

    with importing_torch():
        return getattr(importlib.import_module(_HOMES[name]), name)


def _register_backend() -> None:
    """Register the backend with torch if this is a source tree that is not installed.

    torch finds the backend of an installed package by its entry point.
    """
    if not (Path(__file__).parent.parent / "pyproject.toml").exists():
        return
    from importlib.metadata import entry_points

    if not entry_points(group="torch_dynamo_backends", name="chunkflow"):
        from chunkflow_compile.hardware.caches import importing_torch

        with importing_torch():
            from chunkflow_compile.frontend.backend import chunkflow
            from chunkflow_compile.private_torch.dynamo import register_backend
        register_backend(chunkflow)


_register_backend()
