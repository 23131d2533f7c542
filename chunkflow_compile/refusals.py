"""Calls that took more than the budget: the next one of these sizes is refused, before its generation begins if possible."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.phase import Phase
from chunkflow_compile.retrying import given_to


@dataclass(frozen=True)
class _Refusal:
    """``nbytes``: of the inputs of the call.  ``asked``: of its generation.  ``state``: of its component, see ``_state``."""

    error: ChunkflowError
    nbytes: int
    asked: object
    state: object


class Refusals:
    """The calls that took too much since an error of one was raised: the calls after that may take less."""

    def __init__(self) -> None:
        self._found: dict[Phase, _Refusal] = {}
        self._asked: object = None  # of this generation, None outside of one

    def generation(self, asked: object) -> None:
        """A generation begins.  ``asked``: see :func:`sizes_asked`.

        Raises the first error, a ChunkflowError, if a call took too much in a generation that was asked for the same.
        """
        self._asked = None
        if any(r.asked == asked and r.state == _state(p) for p, r in self._found.items() if r.asked is not None):
            self._raise()
        self._asked = asked

    def ended(self) -> None:
        """A generation ends."""
        self._asked = None

    def note(self, phase: Phase, call: functools.partial[Any], error: ChunkflowError) -> None:
        """A call took too much."""
        self._found[phase] = _Refusal(error, _nbytes(call), self._asked, _state(phase))

    def check(self, phase: Phase, call: functools.partial[Any]) -> None:
        """Raise the first error, a ChunkflowError, if a call of this phase with no larger inputs took too much."""
        if phase in self._found and _nbytes(call) >= self._found[phase].nbytes:
            self._raise()

    def forget(self, phase: Phase) -> None:
        """A phase is removed."""
        self._found.pop(phase, None)

    def _raise(self) -> None:
        first, *_ = self._found.values()
        self._found.clear()
        raise first.error


def sizes_asked(call: Callable[..., Any], pipe: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What a generation is asked for: equal for calls of one pipeline that differ in prompts and values of tensors only.

    None if the arguments are not those of ``call``.  An argument of an unknown class, such as a callback, is equal to none.
    """
    try:
        given = inspect.signature(call).bind(pipe, *args, **kwargs)
    except (TypeError, ValueError):
        return None
    arguments = list(given.arguments.items())[1:]
    return weakref.ref(pipe), tuple((name, _sizes(name, value)) for name, value in arguments)


def _sizes(name: str, value: Any) -> object:
    if isinstance(value, str) and "prompt" in name:
        return str
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_sizes(name, inner) for inner in value)
    if isinstance(value, Mapping):
        return tuple((key, _sizes(name, inner)) for key, inner in value.items())
    if isinstance(value, torch.Generator):
        return torch.Generator
    for found in (getattr(value, "shape", None), getattr(value, "size", None)):  # of arrays, of images
        if isinstance(found, tuple):
            return type(value), tuple(found)
    return object()


def _state(phase: Phase) -> object:
    """What a component was told by methods such as ``enable_tiling``."""
    return {name: value for name, value in vars(phase.root).items() if isinstance(value, (bool, int, float))}


def _nbytes(call: functools.partial[Any]) -> int:
    """Those of the tensors among the arguments."""
    return sum(tensor.nbytes for tensor in given_to(call, torch.Tensor))
