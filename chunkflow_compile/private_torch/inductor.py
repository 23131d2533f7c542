"""The names of torch._inductor, which compiles regions, that ChunkFlow uses.

* ``compile_fx``: compiles a graph; takes ``config_patches``.
* ``config``: Inductor's settings.  ``get_config_copy()`` returns all of them, and ``patch`` changes some within a context.
* ``list_mode_options``: the settings of each ``mode`` of torch.compile.
* ``cpu_vec_isa``: ``pick_vec_isa()`` returns the vector instruction set of this CPU, on which cached code depends.
* ``select_decomp_table``: returns the decompositions of ops that Inductor uses.
* ``CppCompileError``, ``InductorError``, ``SubprocException``: the errors that a failed compilation raises.
* ``PyCodeCache``, ``autotuner``: the modules that Inductor has generated, and the class that launches their Triton kernels.
  ``chunkflow bench`` delays these launches.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config, cpu_vec_isa, list_mode_options
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._inductor.compile_worker.subproc_pool import SubprocException
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError, InductorError

__all__ = [
    "CppCompileError",
    "InductorError",
    "PyCodeCache",
    "SubprocException",
    "autotuner",
    "compile_fx",
    "config",
    "cpu_vec_isa",
    "list_mode_options",
    "select_decomp_table",
]


def autotuner() -> Any:
    """Return the class whose method ``run`` launches a Triton kernel.  Raises ImportError if Triton is not installed."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return CachingAutotuner
