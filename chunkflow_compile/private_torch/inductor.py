"""The names of torch._inductor, which compiles regions, that ChunkFlow uses.

* ``compile_fx``: compiles a graph; takes ``config_patches``.
* ``config``: its settings.  ``get_config_copy()`` has all names, ``patch`` sets some for a while.
* ``list_mode_options``: the settings of each ``mode`` of torch.compile.
* ``cpu_vec_isa``: ``pick_vec_isa()`` names the instructions of this CPU, which its cached code depends on.
* ``select_decomp_table``: the ops that it decomposes.
* ``CppCompileError``, ``InductorError``, ``SubprocException``: what a failed compilation raises.
* ``PyCodeCache``, ``autotuner``: the code that it has made, of which ``chunkflow bench`` counts the launches.
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
    """The class whose ``run`` launches a Triton kernel.  Raises ImportError without Triton."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return CachingAutotuner
