"""The calls of applied pipelines: one generation at a time, on the components that were applied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from chunkflow_compile.components import components_of
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.phases import Budget, budget_of

# Attribute of a class that ``in_turns`` made: the class that it was made of.
_PLAIN = "_chunkflow_plain"


def in_turns(cls: type) -> type:
    """The class of a pipeline, whose calls wait for each other and check the components.  That of a copy has them."""
    if _PLAIN in vars(cls):
        return cls
    call: Callable[..., Any] = cls.__call__  # type: ignore[operator]

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(self)
        if budget is None:
            return call(self, *args, **kwargs)
        with budget.turn():
            if budget_of(self) is budget:
                _check(self, budget)
                return call(self, *args, **kwargs)
        return __call__(self, *args, **kwargs)  # it was removed by another thread, which this one waited for

    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _PLAIN: cls,
    }
    return type(cls.__name__, (cls,), body)


def without_turns(cls: type) -> type:
    """The class that :func:`in_turns` made this one of; any other as it is."""
    plain: type = vars(cls).get(_PLAIN, cls)
    return plain


def _check(pipe: Any, budget: Budget) -> None:
    """Raise ChunkflowError if a component is another one than at apply."""
    names = budget.pipelines.get(pipe, frozenset())
    for name, model in components_of(pipe).items():
        if budget.phase_of(model) is None:
            raise ChunkflowError(
                f"pipe.{name} was {'replaced' if name in names else 'added'} after apply: call chunkflow_compile.apply(pipe) "
                "again, which places it too."
            )
