"""The names of torch._dynamo, which turns a model into FX graphs, that ChunkFlow uses.

* ``OptimizedModule``: what ``torch.compile(module)`` returns; its ``_orig_mod`` is the module.
* ``compile_lock``: held while torch compiles, so that no weight changes its place meanwhile.
* ``callback_handler``: ``end_callbacks`` run after a compilation, ``start_callbacks`` before it.
* ``InstructionTranslator``: ``current_tx()`` is the frame that is traced; ``output`` holds its graph and its backend.
* ``GuardFilterEntry``: what a filter of guards is given.
* ``dynamo_timed``, ``compilation_time_metrics``: torch's timer of compilations, in which the passes count, too.
* ``BackendCompilerFailed``, ``ShortenTraceback``: errors that reach the user as they are, or around ours.
* ``maybe_mark_dynamic``, ``register_backend``, ``config``: settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch._dynamo import config, maybe_mark_dynamic, register_backend
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import compilation_time_metrics, dynamo_timed

__all__ = [
    "BackendCompilerFailed",
    "GuardFilterEntry",
    "InstructionTranslator",
    "OptimizedModule",
    "ShortenTraceback",
    "backend_of",
    "callback_handler",
    "compilation_time_metrics",
    "compile_lock",
    "config",
    "dynamo_timed",
    "maybe_mark_dynamic",
    "register_backend",
    "source_name",
]


def source_name(source: Any) -> str:
    """The name of a source of Dynamo, an expression such as ``L['timestep']``; it is a method in some releases."""
    return str(source.name() if callable(source.name) else source.name)


def backend_of(compiled: Any) -> Any:
    """The backend of a function that torch.compile returned, or None for another object.

    torch has no function for it: Dynamo's callback is in the closure of the function, and leads to the backend.
    """
    if not inspect.isfunction(compiled) or not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    inside: Mapping[str, Any] = inspect.getclosurevars(compiled).nonlocals
    found = next((value for value in inside.values() if hasattr(value, "_torchdynamo_orig_backend")), None)
    while (within := getattr(found, "_torchdynamo_orig_backend", None)) is not None:
        found = within
    return getattr(found, "compiler_fn", found)
