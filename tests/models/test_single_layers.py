"""Parts outside the blocks that are a few layers of torch: they run op by op, and whatever changes is noticed."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Block, InTurn, Stack, check_steps, graphs, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, programs, restore
from chunkflow_compile.frontend.block_kinds import runs_op_by_op

EAGER: dict[str, Any] = {**OPTIONS, "lowering": "eager", "min_bytes": 64}

pytestmark = pytest.mark.usefixtures("no_grad")


class Embedder(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8, eps=1e-3), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Own(nn.Module):
    """A weight outside layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table


class Same(nn.Linear):
    """A class of its own, whose forward is torch's."""


class Embedded(InTurn):
    """Blocks of one kind, and what is before and after them."""

    def __init__(self) -> None:
        super().__init__(Block(8) for _ in range(3))
        self.before, self.embedder, self.own, self.after = nn.Linear(8, 8), Embedder(), Own(), Same(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(super().forward(self.own(self.embedder(self.before(input=x)))))


def pair() -> tuple[Any, Any]:
    model, twin = twins(Embedded)
    return chunkflow_compile.compile(model, **EAGER), twin


def test_parts_stream_and_run_op_by_op(caplog: pytest.LogCaptureFixture, kept_dynamo: None) -> None:
    """Inputs of other sizes, strides and dtypes too; gradients and inputs on other devices are refused."""
    caplog.set_level(logging.INFO, "chunkflow_compile.frontend.compile")
    model, twin = pair()
    parts = ["before", "embedder", "after"]
    said = f"Embedded is compiled by kind: Block (3), Own (1); {', '.join(parts)} run op by op"
    assert [r.message for r in caplog.records] == [said]
    check_steps(model, twin, 4)
    assert graphs() == 2 + len(parts)
    (cycle,) = cycles(model)
    assert len(cycle.cycle.calls) == 3 + 1 + len(parts)
    newest = cycle.measurements[-1]
    assert newest.primed_bytes == 0 and newest.moved_bytes == cycle.cycle.plan.moved_bytes > 0
    assert {"before.weight", "embedder.up.weight"} <= {w.name for w in cycle.cycle.plan.streamed}
    for shape in ((2, 8), (3, 4, 8), (4, 8)):
        check_steps(model, twin, 2, shape)
    x = torch.randn(8, 4).t()
    assert torch.equal(model(x), twin(x)), "other strides"
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 8)
        assert torch.equal(model.before(x), twin.before(x))
        assert model.before(x).dtype == torch.bfloat16
    check_steps(model, twin, 1)
    with torch.enable_grad(), pytest.raises(ChunkflowError, match=r"call the model under torch.no_grad\(\)"):
        model(torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="meta and cpu"):
        model.before(torch.randn(4, 8, device="meta"))


def test_copies_and_restore(kept_dynamo: None) -> None:
    """Copies and files have the layers' own forward."""
    model, twin = pair()
    check_steps(model, twin, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(m._compiled_call_impl is None for m in other.modules())
        check_steps(other, twin, 1)
    outer = torch.compile(lambda x: 2 * model.before(x), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8)
    assert torch.equal(outer(x), 2 * twin.before(x)), "under another compilation"
    restore(model)
    assert type(model.before.weight) is nn.Parameter
    assert all(m._compiled_call_impl is None for m in model.modules())
    check_steps(model, twin, 1)


def test_what_changes_in_a_layer_is_noticed() -> None:
    model, twin = twins(lambda: nn.ModuleList([Stack(2), nn.Sequential(nn.GroupNorm(2, 64), nn.Conv1d(64, 64, 3))]))
    inner = model[1]
    chunkflow_compile.compile(model, **EAGER)
    x = torch.randn(2, 64, 16)

    def same() -> bool:
        return all(torch.equal(inner(x), twin[1](x)) for _ in range(2))

    assert same() and programs(model), "compiled"
    for one in (inner, twin[1]):
        one[0].eps, one[1].stride = 0.5, (2,)
    assert same() and inner(x).shape[-1] == 7
    for one in (inner, twin[1]):
        one[1].weight.add_(1)
    assert same()
    hooks = [one[1].register_forward_hook(lambda module, args, output: 2 * output) for one in (inner, twin[1])]
    assert same()
    for hook in hooks:
        hook.remove()
    for one in (inner, twin[1]):
        one[1].weight = nn.Parameter(torch.ones(8, 64, 1))
        one[1].bias = None
    assert same(), "a weight of another shape"


def test_a_layer_that_writes_its_weight() -> None:
    model, twin = twins(lambda: nn.ModuleList([Stack(2), nn.Embedding(16, 32)]))
    chunkflow_compile.compile(model, **EAGER)
    index = torch.tensor([1, 3])
    assert torch.equal(model[1](index), twin[1](index))
    for one in (model, twin):
        one[1].max_norm = 0.5
    for _ in range(2):
        assert torch.equal(model[1](index), twin[1](index))
    assert torch.equal(model[1].weight.cpu(), twin[1].weight), "only the rows that were read"


def test_which_parts_run_op_by_op() -> None:
    few, many = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)), nn.ReLU()) for n in (8, 9))
    assert all(runs_op_by_op(part, 64) for part in (Embedder(), Same(8, 8), few))
    assert not any(runs_op_by_op(part, 64) for part in (Own(), nn.LSTM(8, 8), nn.MultiheadAttention(8, 2), many))
