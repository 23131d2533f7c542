"""Quantised weights stream: the tensors inside them are offloaded, and their bytes cross the link."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from conftest import OPTIONS
from helpers import twins
from quantisers import layerwise_casting, nf4, quanto, torchao
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.streamable import why_not
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves, stream_inside, tensors_of

MIN_BYTES = 1024


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


# Those whose bytes are in tensors inside a tensor subclass.
INSIDE = {
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao int8 activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto int8": quanto,
}
QUANTISERS = {
    "none": lambda model: None,
    "bitsandbytes nf4": nf4(False),
    "bitsandbytes nf4, scales in int8": nf4(True),
    "layerwise casting": layerwise_casting,
    **INSIDE,
}


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [leaf for _, tensor in tensors_of(model) for _, leaf in leaves(tensor)]


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """A quantised model and its twin."""
    model, twin = twins(lambda: Blocks().requires_grad_(False))
    for m in (model, twin):
        QUANTISERS[kind](m)
    return model, twin


def compiled(model: nn.Module) -> nn.Module:
    options = {**OPTIONS, "min_bytes": MIN_BYTES, "lowering": "eager"}
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=options)


def check(run: nn.Module, twin: nn.Module) -> None:
    for _ in range(3):
        x = torch.randn(8, 128, dtype=torch.bfloat16)
        assert torch.equal(run(x), twin(x))


@pytest.mark.parametrize("kind", QUANTISERS)
def test_its_bytes_stream(kind: str, no_grad: None) -> None:
    if kind in INSIDE and not stream_inside():
        pytest.skip("needs torch 2.13")
    model, twin = pair(kind)
    large = sum(t.nbytes for t in tensors(twin) if t.nbytes >= MIN_BYTES)
    offload(model, min_bytes=MIN_BYTES)
    assert sum(t.nbytes for t in tensors(model) if isinstance(t, HostWeight)) == large
    check(compiled(model), twin)
    (program,) = programs(model)
    assert program.plan.moved_bytes >= 0.95 * large
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 3
    if kind not in INSIDE:
        assert sum(region.cost.flops for region in program.program.problem.regions) == 4 * 2 * 8 * 128 * 128
    assert program.arena.nbytes == program.plan.arena_bytes
    check(model, twin)
    state = twin.state_dict()
    for name, value in model.state_dict().items():
        assert type(value) is type(state[name])
        for (_, a), (_, b) in zip(leaves(value), leaves(state[name]), strict=True):
            assert type(a) is torch.Tensor and torch.equal(a, b)
    if "nf4" in kind:
        check(copy.deepcopy(model), twin)
    restore(model)
    assert [type(p) for p in model.parameters()] == [type(p) for p in twin.parameters()]
    assert not any(isinstance(t, HostWeight) for t in tensors(model))
    check(model, twin)


def test_a_class_that_stays_is_named_with_what_streams_instead() -> None:
    library = pytest.importorskip("bitsandbytes").nn
    layer = library.Linear8bitLt(128, 128, has_fp16_weights=False).to("cpu")
    found = why_not(layer.weight, ModelIndex.of(layer))
    assert found is not None and found.startswith(
        "a tensor subclass (Int8Params): its layer keeps the bytes a second time"
    )


def on_the_drive_of_all(rank: int, kind: str) -> None:
    model, twin = pair(kind)
    offload(model, min_bytes=MIN_BYTES, share=True, host_memory=10_000)
    assert any(t.buffer.backing.in_scratch_file for t in tensors(model) if isinstance(t, HostWeight))
    check(compiled(model), twin)
    restore(model)
    check(model, twin)


@pytest.mark.parametrize(
    "kind", [k if k == "torchao int8" else pytest.param(k, marks=pytest.mark.long) for k in QUANTISERS]
)
def test_it_is_shared_on_the_drive(on_ranks: Callable[..., None], kind: str) -> None:
    if kind in INSIDE and not stream_inside():
        pytest.skip("needs torch 2.13")
    if "bitsandbytes" in kind:
        pytest.importorskip("bitsandbytes")
    on_ranks(on_the_drive_of_all, kind)
