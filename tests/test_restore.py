"""``restore`` undoes ``compile`` and ``offload``: what is left is the eager model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import Stack, stack, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, compile, offload, programs, remove, restore
from chunkflow_compile.weights.host_buffer import buffer_of

pytestmark = pytest.mark.usefixtures("no_grad")


class Parts(Stack):
    """With a part of torch's own class, which is compiled through a function of ChunkFlow."""

    def __init__(self) -> None:
        super().__init__(3)
        self.before = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.before(x))


def check(model: nn.Module, twin: nn.Module) -> None:
    """A model is the eager one, and stays that."""
    for _ in range(2):
        for name, weight in model.named_parameters():
            assert type(weight) is nn.Parameter and torch.equal(weight, twin.get_parameter(name)), name
        for module, plain in zip(model.modules(), twin.modules(), strict=True):
            left = module.__dict__.keys() - plain.__dict__.keys()
            assert left <= {"_is_torch_compile"}, "a mark that torch.compile itself leaves"
        assert not programs(model)
        x = torch.randn(4, 8)
        assert torch.equal(model(x), twin(x))


def streams(model: nn.Module, twin: nn.Module) -> None:
    for _ in range(2):
        x = torch.randn(4, 8)
        assert torch.equal(model(x), twin(x))
    assert sum(p.plan.moved_bytes for p in programs(model)) > 0
    assert any(buffer_of(p) is not None for p in model.parameters())


def in_place(model: nn.Module, **options: Any) -> None:
    model.compile(backend="chunkflow", fullgraph=True, options={**EAGER, **options})


def block_by_block(model: Any, **options: Any) -> None:
    offload(model, min_bytes=4096)
    for block in model.blocks:
        in_place(block, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "by kind": lambda model, **options: compile(model, **{**EAGER, **options}),
    "in place": in_place,
    "offload, then in place": lambda model, **options: in_place(offload(model, min_bytes=4096), **options),
    "block by block": block_by_block,
}


@pytest.mark.parametrize("way", WAYS)
def test_restore_is_the_inverse_and_the_model_can_be_compiled_again(way: str) -> None:
    model, twin = twins(Parts)
    for options in ({}, {"slowdown": 1.5}, {}):
        WAYS[way](model, **options)
        streams(model, twin)
        assert restore(model) is model
        check(model, twin)


def test_a_model_that_was_never_called(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that is compiled whole, because it has no blocks; restoring twice changes nothing."""
    for make in (Parts, lambda: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8))):
        model, twin = twins(make)
        compile(model, **EAGER)
        for _ in range(2):
            check(restore(model), twin)


def test_a_part_stands_for_the_whole_that_was_placed() -> None:
    model, twin = twins(Parts)
    compile(model, **EAGER)
    streams(model, twin)
    restore(model.blocks[1])
    check(model, twin)


def test_compiled_code_of_other_backends_stays() -> None:
    model, twin = stack(), stack()
    offload(model, min_bytes=4096)
    model.head.compile(backend="eager")
    for block in model.blocks:
        in_place(block)
    streams(model, twin)
    restore(model)
    assert model.head._compiled_call_impl is not None
    assert all(block._compiled_call_impl is None for block in model.blocks)
    with pytest.raises(ChunkflowError, match="A part of this model is compiled already: pass the model itself, before"):
        compile(model, **EAGER)


def test_what_torch_compile_returned_places_the_model_again() -> None:
    """It is another callable than the model, which stays eager until that is called."""
    model, twin = stack(), stack()
    offload(model, min_bytes=4096)
    run = torch.compile(model, backend="chunkflow", options=EAGER)
    for _ in range(2):
        x = torch.randn(4, 8)
        assert torch.equal(run(x), twin(x)) and programs(model)[0].plan.moved_bytes > 0
        restore(run)
        check(model, twin)


def test_a_restore_that_raises_leaves_the_model_compiled() -> None:
    model, twin = twins(Parts)
    compile(model, **EAGER)
    with pytest.raises(ChunkflowError, match="device='gpu' is no device"):
        restore(model, "gpu")
    streams(model, twin)


def test_the_same_functions_for_a_model_and_a_pipeline(quiet: None) -> None:
    """``apply`` and ``remove`` do the same to a pipeline: each pair undoes the other's."""
    pytest.importorskip("transformers")
    from pipelines import EAGER as SMALL
    from pipelines import WAN, expected, is_plain, models, placed, plain, same_weights
    from small_pipelines import small_pipeline

    model, twin = twins(Parts)
    assert compile(model, **EAGER) is model
    streams(model, twin)
    assert restore(restore(model, device="cpu")) is model
    check(model, twin)
    pipe = small_pipeline("wan")
    assert restore(pipe) is pipe and is_plain(pipe), "it was never compiled"
    for start, end in ((chunkflow_compile.apply, restore), (compile, remove)):
        assert start(pipe, memory="1MiB", **SMALL) is pipe and placed(pipe) == {*models(pipe)}
        assert torch.equal(WAN.generate(pipe), expected("wan"))
        assert sum(m.moved_bytes for p in programs(pipe.transformer) for m in p.measurements) > 0
        with pytest.raises(ChunkflowError, match="device applies to models; this is a pipeline"):
            restore(pipe, "cpu")
        assert placed(pipe) == {*models(pipe)}
        assert end(pipe) is pipe and is_plain(pipe) and same_weights(pipe, plain("wan"))


def test_a_restored_component_can_be_applied(quiet: None) -> None:
    pytest.importorskip("transformers")
    from pipelines import EAGER as SMALL
    from pipelines import is_plain, plain, same_weights
    from small_pipelines import small_pipeline

    pipe = small_pipeline("wan")
    compile(pipe.transformer, **SMALL)
    with pytest.raises(ChunkflowError, match=r"compiled already: call chunkflow_compile\.restore\(pipe\.transformer\)"):
        chunkflow_compile.apply(pipe, memory="1MiB", **SMALL)
    restore(pipe.transformer)
    chunkflow_compile.apply(pipe, memory="1MiB", **SMALL)
    remove(pipe)
    assert is_plain(pipe) and same_weights(pipe, plain("wan"))
