"""What people do to an applied pipeline that ChunkFlow cannot follow, or must undo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_pipelines import EAGER, WAN

from chunkflow_compile import ChunkflowError, apply, remove
from chunkflow_compile.models.small_pipelines import small_pipeline
from chunkflow_compile.phases import budget_of
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")
    yield


@pytest.mark.parametrize("part", [False, True])
def test_a_component_that_torch_compiled(part: bool) -> None:
    pipe = small_pipeline("wan")
    if part:
        pipe.transformer.blocks[0] = torch.compile(pipe.transformer.blocks[0], backend="eager")
    else:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ChunkflowError, match=r"pipe\.transformer .* is compiled already: pass a pipeline that is not"):
        apply(pipe, **EAGER)
    assert budget_of(pipe) is None and not any(isinstance(p, HostWeight) for p in pipe.transformer.parameters())


def test_a_component_that_torch_compiled_after() -> None:
    pipe = small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    plain = pipe.transformer
    pipe.transformer = torch.compile(plain, backend="eager")
    with pytest.raises(ChunkflowError, match=r"pipe\.transformer .* is compiled already"):
        apply(pipe)
    pipe.transformer = plain
    assert WAN.generate(pipe).isfinite().all()
    remove(pipe)
