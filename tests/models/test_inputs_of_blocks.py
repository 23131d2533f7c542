"""What is given to blocks that are compiled by kind, by code between them that is not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import InTurn, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import programs
from chunkflow_compile.passes.errors import ChunkflowError

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*runs outside its compiled form"),
]


class Layer(nn.TransformerEncoderLayer):
    """A layer of a user's own."""

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        return 1.0 * super().forward(*inputs, **named)


class Residual(nn.Module):
    """A block that takes a nested tensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


@pytest.mark.parametrize("masked_first", [False, True])
@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, Layer])
def test_a_padding_mask_makes_a_nested_tensor(layer: Any, masked_first: bool) -> None:
    """Of torch's encoder, which is not compiled itself, for its layers, which are."""
    make = lambda: nn.TransformerEncoder(layer(32, 4, 64, 0.0, batch_first=True), 2)  # noqa: E731
    model, twin = twins(make)
    chunkflow_compile.compile(model, **EAGER)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    for step in range(6):
        x = torch.randn(2, 6, 32)
        given = {"src_key_padding_mask": mask} if (step + masked_first) % 2 else {}
        assert torch.equal(model(x, **given), twin(x, **given)), step
    assert sum(m.moved_bytes for p in programs(model) for m in p.measurements) > 0


def test_a_block_that_is_given_a_nested_tensor() -> None:
    model, twin = twins(lambda: InTurn(Residual() for _ in range(2)))
    chunkflow_compile.compile(model, **EAGER)
    for step in range(4):
        x = torch.randn(2, 6, 32)
        nested = torch.nested.nested_tensor([x[0], x[1, :4]])
        assert torch.equal(model(x), twin(x)), step
        for got, expected in zip(model(nested).unbind(), twin(nested).unbind(), strict=True):
            assert torch.equal(got, expected), step
    assert sum(m.moved_bytes for p in programs(model) for m in p.measurements) > 0


class WithTable(nn.Module):
    """Blocks that are given positions from a table, by code that is not compiled."""

    def __init__(self, positions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 32))
        self.blocks = nn.ModuleList(Positioned() for _ in range(2))
        self.positions = positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.positions(self.table))
        return x


class Positioned(Residual):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(x + positions)


@pytest.mark.parametrize(
    "positions", [lambda t: t[:6], lambda t: t[None, :6], lambda t: t.view(2, 32, 32)[1, :6], lambda t: t.t()[:, 0]]
)
def test_a_view_of_a_table_for_a_block(positions: Any) -> None:
    """It is refused as it is, in words that are not those of Dynamo; a copy is right."""
    model, twin = twins(lambda: WithTable(positions))
    chunkflow_compile.compile(model, **EAGER)
    x = torch.randn(2, 6, 32)
    with pytest.raises(ChunkflowError, match=r"^A view of table of shape .* pass a copy, view.clone\(\)"):
        model(x)
    model.positions = lambda table: positions(table).clone()
    for _ in range(3):
        x = torch.randn(2, 6, 32)
        assert torch.equal(model(x), twin(x))
    assert sum(m.moved_bytes for p in programs(model) for m in p.measurements) > 0
