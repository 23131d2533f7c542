"""A placed model inside code that another torch.compile compiles, and regions that the user has marked inside a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import Block, InTurn, Stack, UlyssesBlock, graphs, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import offload, programs

pytestmark = pytest.mark.usefixtures("no_grad")

HOWS = ("by kind", "whole", "placed only")


def placed(how: str, make: Callable[[], Any] = lambda: Stack(3)) -> tuple[Any, Any]:
    model, twin = twins(make)
    if how == "by kind":
        return chunkflow_compile.compile(model, **EAGER), twin
    offload(model, min_bytes=EAGER["min_bytes"])
    if how == "whole":
        model.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    return model, twin


def moved(model: nn.Module) -> int:
    return sum(m.moved_bytes for p in programs(model) for m in p.measurements)


def said_by(step: Callable[[torch.Tensor], torch.Tensor], twin: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """What calls warn of offloaded weights; their outputs are the twin's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(4, 8)
            assert torch.equal(step(x), twin(x))
    return [str(w.message) for w in caught if "offloaded" in str(w.message)]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("backend", "fullgraph"), [("aot_eager", False), ("aot_eager", True), ("eager", False)])
def test_another_backend_around_a_placed_model(how: str, backend: str, fullgraph: bool) -> None:
    """One warning names the model, the backend and what to do."""
    model, twin = placed(how)
    step = torch.compile(lambda x: x + 0.5 * model(x), backend=backend, fullgraph=fullgraph)
    (said,) = said_by(step, lambda x: x + 0.5 * twin(x))
    assert f"backend={backend!r}" in said and "weights of Stack, such as blocks.0.up.weight" in said
    assert "Compile the function that calls Stack with backend='chunkflow'" in said and not moved(model)


def test_another_backend_of_a_placed_model() -> None:
    for compiled in (lambda m: m.compile(backend="aot_eager"), lambda m: m.blocks[1].compile(backend="aot_eager")):
        model, twin = placed("placed only")
        compiled(model)
        assert len([said for said in said_by(model, twin) if "backend='aot_eager'" in said]) == 1


@pytest.mark.parametrize("how", HOWS)
def test_chunkflow_around_a_placed_model(how: str) -> None:
    """As the warning says: weights stream by the plan of the whole function."""
    model, twin = placed(how)
    step = torch.compile(lambda x: x + 0.5 * model(x), backend="chunkflow", fullgraph=True, options=EAGER)
    assert said_by(step, lambda x: x + 0.5 * twin(x)) == [] and len(programs(model)) == 1
    assert all(m.moved_bytes > 0 for p in programs(model) for m in p.measurements)


@pytest.mark.parametrize("how", HOWS[:2])
def test_no_warning_without_another_backend(how: str) -> None:
    model, twin = placed(how)
    after = torch.compile(lambda y: y + 1, backend="aot_eager")
    assert said_by(lambda x: after(model(x)), lambda x: twin(x) + 1) == [] and moved(model) > 0


marked = torch.compiler.nested_compile_region


class Marked(Block):
    """A block that is a marked region."""

    @marked
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@marked
def projected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight)


class PartMarked(Block):
    """A block of which a part is a marked region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(projected(x, self.up.weight.t()))


class TwiceMarked(Block):
    """A marked region in a marked region, of two outputs."""

    @marked
    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return projected(x, self.up.weight.t()), 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, twice = self.both(x)
        return twice + self.down(hidden)


class MarkedUlysses(UlyssesBlock):
    """A block with collectives that is a marked region."""

    @marked
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize("block", [Marked, PartMarked, TwiceMarked])
def test_a_marked_region_is_planned_as_what_is_in_it(block: type[Block], by_kind: bool) -> None:
    model, twin = twins(lambda: InTurn(block(32) for _ in range(3)))
    if by_kind:
        chunkflow_compile.compile(model, **EAGER)
    else:
        offload(model, min_bytes=EAGER["min_bytes"])
        model.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    for _ in range(4):
        x = torch.randn(4, 32)
        assert torch.equal(model(x), twin(x))
    assert graphs() == 1 and moved(model) > 0
    ops = [node for p in programs(model) for r in p.program.regions.values() for node in r.module.graph.nodes]
    assert not any(node.op == "get_attr" or "invoke_subgraph" in str(node.target) for node in ops)
    (flops,) = {sum(r.cost.flops for r in p.program.problem.regions) for p in programs(model)}
    assert flops >= 2 * 2 * 4 * 32 * 64 * (1 if by_kind else 3)


def test_collectives_of_a_marked_region(one_rank: None) -> None:
    model, twin = twins(lambda: InTurn(MarkedUlysses(32, 4) for _ in range(2)))
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=EAGER)
    for _ in range(3):
        x = torch.randn(4, 32)
        assert torch.equal(run(x), twin(x))
    assert len(programs(model)[0].program.problem.collectives) == 2 * 4 and moved(model) > 0
