"""The module that holds a graph's weights is found, also if the collector does not list it; otherwise a warning says so."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.placed.placement import placements_of
from chunkflow_compile.units import size

OPTIONS = {**OPTIONS, "lowering": "eager"}
LARGE = 4 * 64 * 32 * 4  # bytes of the weights of a stack of at least min_bytes

Call = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def freeze() -> Iterator[Callable[[], None]]:
    """Hides every object from the collector, as servers do before they fork."""
    yield lambda: (gc.collect(), gc.freeze())[1]
    gc.unfreeze()
    gc.freeze()  # as the tests of the module began


def stack(seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack().eval()


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="chunkflow", fullgraph=True, options=OPTIONS)


def in_blocks(model: Stack) -> Stack:
    for block in model.blocks:
        block.compile(backend="chunkflow", fullgraph=True, options=OPTIONS)
    return model


def by_hand(model: Stack) -> Call:
    """A call of the blocks from an object that is no module, beyond which no caller knows the model."""

    class Pipeline:
        def __init__(self) -> None:
            self.parts = SimpleNamespace(models=[in_blocks(model)])

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts.models[0].embed(x)
            for block in self.parts.models[0].blocks:
                x = block(x)
            return self.parts.models[0].head(x)

    return Pipeline()


def after_another(model: Stack) -> Call:
    """A call of code that was compiled for another model of its class."""
    other, run = stack(1), torch.compile(lambda m, x: m(x), backend="chunkflow", options=OPTIONS)
    for _ in range(2):
        run(other, torch.randn(4, 8))
        restore(other)
    return lambda x: run(model, x)


WAYS: dict[str, Callable[[Stack], Call]] = {
    "whole": compiled,
    "forward": lambda model: compiled(model.forward),
    "in a closure": lambda model: compiled(lambda x: [model][0](x)),
    "in a parent": lambda model: nn.Sequential(compiled(model)),
    "in blocks": in_blocks,
    "in blocks, by hand": by_hand,
    "after another": after_another,
    "offloaded": lambda model: compiled(offload(model, min_bytes=4096)),
    "offloaded, in blocks": lambda model: in_blocks(offload(model, min_bytes=4096)),
}


def assert_streams(model: Stack, run: Call) -> None:
    """Two steps equal those of a twin, and every large weight streams in each of them; the third begins a cycle of blocks."""
    twin = stack()
    for _ in range(2):
        x = torch.randn(4, 8)
        torch.testing.assert_close(run(x), twin(x))
    assert [p.root for p in placements_of(model)] == [model], "one placement for all blocks"
    for session in programs(model):
        session.executor.device.copy.synchronize()
        assert [m.moved_bytes for m in session.measurements] == [session.plan.moved_bytes] * 2
        assert session.executor.traffic.copied_bytes >= session.plan.moved_bytes > 0
    assert sum(w.nbytes for session in programs(model) for w in session.plan.streamed) == LARGE


# Ways that compile blocks of the model, which ``restore`` undoes.
IN_BLOCKS = ("in blocks", "in blocks, by hand", "offloaded, in blocks")
# Also in a process that is forked after that.
FORKED = ("whole", "in blocks", "offloaded")
# The search that "in a closure" needs finds these models too.
LONG = ("forward", "in a parent")


@pytest.mark.parametrize("way", [pytest.param(w, marks=[pytest.mark.long] * (w in FORKED or w in LONG)) for w in WAYS])
def test_a_model_streams_after_gc_freeze(
    way: str, freeze: Callable[[], None], no_grad: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = stack()
    run = WAYS[way](model)
    freeze()
    assert_streams(model, run)
    restore(model)
    assert_streams(model, WAYS[way](model) if way in IN_BLOCKS else run)
    assert "no module" not in caplog.text


def serve(model: Stack, run: Call, send: Any) -> None:
    with torch.no_grad():
        assert_streams(model, run)
    send.send("served")


@pytest.mark.parametrize("way", FORKED)
def test_a_server_that_freezes_and_forks(way: str, freeze: Callable[[], None]) -> None:
    model = stack()
    run = WAYS[way](model)
    freeze()
    receive, send = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=serve, args=(model, run, send))
    child.start()
    send.close()
    try:
        assert receive.poll(60), "the child hangs"
        assert receive.recv() == "served"
        child.join()
    finally:
        child.kill()


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.long)])
def test_parameters_of_no_module_are_warned_of(
    frozen: bool, freeze: Callable[[], None], no_grad: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all graphs, and not if they are small."""
    loose, small = nn.Parameter(torch.randn(8, 137 + frozen)), nn.Parameter(torch.randn(8, 8))
    (freeze if frozen else gc.unfreeze)()
    for function, weight in ((lambda x, w: x @ w, loose), (lambda x, w: 2 * x @ w, loose), (lambda x, w: x @ w, small)):
        x = torch.randn(4, 8)
        torch.testing.assert_close(compiled(function)(x, weight), function(x, weight))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and f"{size(loose.nbytes)} of parameters stay on the device" in said[0]
    assert ("gc.freeze()" in said[0]) == frozen and "chunkflow_compile.offload(model)" in said[0]


def test_blocks_whose_model_is_not_found_are_warned_of(
    freeze: Callable[[], None], no_grad: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is planned by itself, so none of its weights can stream beside another's work."""
    blocks, twin, x = [*in_blocks(stack()).blocks], stack(), torch.randn(4, 32)
    freeze()
    for block, other in zip(blocks, twin.blocks, strict=True):
        torch.testing.assert_close(block(x), other(x))
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and "streams none of the 16.0 KiB of Block" in said[0] and "offload(model)" in said[0]


def test_what_the_warning_says_to_do(no_grad: None, caplog: pytest.LogCaptureFixture) -> None:
    loose = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64, 32))
    x, run = torch.randn(4, 32), compiled(lambda x, a, b: torch.tanh(x @ a) @ b)
    expected = torch.tanh(x @ loose[0]) @ loose[1]
    held = offload(nn.ParameterList(loose), min_bytes=4096)
    torch.testing.assert_close(run(x, *held), expected)
    assert [p.root for p in placements_of(held)] == [held] and len(programs(held)) == 1
    assert "no module" not in caplog.text


def test_a_model_streams_beside_a_parameter_of_no_module(no_grad: None, caplog: pytest.LogCaptureFixture) -> None:
    loose, model, twin = nn.Parameter(torch.randn(8, 149)), stack(), stack()
    for placed in (False, True):
        if placed:
            offload(model, min_bytes=4096)
        run = compiled(lambda x, w: model(x) @ w)
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(run(x, loose), twin(x) @ loose)
        assert sum(w.nbytes for w in programs(model)[-1].plan.streamed) == LARGE
        restore(model)
    assert f"{size(loose.nbytes)} of" in caplog.text


def test_a_model_of_buffers_only_streams(freeze: Callable[[], None], no_grad: None) -> None:
    model = stack()
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            delattr(module, name)
            module.register_buffer(name, parameter.data)
    run = compiled(model)
    freeze()
    assert_streams(model, run)


def test_buffers_of_several_models_are_warned_of(no_grad: None, caplog: pytest.LogCaptureFixture) -> None:
    tables = [nn.Module(), nn.Module()]
    for table in tables:
        table.register_buffer("values", torch.randn(8, 151))
    function, x = lambda x: x @ tables[0].values + x @ tables[1].values, torch.randn(4, 8)
    expected = function(x)
    torch.testing.assert_close(compiled(function)(x), expected)
    assert f"{size(2 * 8 * 151 * 4)} of buffers stay on the device" in caplog.text
    torch._dynamo.reset()
    for table in tables:
        offload(table, min_bytes=4096)
    torch.testing.assert_close(compiled(function)(x), expected)
    assert all(programs(table) for table in tables)
