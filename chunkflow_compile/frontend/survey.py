"""Surveys: calls of a model on fake tensors, which find the minimum budget of a model that is compiled part by part.

If a budget is too small, the first part that does not fit raises an error.  The parts that would run after this part may need
even more memory, but they have not been traced yet.  Therefore the model is called once more, on fake tensors (a *survey*).
In a survey, each part is traced and planned, but no op runs and no weight moves.
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
    """The FakeTensorMode for a call of a model in which each part is planned, but no part runs.

    ``largest``: the error of the part that needs the most memory, among the parts that did not fit the budget so far.
    ``whole``: whether the compilation fails at once if a graph with dynamic shapes does not fit the budget.  If False, the
    graph is compiled again for fixed sizes, at which blocks can be split.
    """

    def __init__(self, first: BudgetError, whole: bool) -> None:
        """``first``: the error of the part that made the ordinary call of the model fail."""
        super().__init__(allow_non_fake_inputs=True)
        self.largest = first
        self.whole = whole

    def note(self, error: BudgetError) -> None:
        """Record the error of a part that does not fit the budget."""
        if error.needed > self.largest.needed:
            self.largest = error


class Unplanned:
    """The callable that the backend returns, during a survey, for a part of a model that does not fit the budget.

    Dynamo keeps the callable in its cache, so ordinary calls and other surveys may call it after this survey.
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
    """Return the survey during which a graph with these ``inputs`` is compiled, or None if the graph is compiled for an
    ordinary call."""
    modes = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    return next((mode for mode in modes if isinstance(mode, Survey)), None)


def surveyed(
    model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, error: BudgetError, whole: bool
) -> BudgetError:
    """Call a model in a survey; return the error of the part that needs the most memory.

    ``call``: a function that calls the model.  ``args``, ``kwargs``: the inputs of the model.  ``error``: the error of the
    part that made the ordinary call fail.  ``whole``: see :class:`Survey`.
    If a model fails on fake tensors, for example because its forward reads values, its remaining parts are not planned.
    """
    if any(caching_hook(module) is not None for module in model.modules()):
        return error  # the hook would keep fake tensors for the next call
    before = [(module, dict(vars(module))) for module in model.modules()]
    survey = Survey(error, whole)
    fakes = tree_map_only(torch.Tensor, survey.from_tensor, (args, kwargs))
    try:
        with survey:
            call(*fakes[0], **fakes[1])
    except Exception as other:  # noqa: BLE001  # a failed survey must not hide the error of the ordinary call
        _log.info("not all parts of %s were planned: %s", type(model).__name__, first_line(other))
    finally:
        for module, attributes in before:  # drop the fake tensors that forward has stored in modules
            vars(module).clear()
            vars(module).update(attributes)
    return survey.largest
