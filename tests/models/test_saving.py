"""Lowered regions are found again: in Inductor's caches, and in what torch saves for a process whose caches are empty."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE, OPTIONS
from helpers import Stack, twins
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.utils import fresh_cache

import chunkflow_compile

pytestmark = pytest.mark.usefixtures("no_grad")

# Models compiled lazily, whole (whose regions are those of the first) and by kind, at two sizes, and one by torch itself.
RUN = """
import sys
from pathlib import Path
import torch
import chunkflow_compile
from conftest import OPTIONS
from helpers import Stack, twins
from torch._dynamo.utils import counters

saved, again = map(Path, sys.argv[1:])
if saved.exists():
    assert torch.compiler.load_cache_artifacts(saved.read_bytes()) is not None
with torch.no_grad():
    for how in ("lazy", "whole", "kind", "plain"):
        model, twin = twins(lambda: Stack(2, width=48 if how == "kind" else 32))
        if how == "whole":
            chunkflow_compile.offload(model, min_bytes=OPTIONS["min_bytes"])
        if how == "kind":
            chunkflow_compile.compile(model, **OPTIONS, dynamic=False)
        elif how == "plain":
            model.compile(fullgraph=True)
        else:
            model.compile(backend="chunkflow", fullgraph=True, options=OPTIONS)
        for rows in (4, 6) if how == "kind" else (4,):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(model(x), twin(x))
        moved = [p.measurements[-1].moved_bytes for p in chunkflow_compile.programs(model)]
        assert how == "plain" or sum(moved) > 0
blob, info = torch.compiler.save_cache_artifacts()
again.write_bytes(blob)
kept = {kind: sorted(keys) for kind, keys in info.artifacts.items()}
print((kept, {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}))
"""


def run(model: nn.Module, by_kind: bool = False, **options: Any) -> tuple[int, int]:
    """Compile a model and check a call; return the regions that Inductor's caches had, and those that they had not."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(4, 8)
    expected = model(x)
    given = {**OPTIONS, **options}
    if by_kind:
        compiled = chunkflow_compile.compile(model, **given)
    else:
        compiled = torch.compile(model, backend="chunkflow", fullgraph=True, options=given)
    torch.testing.assert_close(compiled(x), expected)
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


@pytest.mark.long
def test_artifacts_of_torch_are_those_of_all_regions(tmp_path: Path) -> None:
    def in_a_process(number: int) -> Any:
        saved, again = tmp_path / str(number), tmp_path / str(number + 1)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache_{number}"),
            "PYTHONPATH": str(HERE),
        }
        command = [sys.executable, "-c", RUN, str(saved), str(again)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return ast.literal_eval(done.stdout.splitlines()[-1])

    kept, counts = in_a_process(0)
    regions = len(kept["aot_autograd"])
    assert regions > 4 and len(kept["inductor"]) == regions == counts["miss"] and not counts["bypass"]
    again, counts = in_a_process(1)
    assert counts["hit"] >= regions and not counts["miss"] and not counts["bypass"]
    assert again == kept, "a process that compiled nothing saves the same"


def test_another_process_or_model_finds_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they compute, as they are lowered, and the vector instructions that they are for."""
    with fresh_cache():
        assert run(Stack()) == (0, 3)
        assert run(Stack(layers=5)) == (3, 0), "the names of its ops differ"
        assert run(Stack(layers=3), by_kind=True) == (1, 0)
        assert run(Stack(), by_kind=True, inductor={"max_fusion_size": 1}) == (0, 1)
        monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa)
        assert run(Stack(), by_kind=True) == (0, 1)


@pytest.mark.long
def test_regions_of_open_sizes_are_found_by_other_sizes() -> None:
    def called(layers: int, *rows: int) -> None:
        torch._dynamo.reset()
        counters.clear()
        model, twin = twins(lambda: Stack(layers=layers))
        compiled = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=True, options=OPTIONS)
        for n in rows:
            x = torch.randn(n, 8)
            torch.testing.assert_close(compiled(x), twin(x))

    with fresh_cache():
        called(2, 4)
        called(3, 9, 5)
        found = counters["aot_autograd"]
        assert (found["autograd_cache_hit"], found["autograd_cache_miss"]) == (3, 0)
