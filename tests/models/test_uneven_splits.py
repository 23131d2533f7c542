"""What Ulysses cannot split evenly: an error with both numbers, eagerly and from under Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import graphs

from chunkflow_compile import ChunkflowError, programs
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.models.ulysses import enable_ulysses

EAGER: dict[str, Any] = {**OPTIONS, "lowering": "eager"}


def uneven_on_a_rank(rank: int, ways: list[tuple[str, str]]) -> None:
    size = Size(layers=1, singles=1, frames=1, height=6, width=10)  # 15 tokens of an image
    for given, how in ways:
        torch._dynamo.reset()  # the first graph of each model is the first of its code
        model, twin = small_model(given, size), small_model(given, size)
        uneven = replace(size, text=5) if given == "flux" else size
        for m in (model, twin):
            enable_ulysses(m, 2)
        tokens, near = (5, "4 or 6") if given == "flux" else (15, "14 or 16")
        run: Any = model
        if how != "eager":
            dynamic = {"dynamic": True} if how == "symbolic" else {}
            run = torch.compile(model, backend="chunkflow", fullgraph=how != "in parts", options=EAGER, **dynamic)
        even, before = replace(size, height=8, text=8), graphs()
        with torch.no_grad():
            for step in range(4):
                if step == 3:
                    made = (graphs() - before, len(programs(model)))
                    assert how == "eager" or made == (1, 1), "the check costs no graph"
                    with pytest.raises(ChunkflowError, match=rf"2 equal parts, and {tokens} tokens .*there are {near}"):
                        run(**small_inputs(given, uneven, 0))
                inputs = small_inputs(given, even, step)
                torch.testing.assert_close(run(**inputs)[0], twin(**inputs)[0], atol=0, rtol=0)
    with pytest.raises(
        ChunkflowError, match=r"the 3 heads of blocks\.0\.attn1 .* cannot be split so: .* degree of 1, 3"
    ):
        enable_ulysses(small_model("wan", Size(layers=1, heads=3)), 2)


@pytest.mark.parametrize(
    "ways",
    [
        [("wan", "eager"), ("wan", "whole"), ("flux", "in parts")],
        pytest.param([("flux", "symbolic")], marks=pytest.mark.long),
    ],
)
def test_what_the_degree_does_not_divide(on_ranks: Callable[..., None], ways: list[tuple[str, str]]) -> None:
    on_ranks(uneven_on_a_rank, ways)
