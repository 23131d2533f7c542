"""The names of torch._dynamo, which turns a model into FX graphs, that ChunkFlow uses.

* ``OptimizedModule``: the class of the object that ``torch.compile(module)`` returns; ``_orig_mod`` is the module.
* ``compile_lock``: the lock that torch holds while it compiles.  ChunkFlow holds it while it moves weights.
* ``callback_handler``: its ``start_callbacks`` run before each compilation, its ``end_callbacks`` after it.
* ``InstructionTranslator``: ``current_tx()`` returns the translator of the frame that is being traced; the ``output`` of the
  translator contains the graph and the backend.
* ``GuardFilterEntry``: the description of a guard that ``guard_filter_fn`` gets.
* ``dynamo_timed``, ``compilation_time_metrics``: torch's compilation timer and its results.  ChunkFlow's passes use it, too.
* ``BackendCompilerFailed``, ``ShortenTraceback``: base classes of errors that Dynamo passes on without wrapping them.
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
    """Return the name of one of Dynamo's sources, an expression such as ``L['timestep']``.  In some releases of torch,
    ``name`` is a method."""
    return str(source.name() if callable(source.name) else source.name)


def backend_of(compiled: Any) -> Any:
    """Return the backend of a function that torch.compile returned; None if ``compiled`` is another object.

    torch has no function for this.  A variable in the closure of the compiled function contains Dynamo's callback, whose
    attributes lead to the backend.
    """
    if not inspect.isfunction(compiled) or not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    inside: Mapping[str, Any] = inspect.getclosurevars(compiled).nonlocals
    found = next((value for value in inside.values() if hasattr(value, "_torchdynamo_orig_backend")), None)
    while (within := getattr(found, "_torchdynamo_orig_backend", None)) is not None:
        found = within
    return getattr(found, "compiler_fn", found)
