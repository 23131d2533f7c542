"""The paper's formulas give the paper's critical points."""

from __future__ import annotations

import pytest

from chunkflow_compile.passes.cost.formulas import (
    BlockKind,
    chunk_seconds,
    critical_flops,
    critical_point,
    dit_block_flops,
    double_block_flops,
    knee,
    mean_block,
    single_block_flops,
)
from chunkflow_compile.passes.errors import ChunkflowError

# The paper's platform: H100 PCIe, dense bf16; two GPUs on one root complex.
PLATFORM = {"peak": 756e12, "eta_comp": 0.60, "h2d": 31.5e9, "eta_pref": 0.89}
DEGREE = 2


def wan(frames: float) -> float:
    return dit_block_flops(batch=1, tokens=220 * (frames + 3), text=512, width=3072, mlp=14336)


def flux(batch: float) -> float:
    size = {"tokens": 4096, "text": 512, "width": 3072, "mlp": 12288}
    return batch * mmdit(19, 38, size)


def hunyuan(frames: float) -> float:
    return mmdit(20, 40, {"tokens": 900 * (frames + 3), "text": 161, "width": 3072, "mlp": 12288})


def mmdit(doubles: int, singles: int, size: dict) -> float:
    double = BlockKind(count=doubles, flops=double_block_flops(batch=1, **size), nbytes=0)
    single = BlockKind(count=singles, flops=single_block_flops(batch=1, **size), nbytes=0)
    return mean_block([double, single]).flops


# (FLOPs by size, profiled bytes of the paper's table and its point, true bf16 bytes of a block and their point)
MODELS = {
    "wan": (wan, 520e6, 119.1, 327e6, 86.0),
    "flux": (flux, 465e6, 11.5, 415e6, 10.3),
    "hunyuanvideo": (hunyuan, 675e6, 34.5, 415e6, 24.7),
}


@pytest.mark.parametrize("name", MODELS)
def test_critical_points_of_the_paper(name: str) -> None:
    flops, profiled, its_point, true, true_point = MODELS[name]
    for nbytes, point in ((profiled, its_point), (true, true_point)):
        critical = critical_flops(nbytes=nbytes, **PLATFORM)
        assert critical_point(lambda n: flops(n) / DEGREE, critical) == pytest.approx(point, rel=0.006)
        assert critical == pytest.approx(knee(**PLATFORM) * nbytes)


def test_a_chunk_of_16_mib_holds_the_link_for_0_6_ms() -> None:
    assert chunk_seconds(chunk_bytes=16 << 20, h2d=31.5e9, eta_pref=0.89) == pytest.approx(0.598e-3, rel=1e-3)


def test_a_size_that_nothing_reaches_is_an_error() -> None:
    with pytest.raises(ChunkflowError, match="No size below a million"):
        critical_point(lambda n: 1.0, 2.0)
