"""The callables that replace the calls of compiled models and blocks."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from chunkflow_compile.frontend.backend import CompilationError, chunkflow
from chunkflow_compile.frontend.survey import surveyed
from chunkflow_compile.passes.errors import BudgetError, ChunkflowError, shortage
from chunkflow_compile.placed.compile_progress import CompileProgress
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.private_torch.dynamo import maybe_mark_dynamic


class CompiledForward:
    """A compiled forward that a caching hook (a hook of a step cache) calls instead of a module's original forward.

    When the hook is removed, diffusers assigns this object to the ``forward`` attribute of the module.
    ``eager``: the original forward.
    """

    def __init__(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        functools.update_wrapper(self, eager)
        self.eager, self._compiled = eager, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the original forward, so that the copy of a module runs eagerly."""
        return copy.deepcopy(self.eager, memo)


class EagerForNested:
    """Calls a compiled block, or runs the block eagerly if an input is a nested tensor with the strided layout.

    Dynamo's guards crash on nested tensors with this layout.  nn.TransformerEncoder passes them to its layers if it gets a
    padding mask.
    """

    def __init__(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._eager, self._compiled = eager, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided:
                return self._eager(*args, **kwargs)
        return self._compiled(*args, **kwargs)


class CallWithDynamicSizes:
    """Calls a compiled block, and makes an input size dynamic if this size differs from the first call of the block.

    By default, torch makes a size dynamic if it changes between two calls of the same code.  But the blocks on different
    levels of a model, such as the decoder of a VAE, run the same code at different sizes within one call of the model.  This
    class therefore compares the sizes of a block only with sizes of the same block.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        """``call``: the call of the block, compiled with ``dynamic=False``."""
        self._call = call
        self._first: list[torch.Size] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sizes = [tensor.shape for tensor in tensors]
        if self._first is None:
            self._first = sizes
        elif sizes != self._first:
            for tensor, first in zip(tensors, self._first, strict=False):
                maybe_mark_dynamic(tensor, _changed(tensor.shape, first))
        return self._call(*args, **kwargs)


def _changed(sizes: torch.Size, first: torch.Size) -> list[int]:
    """Return the dimensions in which two shapes differ.

    The height and width of images and videos are always included.  If only one of them differs in this call, the other one
    may differ in a later call.
    """
    plane = range(len(sizes) - 2, len(sizes)) if len(sizes) >= 4 else ()
    return [d for d in range(len(sizes)) if d in plane or sizes[d : d + 1] != first[d : d + 1]]


class CallWithProgress:
    """Calls a compiled model and shows the progress of its compilations.

    If the budget is too small for parts of the model, the call raises the error of the part that needs the most memory.  When
    a call fails, this object ends the programs that the call has started.  Otherwise later plans would leave memory for the
    activations of these programs, although no call with their input sizes has succeeded.
    """

    def __init__(self, model: nn.Module, progress: CompileProgress, whole: bool = False) -> None:
        """``whole``: whether the model is compiled as one graph."""
        self._called, self._progress, self._whole = model._compiled_call_impl, progress, whole
        self._model = weakref.ref(model)  # the model refers to this object; a strong reference would close a cycle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        call = self._called or model._call_impl
        if torch.compiler.is_compiling():  # Dynamo is tracing code that calls the model
            return call(*args, **kwargs)
        placement = placement_of(model)
        if placement is None:
            with self._progress:
                return call(*args, **kwargs)
        before = set(placement.programs)
        with self._progress, placement.store.first_call():
            try:
                return call(*args, **kwargs)
            except Exception as error:
                first = shortage(error)
                # If the GPU ran out of memory although the plans fit the budget, keep the programs: if the call is repeated,
                # they may get smaller plans.
                if first is not None or not isinstance(error, torch.OutOfMemoryError | ChunkflowError):
                    placement.end_programs(before)
                # If there are peers, make no survey (a call on fake tensors, see survey.py), because the ranks would wait for
                # each other in a survey.
                alone = placement.store.peers is None
                if first is not None and not self._whole and alone:
                    _raise_largest(surveyed(model, call, args, kwargs, first, first is error), first, error)
                raise


def _raise_largest(largest: BudgetError, first: BudgetError, error: Exception) -> None:
    """Raise ``largest``, the error of the part that needs the most memory, unless ``largest`` is ``first``.

    ``first``: the error of the part that made the call fail.
    ``error``: the error that the call has raised.  It is either ``first`` itself, or a CompilationError that was raised from
    ``first``.  If it is a CompilationError, ``largest`` is raised as a CompilationError as well.
    """
    if largest is first:
        return
    if first is error:
        raise largest from first
    raise CompilationError(chunkflow, largest, inspect.currentframe()) from largest
