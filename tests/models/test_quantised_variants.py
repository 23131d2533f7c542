"""``--quantize``: quantised bytes cross the link, and the FLOPs of the plain model run."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from chunkflow_compile.cli.main import main
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.models.quantised import quantised
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.problem import Problem

SIZE = Size(layers=1)
# Bytes of an element, scales of 128 or 64 elements included.
BYTES = {"int8": 1 + 4 / 128, "fp8": 1 + 4 / 128, "nf4": 0.5 + 4 / 64}


@cache
def problem(kind: str | None) -> Problem:
    torch._dynamo.reset()
    model = small_model("wan", SIZE)
    if kind is not None:
        quantised(model, kind)  # type: ignore[arg-type]
    return make_cut(trace(model, small_inputs("wan", SIZE, 0), min_bytes=0), 0, frozenset()).problem


def linear_bytes(problem: Problem) -> int:
    names = (".weight", ".scale", ".absmax")
    parts = ("to_q", "to_k", "to_v", "to_out", "ffn")
    return sum(w.nbytes for w in problem.weights if any(p in w.name for p in parts) and w.name.endswith(names))


@pytest.mark.parametrize("kind", ["int8", "nf4", pytest.param("fp8", marks=pytest.mark.long)])
def test_quantised_bytes_and_plain_flops(kind: str) -> None:
    plain, found = problem(None), problem(kind)
    assert sum(r.cost.flops for r in found.regions) == sum(r.cost.flops for r in plain.regions)
    assert linear_bytes(found) == pytest.approx(linear_bytes(plain) / 4 * BYTES[kind], rel=0.1)


def test_bad_quantisations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChunkflowError, match="use one of int8, fp8, nf4"):
        quantised(nn.Module(), "int3")  # type: ignore[arg-type]
    with pytest.raises(ChunkflowError, match="0: 9 elements are no multiple of 64"):
        quantised(nn.Sequential(nn.ModuleList([nn.Linear(3, 3)])), "nf4")
    assert main(["plan", "model.py:build", "--quantize", "int8"]) != 0
    assert "--quantize is for presets" in capsys.readouterr().err
