"""Quantised weights stream: the tensors inside them are offloaded, and their bytes cross the link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import OPTIONS
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves, stream_inside

MIN_BYTES = 1024

pytestmark = pytest.mark.skipif(not stream_inside(), reason="needs torch 2.13")


class Blocks(nn.Module):
    """Linear blocks in bfloat16, wide enough for every quantiser."""

    def __init__(self, layers: int = 4, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers)])
        self.register_buffer("table", torch.randn(64, width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.silu(block(x)) + self.table[: x.shape[0]]
        return x


def torchao(config: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, config)())

    return quantise


def quanto(model: nn.Module) -> None:
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)


QUANTISERS = {
    "none": lambda model: None,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao int8 activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto int8": quanto,
}


def tensors(model: nn.Module) -> list[torch.Tensor]:
    held = [*model.parameters(), *model.buffers()]
    return [leaf for tensor in held for _, leaf in leaves(tensor)]


@pytest.mark.parametrize("kind", QUANTISERS)
def test_its_bytes_stream(kind: str, no_grad: None) -> None:
    made = []
    for _ in range(2):
        model = Blocks().eval().requires_grad_(False)
        QUANTISERS[kind](model)
        made.append(model)
    model, twin = made
    large = sum(t.nbytes for t in tensors(twin) if t.nbytes >= MIN_BYTES)
    offload(model, min_bytes=MIN_BYTES)
    assert sum(t.nbytes for t in tensors(model) if isinstance(t, HostWeight)) == large
    options = {**OPTIONS, "min_bytes": MIN_BYTES, "lowering": "eager"}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    for _ in range(3):
        x = torch.randn(8, 128, dtype=torch.bfloat16)
        assert torch.equal(run(x), twin(x))
    (program,) = programs(model)
    assert program.plan.moved_bytes >= 0.95 * large
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 3
    assert program.arena.nbytes == program.plan.arena_bytes
    assert torch.equal(model(x), twin(x)), "eager"
    restore(model)
    assert not any(isinstance(t, HostWeight) for t in tensors(model))
    assert torch.equal(model(x), twin(x))
