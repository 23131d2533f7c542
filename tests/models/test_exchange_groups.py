"""Models whose exchanges under Ulysses are in groups of heads: the same bits, whatever else a call has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import EAGER
from helpers import check_small, small_twins

import chunkflow_compile
from chunkflow_compile import ChunkflowError
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.frontend.exchange_groups import agreed_groups
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.placed.offload import offload

# Eight heads, four on each of two ranks.
SIZE = Size(layers=2, singles=1, heads=8)
GROUPED = {**EAGER, "exchange_groups": 2}

pytestmark = pytest.mark.usefixtures("no_grad")


def groups(model: Any) -> set[int]:
    return {program.program.problem.exchange_groups for program in chunkflow_compile.programs(model)}


def family_on_a_rank(rank: int, family: str, count: int) -> None:
    model, twin = small_twins(family, SIZE, dist.get_world_size())
    offload(model, min_bytes=EAGER["min_bytes"])
    options = {**GROUPED, "exchange_groups": count}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    check_small(run, twin, family, SIZE, range(3))
    (program,) = chunkflow_compile.programs(model)
    assert groups(model) == {count} and program.measurements[-1].moved_bytes > 0
    assert f"in {count} groups of heads" in str(chunkflow_compile.explain(model, details=True))


FAMILIES = [
    pytest.param(*case, marks=[pytest.mark.long] * (case != ("wan", 2, 2)))
    for case in [*itertools.product(("wan", "flux", "hunyuanvideo", "qwen-image"), (2, 4), (2,)), ("wan", 2, 4)]
]


@pytest.mark.parametrize(("family", "count", "ranks"), FAMILIES)
def test_families(family: str, count: int, ranks: int, on_ranks: Callable[..., None]) -> None:
    on_ranks(family_on_a_rank, family, count, world=ranks)


def traced_on_a_rank(rank: int, wanted: tuple[Any, Any], said: str) -> None:
    """The ranks pass these values."""
    model = enable_ulysses(small_model("wan", replace(SIZE, layers=1)), 2)
    traced = trace(model, small_inputs("wan", replace(SIZE, layers=1), 0))
    settings = Settings(hardware=load_profile("cpu"), goal=Goal(exchange_groups=wanted[rank]))
    if wanted[rank] is False:  # does not wait for the other, which learns of it
        assert agreed_groups(traced, settings) == (False, ())
        dist.barrier()
        return
    with pytest.raises(ChunkflowError, match=said):
        agreed_groups(traced, settings)
    if False in wanted:
        dist.barrier()
    else:
        assert agreed_groups(traced, replace(settings, goal=Goal(exchange_groups=4)))[0] == 4


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ((2, 4), r"different values of exchange_groups \(2 on rank 0, 4 on rank 1\)"),
        ((2, False), r"different values of exchange_groups \(2 on rank 0, False on rank 1\)"),
        ((3, 3), r"^exchange_groups=3: 3 groups do not divide the 4 attention heads"),
    ],
)
def test_ranks_that_do_not_agree(wanted: tuple[Any, Any], said: str, on_ranks: Callable[..., None]) -> None:
    """All ranks raise the same error, and can agree afterwards."""
    on_ranks(traced_on_a_rank, wanted, said)
