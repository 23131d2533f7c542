"""Models whose exchanges under Ulysses are in groups of heads: the same bits, whatever else a call has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import check_small, small_twins

import chunkflow_compile
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.placed.offload import offload

# Eight heads, four on each of two ranks.
SIZE = Size(layers=2, singles=1, heads=8)

pytestmark = pytest.mark.usefixtures("no_grad")


def compiled(family: str, ranks: int = 2, size: Size = SIZE, **options: Any) -> tuple[Any, Any, Any]:
    """A small model, what it is compiled to with exchanges in two groups, and an equal one."""
    model, twin = small_twins(family, size, ranks)
    offload(model, min_bytes=EAGER["min_bytes"])
    chosen = {**EAGER, "exchange_groups": 2, **options}
    return model, torch.compile(model, backend="chunkflow", fullgraph=True, options=chosen), twin


def groups(model: Any) -> set[int]:
    return {program.program.problem.exchange_groups for program in chunkflow_compile.programs(model)}


def family_on_rank(rank: int, family: str, count: int) -> None:
    model, run, twin = compiled(family, exchange_groups=count)
    check_small(run, twin, family, SIZE, range(3))
    (program,) = chunkflow_compile.programs(model)
    assert groups(model) == {count} and program.measurements[-1].moved_bytes > 0


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", ["wan", "flux", "hunyuanvideo", "qwen-image"])
def test_families(family: str, count: int, on_ranks: Callable[..., None]) -> None:
    on_ranks(family_on_rank, family, count)
