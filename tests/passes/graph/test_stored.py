"""A traced graph as a JSON body, and back: every pass gives the same for both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Stack
from torch import nn

from chunkflow_compile.catalog.families import FAMILIES
from chunkflow_compile.catalog.quantised import quantised
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import SMALL_MODELS
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.stored import body_of, traced_from
from chunkflow_compile.passes.graph.traced import Repeats, Traced
from chunkflow_compile.passes.problem import Problem

SIZE = Size(layers=1, singles=1, head_dim=64)


def small(family: str, quantize: Any = None) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = FAMILIES[family].model_and_inputs(SMALL_MODELS[family](SIZE), SIZE, torch.bfloat16)
    return model if quantize is None else quantised(model, quantize), inputs


class Constant(Stack):
    """Adds a constant, as HunyuanVideo compares with one, and returns a tuple."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
        return (super().forward(x + torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(4)),)


def with_a_constant() -> tuple[nn.Module, dict[str, Any]]:
    return Constant(2, 64), {"x": torch.randn(4, 8, dtype=torch.bfloat16)}


def read_back(traced: Traced) -> Traced:
    return traced_from(json.loads(json.dumps(body_of(traced))))


@pytest.mark.parametrize(
    "make,degree,constants",
    [
        pytest.param(with_a_constant, 1, 1, id="a constant"),
        pytest.param(partial(small, "wan", "nf4"), 2, 0, id="wan-nf4"),
        *(
            pytest.param(partial(small, family, quantize), degree, constants, id=family, marks=pytest.mark.long)
            for family, quantize, degree, constants in (
                ("wan", None, 2, 0),
                ("hunyuanvideo", None, 1, 1),
                ("flux", "nf4", 1, 0),
                ("qwen-image", None, 1, 0),
            )
        ),
    ],
)
def test_every_pass_gives_the_same_for_a_graph_that_was_stored(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], degree: int, constants: int
) -> None:
    """Wan has tensors of three dtypes in nf4, and Ulysses collectives."""
    traced = trace_without_weights(make, degree, 4096, torch.bfloat16)
    assert len(traced.graph.graph.find_nodes(op="get_attr")) == constants
    again = read_back(traced)
    assert json.dumps(body_of(again)) == json.dumps(body_of(traced))
    first, second = make_cut(traced), make_cut(again)
    assert first.problem == second.problem and first.data_flow == second.data_flow
    assert len(first.problem.regions) > 2 and any(w.keep is None for w in first.problem.weights)
    assert bool(first.problem.collectives) == (degree > 1)
    assert again.large == traced.large and len(again.large) > 2
    able = packable(first)
    assert able
    assert packed(first, able).problem == packed(second, able).problem
    assert Problem.from_body(json.loads(json.dumps(first.problem.body))) == first.problem


def test_what_cannot_be_written_whole_is_an_error() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.inside(x) + self.count

    with pytest.raises(ValueError, match="An input is written"):
        body_of(trace_without_weights(lambda: (Written(), {"x": torch.randn(4, 8)})))
    traced = trace_without_weights(lambda: (nn.Linear(8, 8), {"input": torch.randn(4, 8)}))
    with pytest.raises(ValueError, match="one block of a model"):
        body_of(replace(traced, repeats=Repeats(count=2)))


def test_a_body_names_ops_of_torch_only() -> None:
    """Nothing that a file names is called, and no other object is looked up."""
    traced = trace_without_weights(lambda: (nn.Linear(8, 8), {"input": torch.randn(4, 8)}))
    body = json.loads(json.dumps(body_of(traced)))
    (row,) = (row for row in body["nodes"] if row[2] == "aten.addmm.default")
    for name in ("os.system.call", "aten.addmm.__class__", "aten.addmm", "builtins.eval.x"):
        row[2] = name
        with pytest.raises((ValueError, AttributeError)):
            traced_from(body)
    row[2], row[3] = "aten.addmm.default", {"dtype": "load"}
    with pytest.raises(ValueError, match="is no dtype"):
        traced_from(body)
