"""Surveys: the least budget for all parts of a model that are compiled one by one.

The first part for which a budget is too small raises an error, before later parts are traced, which may need more.  A survey
calls the model once more, on fake tensors: each part is traced and planned, and nothing runs or moves.
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
from chunkflow_compile.runtime.graph import on_fakes

_log = logging.getLogger(__name__)


class Survey(FakeTensorMode):
    """The mode of a call that plans each part and runs none.

    ``largest``: the error of the part that needs most so far.  ``whole``: whether graphs with symbolic sizes are not compiled
    for each size, because the call that failed had compiled them before.
    """

    def __init__(self, first: BudgetError, whole: bool) -> None:
        """``first``: the error of the call that failed."""
        super().__init__(allow_non_fake_inputs=True)
        self.largest = first
        self.whole = whole

    def note(self, error: BudgetError) -> None:
        """A part has too little memory."""
        if error.needed > self.largest.needed:
            self.largest = error


class Unplanned:
    """A part that had too little memory in a survey, as Dynamo calls it, also in later surveys from its cache."""

    def __init__(self, graph: GraphModule, error: BudgetError) -> None:
        self._graph, self._error = graph, error

    def __call__(self, *inputs: Any) -> Any:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is None:
            raise self._error
        if isinstance(mode, Survey):
            mode.note(self._error)
        return on_fakes(mode, self._graph, inputs)


def survey_of(inputs: Sequence[Any]) -> Survey | None:
    """The survey in whose call a graph with these inputs is compiled, None if it is compiled for a call that runs."""
    modes = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    return next((mode for mode in modes if isinstance(mode, Survey)), None)


def surveyed(
    model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, error: BudgetError, whole: bool
) -> BudgetError:
    """The error of the part of a model that needs most.

    ``call``: calls the model, and has raised ``error``, which is returned if the model cannot run on fake tensors, as
    when its forward reads values.  ``whole``: see :class:`Survey`.
    """
    if any(caching_hook(module) is not None for module in model.modules()):
        return error  # it would keep fake tensors for the next call
    before = [(module, dict(vars(module))) for module in model.modules()]
    survey = Survey(error, whole)
    fakes = tree_map_only(torch.Tensor, survey.from_tensor, (args, kwargs))
    try:
        with survey:
            call(*fakes[0], **fakes[1])
    except Exception as other:  # noqa: BLE001  # whatever it is, the first error remains
        _log.info("not all parts of %s were planned: %s", type(model).__name__, first_line(other))
    finally:
        for module, attributes in before:  # what forward has kept is a fake tensor
            vars(module).clear()
            vars(module).update(attributes)
    return survey.largest
