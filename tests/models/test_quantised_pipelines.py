"""Pipelines whose transformer and text encoder are quantised: their bytes stream, in each phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantisers import quanto, torchao
from test_pipelines import EAGER, WAN, models
from torch import nn

from chunkflow_compile import apply, programs, remove
from chunkflow_compile.models.small_pipelines import small_pipeline
from chunkflow_compile.phases import budget_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of, stream_inside

pytest.importorskip("transformers")


def cast_by_layer(model: nn.Module) -> None:
    """Float8 in memory, each layer cast to float32 for its call, in the models of diffusers."""
    if hasattr(model, "enable_layerwise_casting"):
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)


KINDS = {
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "quanto int8": quanto,
    "layerwise casting": cast_by_layer,
}


def nbytes(model: nn.Module) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(model))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")


@pytest.mark.parametrize("kind", ["torchao int8", *(pytest.param(k, marks=pytest.mark.long) for k in [*KINDS][1:])])
def test_a_quantised_pipeline(kind: str) -> None:
    if kind != "layerwise casting" and not stream_inside():
        pytest.skip("needs torch 2.13")
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    plain = nbytes(pipe.transformer)
    for each in (pipe, twin):
        KINDS[kind](each.transformer)
        KINDS[kind](each.text_encoder)
    assert nbytes(pipe.transformer) < 0.5 * plain, "most of it is quantised"
    apply(pipe, memory="1MiB", **EAGER)
    for seed, changed in enumerate([{}, {"prompt": "two cats"}, {"num_inference_steps": 2}]):
        assert torch.equal(WAN.generate(pipe, seed, **changed), WAN.generate(twin, seed, **changed))
    budget = budget_of(pipe)
    assert budget is not None
    for phase in budget.phases:
        if phase.name != "vae":
            check_transfers(phase)
    remove(pipe)
    after, before = ([leaf for model in models(p).values() for leaf in leaves_of(model)] for p in (pipe, twin))
    assert not any(isinstance(leaf, HostWeight) for leaf in after)
    assert all(type(a) is type(b) and torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))


def check_transfers(phase: Any) -> None:
    """Programs have moved all that they read, and most of it is quantised."""
    read = {id(home): home for program in programs(phase.root) for home in program.homes.values()}
    quantised = sum(home.nbytes for home in read.values() if home.host.element_size() == 1)
    moved = [m.moved_bytes + m.primed_bytes for p in programs(phase.root) for m in p.measurements]
    assert quantised > 0 or phase.name == "text_encoder", phase.name
    assert sum(moved) >= sum(home.nbytes for home in read.values()) > 0, phase.name
