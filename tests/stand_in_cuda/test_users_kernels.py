"""A user's kernels of Triton inside regions: compiled and launched.  None is executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers import InTurn
from torch import nn

from chunkflow_compile import offload, programs, restore

from . import control

OPTIONS = {"min_bytes": 512, "chunk_bytes": 1 << 12, "hardware": "h200", "policy": "layerwise"}


@triton.jit
def scale(x, w, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * tl.load(w + at, at < n), at < n)


@triton.jit
def grow(w, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(w + at, tl.load(w + at, at < n) + 1, at < n)


class Rows(nn.Module):
    """A GEMM, and a kernel of two operands, of which one is a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)
        self.rows = nn.Parameter(torch.randn(4, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        out = torch.empty_like(y)
        scale[(triton.cdiv(y.numel(), 256),)](y, self.rows, out, y.numel(), BLOCK=256)
        return out


class Blocks(InTurn):
    def __init__(self, writes: bool = False) -> None:
        super().__init__(Rows() for _ in range(2))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.writes:
            grow[(1,)](self.blocks[0].rows, 256, BLOCK=256)
        return x


def placed(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    offload(model.eval().requires_grad_(False), "cuda", min_bytes=512)
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, **options})


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_a_kernel_is_launched_in_its_region(lowering: str) -> None:
    model = Blocks()
    run = placed(model, lowering=lowering)
    launches = []
    for _ in range(4):
        with control.counted() as made:
            assert run(torch.randn(4, 64, device="cuda")).is_cuda
        launches.append(made["launches of Triton"])
    assert launches[1] == launches[2] == launches[3] >= 2, "one kernel of each block; GEMMs are not of Triton"
    (session,) = programs(model)
    assert len(session.variant.regions) == 1 < len(session.plan.regions), "the blocks share one lowered region"
    assert session.measurements, "waits for the copies"
    assert session.executor.traffic.copied_bytes > 0
    restore(model)


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_a_weight_that_a_kernel_writes_stays(lowering: str) -> None:
    model = Blocks(writes=True)
    placed(model, lowering=lowering)(torch.randn(4, 64, device="cuda"))
    why = {w.name: w.why for w in programs(model)[0].plan.weights}
    assert why["blocks.0.rows"] == "the kernel grow writes it"
    restore(model)
