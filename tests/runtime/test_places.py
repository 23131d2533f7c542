"""How much work a new size is, whose programs come into the places of a cycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack

import chunkflow_compile
from chunkflow_compile import programs
from chunkflow_compile.passes.program import happens_before


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The labels of the ops that were unrolled."""
    labels: list[str] = []
    issued = happens_before.Issued

    def counted(*args: Any, **kwargs: Any) -> happens_before.Issued:
        labels.append(args[1])
        return issued(*args, **kwargs)

    monkeypatch.setattr(happens_before, "Issued", counted)
    yield labels


def work(layers: int, unrolled: list[str]) -> list[int]:
    """Ops unrolled at each of three new sizes of a model that is compiled by kind and streams."""
    torch._dynamo.reset()
    options = {**OPTIONS, "lowering": "eager", "slowdown": None, "policy": "chunkflow", "weight_memory": 60_000}
    model = Stack(layers).eval()
    compiled = chunkflow_compile.compile(model, **options)
    unrolled_ops = []
    for rows in (4, 6, 8, 10):
        unrolled.clear()
        compiled(torch.randn(rows, 8))
        # the plans of the first pass are another thing: the cycle's own proof
        unrolled_ops.append(len(unrolled))
        for _ in range(3):
            compiled(torch.randn(rows, 8))
    assert any(m.moved_bytes for p in programs(model) for m in p.measurements)
    return unrolled_ops[1:]


def test_the_work_of_a_new_size_grows_with_the_number_of_blocks(unrolled: list[str], no_grad: None) -> None:
    few, many = work(8, unrolled), work(24, unrolled)
    assert 0 < many[0] <= 3.5 * few[0], "not with its square"
    assert many[1:] == [0, 0], "the programs of one graph are proved once for all sizes"
