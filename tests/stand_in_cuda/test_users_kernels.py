"""A user's kernels of Triton inside regions: compiled and launched, and never those of another graph.  None is executed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache

from chunkflow_compile import load, offload, programs, restore, save

from . import control

OPTIONS = {"min_bytes": 512, "chunk_bytes": 1 << 12, "hardware": "h200", "policy": "layerwise"}


@triton.jit
def scale(x, w, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * tl.load(w + at, at < n), at < n)


@triton.jit
def shift(x, w, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(w + at, at < n), at < n)


@triton.jit
def grow(w, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(w + at, tl.load(w + at, at < n) + 1, at < n)


class Rows(nn.Module):
    """A GEMM, and a kernel of two operands, of which one is a weight."""

    def __init__(self, kernel: Any, block: int) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)
        self.rows = nn.Parameter(torch.randn(4, 64))
        self.kernel, self.block = kernel, block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        out = torch.empty_like(y)
        self.kernel[(triton.cdiv(y.numel(), self.block),)](y, self.rows, out, y.numel(), BLOCK=self.block)
        return out


class Blocks(nn.Module):
    def __init__(self, kernel: Any, block: int = 256, writes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Rows(kernel, block) for _ in range(2)])
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.writes:
            grow[(1,)](self.blocks[0].rows, 256, BLOCK=256)
        return x


def placed(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    offload(model.eval().requires_grad_(False), "cuda", min_bytes=512)
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, **options})


def _block(kernel: Any) -> int:
    found = re.search(
        r"'BLOCK': (\d+)", f"{kernel.triton_meta} {kernel.compile_results and kernel.compile_results[0].config}"
    )
    assert found is not None, (kernel.triton_meta, kernel.compile_results)
    return int(found[1])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, Any]]:
    """(kernel, its block) -> how often Inductor's code has run it."""
    found: Counter[tuple[str, Any]] = Counter()
    run = CachingAutotuner.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__, _block(self)] += 1
        assert all(a.is_cuda for a in args if isinstance(a, torch.Tensor))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", watched)
    return found


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_a_kernel_is_launched_in_its_region(lowering: str) -> None:
    model = Blocks(scale)
    run = placed(model, lowering=lowering)
    launches = []
    for _ in range(4):
        with control.counted() as made:
            assert run(torch.randn(4, 64, device="cuda")).is_cuda
        launches.append(made["launches of Triton"])
    assert launches[1:] == [2, 2, 2], launches  # "one kernel of each block; GEMMs are not of Triton"
    (session,) = programs(model)
    assert len(session.code.regions) == 1 < len(session.plan.regions), "the blocks share one lowered region"
    assert session.executor.traffic.copied_bytes > 0
    restore(model)


@pytest.mark.parametrize("lowering", ["inductor", "eager"])
def test_a_weight_that_a_kernel_writes_stays(lowering: str) -> None:
    model = Blocks(scale, writes=True)
    placed(model, lowering=lowering)(torch.randn(4, 64, device="cuda"))
    why = {w.name: w.why for w in programs(model)[0].plan.weights}
    assert why["blocks.0.rows"] == "the kernel grow writes it"
    restore(model)


def test_no_cache_gives_a_region_the_kernel_of_another(launched: Counter[tuple[str, Any]], tmp_path: Path) -> None:
    """With the table of kernels emptied, as in another process, every kernel has the number of the one before."""

    def step(*of: Any) -> tuple[str, Any]:
        kernel_side_table.reset_table()
        launched.clear()
        model = Blocks(*of)
        placed(model)(torch.randn(4, 64, device="cuda"))
        if not (tmp_path / "saved").exists():
            save(model, tmp_path / "saved")
        restore(model)
        (found,) = launched
        return found

    wanted = [("scale", 256), ("shift", 256), ("scale", 128)]
    with fresh_cache():
        assert [step(scale), step(shift), step(scale, 128)] == wanted
        assert [step(scale), step(shift), step(scale, 128)] == wanted
    with fresh_cache():
        load(tmp_path / "saved")
        counters.clear()
        assert [step(shift), step(scale, 128)] == wanted[1:]
        assert not counters["inductor"]["fxgraph_cache_hit"]
        assert step(scale) == wanted[0]
        assert counters["aot_autograd"]["autograd_cache_hit"] or counters["inductor"]["fxgraph_cache_hit"]
