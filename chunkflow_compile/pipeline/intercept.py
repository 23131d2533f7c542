"""Intercept the calls of compiled pipelines.

One generation runs at a time.  Before each generation, the components of the pipeline are checked, and components that no
compiled pipeline contains any more are restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from chunkflow_compile.frontend.adapters import disable_adapters, is_enabled, let_widen, unload
from chunkflow_compile.frontend.compile import uncompile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.budget import Budget, budget_of, unclaim
from chunkflow_compile.pipeline.components import check_unmoved, components_of
from chunkflow_compile.pipeline.phase import Phase
from chunkflow_compile.placed.offload import bring_back

# The name of the class attribute in which ``in_turns`` stores the original class of the pipeline.
_PLAIN_CLASS = "_chunkflow_plain"
_WIDEN = "_maybe_expand_transformer_param_shape_or_error_"


def in_turns(cls: type) -> type:
    """Return a subclass of a pipeline's class.  A call of an instance waits until no other generation runs, checks the
    components of the instance, and then runs the pipeline.

    If ``cls`` is already such a subclass, which happens for copies of compiled pipelines, ``cls`` itself is returned.
    """
    if _PLAIN_CLASS in vars(cls):
        return cls
    call: Callable[..., Any] = cls.__call__  # type: ignore[operator]

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(self)
        if budget is None or _left(self, budget):
            return call(self, *args, **kwargs)
        with budget.turn():
            now = budget_of(self)
            if now is None or _left(self, now):
                # The pipeline was restored while this thread waited.  This thread keeps ``turn`` during the call, so that
                # other threads that also waited call the pipeline one after another.
                return call(self, *args, **kwargs)
            if now is budget:
                _check_components(self, budget)
                with budget.lock():
                    free(unused(budget), budget)
                with budget.generation():
                    return call(self, *args, **kwargs)
        return __call__(self, *args, **kwargs)  # another thread compiled the pipeline again while this thread waited

    body = {
        "__call__": __call__,
        **({"unload_lora_weights": _unloading(cls)} if hasattr(cls, "unload_lora_weights") else {}),
        **({_WIDEN: _widening(cls)} if hasattr(cls, _WIDEN) else {}),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _PLAIN_CLASS: cls,
    }
    return type(cls.__name__, (cls,), body)


def _unloading(cls: Any) -> Callable[..., Any]:
    """Wrap ``unload_lora_weights`` of a pipeline, so that the denoisers and the text encoders keep their adapter slots."""

    @functools.wraps(cls.unload_lora_weights)
    def unload_lora_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = self._lora_loadable_modules
        models = {name: getattr(self, name, None) for name in named}
        enabled = {name: m for name, m in models.items() if isinstance(m, nn.Module) and is_enabled(m)}
        for model in enabled.values():
            # before diffusers unloads, because diffusers may reset layers, and can reset only layers without adapter slots
            unload(model)
        self.__dict__["_lora_loadable_modules"] = [name for name in named if name not in enabled]
        try:
            return cls.unload_lora_weights(self, *args, **kwargs)
        finally:
            del self.__dict__["_lora_loadable_modules"]

    return unload_lora_weights


def _widening(cls: Any) -> Any:
    """Wrap the method with which a pipeline adds inputs to layers for a control LoRA, an adapter with more input channels."""
    widen = getattr(cls, _WIDEN)

    @functools.wraps(widen)
    def widens(_: Any, transformer: Any, lora_state_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        if lora_state_dict and is_enabled(transformer):
            let_widen(transformer, lora_state_dict, cls.transformer_name)
        return widen(transformer, lora_state_dict, *args, **kwargs)

    return classmethod(widens)


def without_turns(cls: type) -> type:
    """Return the original class if :func:`in_turns` has created ``cls``; otherwise return ``cls`` itself."""
    plain: type = vars(cls).get(_PLAIN_CLASS, cls)
    return plain


def unused(budget: Budget) -> list[Phase]:
    """Return the phases of those components that no compiled pipeline contains any more."""
    used = {id(model) for pipe in budget.pipelines for model in components_of(pipe).values()}
    return [phase for phase in budget.phases if id(phase.root) not in used]


def free(phases: Iterable[Phase], budget: Budget) -> None:
    """Restore the components of ``phases``.

    Each component returns to its former device, or to host memory if its former device has too little memory.
    """
    for phase in phases:
        try:
            undo(phase.root, budget)
        except ChunkflowError:
            bring_back(phase.root, "cpu")
            undo(phase.root, budget)


def undo(model: nn.Module, budget: Budget) -> None:
    """Restore a component.

    Raises ChunkflowError, and leaves the component unchanged, if the component does not fit on its former device.
    """
    bring_back(model)
    if (phase := budget.phase_of(model)) is not None:
        if phase.enabled and is_enabled(model):
            disable_adapters(model)
        budget.remove(phase)
    unclaim(model, budget)
    uncompile(model)


def _left(pipe: Any, budget: Budget) -> bool:
    """Whether a pipeline is a shallow copy that still refers to the budget of its original, which has been restored."""
    return pipe not in budget.pipelines and all(budget.phase_of(m) is None for m in components_of(pipe).values())


def _check_components(pipe: Any, budget: Budget) -> None:
    """Raise ChunkflowError if a component was replaced, added, moved or compiled after ``compile``."""
    names = budget.pipelines.get(pipe, frozenset())
    for name, model in components_of(pipe).items():
        phase = budget.phase_of(model)
        if phase is None:
            raise ChunkflowError(
                f"pipe.{name} was {'replaced' if name in names else 'added'} after compile(pipe): call "
                "chunkflow_compile.compile(pipe) again, which places it too."
            )
        check_unmoved(name, phase, budget.device)
