"""The minimum that an error states is enough for all parts of a model, and with less the error comes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import Block, Stack, memory_named, small_twins, twins
from pipelines import FLUX, Applied, expected
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import small_inputs
from chunkflow_compile.frontend.survey import Survey
from chunkflow_compile.passes.errors import BudgetError, shortage

pytestmark = pytest.mark.usefixtures("no_grad")

SIZE = Size(layers=2, singles=1, height=16, width=16, text=64)
OPTIONS: dict[str, Any] = {**EAGER, "slowdown": None, "min_bytes": 0}


class TwoTypes(Stack):
    """Blocks of two types between two projections, of which the second type needs most."""

    def __init__(self) -> None:
        super().__init__(2, 64)
        self.others = nn.ModuleList(Block(64, 512) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in (*self.blocks, *self.others):
            x = block(x)
        return self.head(x)


def pair_of(family: str) -> tuple[Any, Any]:
    """``family``: also "small", the model above."""
    return twins(TwoTypes) if family == "small" else small_twins(family, SIZE)


def inputs_of(family: str, seed: int) -> dict[str, Any]:
    if family == "small":
        return {"x": torch.randn(1, 128, 8, generator=torch.Generator().manual_seed(seed))}
    return small_inputs(family, SIZE, seed)


def short(model: Any, family: str, memory: int, **options: Any) -> BudgetError:
    """The error of a call of a model that is compiled by kind with too little memory."""
    chunkflow_compile.compile(model, memory=memory, **OPTIONS, **options)
    with pytest.raises(ChunkflowError, match=r"memory=.* is too little: .* for activations.* Give memory=") as told:
        model(**inputs_of(family, 0))
    assert isinstance(told.value, torch._dynamo.exc.BackendCompilerFailed)
    chunkflow_compile.restore(model)
    found = shortage(told.value)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("small", 1),
        pytest.param("flux", "auto", marks=pytest.mark.long),
        *(pytest.param("qwen-image", n, marks=pytest.mark.long) for n in (1, "auto", 2)),
    ],
)
def test_parts_that_are_planned_one_by_one(family: str, split: Any) -> None:
    """The embedders have too little first, then each type of block: the error is that of the one that needs most."""
    model, twin = pair_of(family)
    error = short(model, family, 100 << 10, split=split)
    assert short(model, family, error.needed - 1, split=split).needed == error.needed
    assert error.needed <= memory_named(error) <= 1.1 * error.needed
    chunkflow_compile.compile(model, memory=error.needed, split=split, **OPTIONS)
    for seed in range(3):
        inputs = inputs_of(family, seed)
        torch.testing.assert_close(model(**inputs)[0], twin(**inputs)[0], rtol=1e-4, atol=1e-5)
    programs = [call.program for call in chunkflow_compile.programs(model)]
    assert max(p.plan.device_bytes + p.problem.live_bytes for p in programs) <= error.needed


@pytest.mark.long
def test_a_pipeline(applied: Applied) -> None:
    call = {"num_inference_steps": 2, "output_type": "latent"}
    memory = 160 << 10  # for the largest weight
    for _ in range(2):
        pipe, _ = applied("flux", memory=memory)
        with pytest.raises(ChunkflowError, match=r"too little for transformer .*: one of its programs needs") as told:
            FLUX.generate(pipe, **call)
        chunkflow_compile.restore(pipe)
        least, memory = memory_named(told.value), int(0.99 * memory_named(told.value))
    pipe, _ = applied("flux", memory=least)
    torch.testing.assert_close(FLUX.generate(pipe, **call), expected("flux", **call), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["small", pytest.param("flux", marks=pytest.mark.long)])
def test_another_plan(family: str) -> None:
    model, twin = pair_of(family)
    chunkflow_compile.compile(model, memory="8MiB", **OPTIONS)
    inputs = inputs_of(family, 0)
    want = twin(**inputs)[0]
    assert torch.equal(model(**inputs)[0], want)
    for memory in (100 << 10, 300 << 10):
        with pytest.raises(ChunkflowError, match=r"memory=.* is too little") as told:
            chunkflow_compile.replan(model, memory=memory)
        least = shortage(told.value)
        assert least is not None and least.needed > memory
        assert torch.equal(model(**inputs)[0], want)
    chunkflow_compile.replan(model, memory=least.needed)
    assert torch.equal(model(**inputs)[0], want)


class Reading(nn.Module):
    """Reads a value on the host between two parts, and keeps what the second one returns."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2))
        self.head = nn.Linear(64, 512)
        self.reads, self.kept = reads, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.reads and x.sum().item() > 1e9:
            return x
        self.kept = self.head(x)
        return self.kept


@pytest.mark.parametrize("reads", [False, True])
def test_a_model_that_cannot_run_on_fake_tensors(reads: bool) -> None:
    """The error is then that of the first part.  A survey leaves no fake tensor in the model."""
    model, x = Reading(reads).eval(), torch.randn(4, 64)
    chunkflow_compile.compile(model, memory=10_000, **OPTIONS)
    with pytest.raises(ChunkflowError, match="is too little") as told:
        model(x)
    assert model.kept is None
    found = shortage(told.value)
    assert found is not None and (found.needed < model.head.weight.nbytes) == reads


def test_the_largest_need_is_kept() -> None:
    first, other = BudgetError("a", 2), BudgetError("b", 3)
    survey = Survey(first, whole=False)
    for error in (BudgetError("c", 1), other, first):
        survey.note(error)
    assert survey.largest is other
