"""Surveys: find the minimum budget for all parts of a model that are compiled one by one.

If a budget is too small, the first part that does not fit raises an error.  Later parts may need even more, but they have not
been traced by then.  A survey calls the model once more on fake tensors, so that each part is traced and planned, but nothing
runs or moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from chunkflow_compile.frontend.block_kinds import caching_hook
from chunkflow_compile.passes.errors import BudgetError, first_line
from chunkflow_compile.private_torch import core
from chunkflow_compile.runtime.graph import on_fakes

_log = logging.getLogger(__name__)


class Survey(FakeTensorMode):
    """The FakeTensorMode of a call that plans each part of a model, but runs none.

    ``largest``: the error of the part that needs the most memory so far.  ``whole``: whether graphs with dynamic shapes are
    kept, instead of compiling them for each size, because the call that failed had already compiled them.
    """

    def __init__(self, first: BudgetError, whole: bool) -> None:
        """``first``: the error that the failed call has raised."""
        super().__init__(allow_non_fake_inputs=True)
        self.largest = first
        self.whole = whole

    def note(self, error: BudgetError) -> None:
        """Note the error of a part that does not fit the budget."""
        if error.needed > self.largest.needed:
            self.largest = error


class Unplanned:
    """The callable that Dynamo gets for a part of a model that did not fit the budget in a survey.

    Dynamo keeps it in its cache, so later surveys may call it, too.
    """

    def __init__(self, graph: GraphModule, error: BudgetError) -> None:
        self._graph, self._error = graph, error

    def __call__(self, *inputs: Any) -> Any:
        mode = core.fake_mode()
        if mode is None:
            raise self._error
        if isinstance(mode, Survey):
            mode.note(self._error)
        return on_fakes(mode, self._graph, inputs)


def survey_of(inputs: Sequence[Any]) -> Survey | None:
    """The survey for which a graph with these inputs is compiled; None if it is compiled for an ordinary call."""
    modes = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    return next((mode for mode in modes if isinstance(mode, Survey)), None)


def surveyed(
    model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, error: BudgetError, whole: bool
) -> BudgetError:
    """Survey a model; return the error of the part that needs the most memory.

    ``call``: calls the model.  ``args``, ``kwargs``: its inputs.  ``error``: the error that it has raised.  This error is
    returned if the model cannot run on fake tensors, for example because its forward reads values.  ``whole``: see
    :class:`Survey`.
    """
    if any(caching_hook(module) is not None for module in model.modules()):
        return error  # the hook would keep fake tensors for the next call
    before = [(module, dict(vars(module))) for module in model.modules()]
    survey = Survey(error, whole)
    fakes = tree_map_only(torch.Tensor, survey.from_tensor, (args, kwargs))
    try:
        with survey:
            call(*fakes[0], **fakes[1])
    except Exception as other:  # noqa: BLE001  # the first error is raised in any case
        _log.info("not all parts of %s were planned: %s", type(model).__name__, first_line(other))
    finally:
        for module, attributes in before:  # drop fake tensors that forward has stored
            vars(module).clear()
            vars(module).update(attributes)
    return survey.largest
