"""Run diffusion transformers that do not fit the GPU: ``torch.compile(model, backend="chunkflow")``.

Weights live in host memory and stream to the device through the compiled graph.  See the README for use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from chunkflow_compile.source_tree import show_backend

if TYPE_CHECKING:
    from chunkflow_compile.compiling import compile
    from chunkflow_compile.explaining import explain
    from chunkflow_compile.passes.errors import ChunkflowError
    from chunkflow_compile.pipelines import apply, remove
    from chunkflow_compile.placing import courses, offload, programs, restore
    from chunkflow_compile.replanning import replan
    from chunkflow_compile.runtime.arena import Arena
    from chunkflow_compile.saving import load, save

__all__ = [
    "Arena",
    "ChunkflowError",
    "__version__",
    "apply",
    "compile",
    "courses",
    "explain",
    "load",
    "offload",
    "programs",
    "remove",
    "replan",
    "restore",
    "save",
]
__version__ = "0.1.0"

_HOMES = {
    "Arena": "chunkflow_compile.runtime.arena",
    "ChunkflowError": "chunkflow_compile.passes.errors",
    "apply": "chunkflow_compile.pipelines",
    "compile": "chunkflow_compile.compiling",
    "courses": "chunkflow_compile.placing",
    "explain": "chunkflow_compile.explaining",
    "load": "chunkflow_compile.saving",
    "offload": "chunkflow_compile.placing",
    "programs": "chunkflow_compile.placing",
    "remove": "chunkflow_compile.pipelines",
    "replan": "chunkflow_compile.replanning",
    "restore": "chunkflow_compile.placing",
    "save": "chunkflow_compile.saving",
}

show_backend()


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "torch._dynamo" in sys.modules:
        return getattr(importlib.import_module(_HOMES[name]), name)
    from chunkflow_compile.caches import importing_torch

    with importing_torch():
        return getattr(importlib.import_module(_HOMES[name]), name)
