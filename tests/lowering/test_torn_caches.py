"""Caches of Inductor that disappear while a model is compiled, or that were written only in part."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack, run_python, twins

from chunkflow_compile import programs
from chunkflow_compile.hardware.caches import _is_whole
from chunkflow_compile.lowering import lower

pytestmark = pytest.mark.usefixtures("no_grad")

RUN = """
import torch
from conftest import OPTIONS
from helpers import Stack, twins
from torch._inductor.cpu_vec_isa import pick_vec_isa
with torch.no_grad():
    model, twin = twins(lambda: Stack(2))
    model.compile(backend="chunkflow", fullgraph=True, options=OPTIONS)
    x = torch.randn(4, 8)
    print(torch.allclose(model(x), twin(x), atol=1e-5), pick_vec_isa())
"""


def test_the_folder_of_the_caches_disappears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two regions: it is made again, and what was in it is compiled anew."""
    folder, lowered = tmp_path / "cache", list[Any]()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch._inductor.utils.clear_caches()
    through = lower.through_inductor

    def lowers(*arguments: Any) -> Any:
        if len(lowered) == 1:
            shutil.rmtree(folder)
        lowered.append(arguments)
        return through(*arguments)

    monkeypatch.setattr(lower, "through_inductor", lowers)
    model, twin = twins(lambda: Stack(1))
    model.compile(backend="chunkflow", fullgraph=True, options={**OPTIONS, "group_bytes": 1})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            x = torch.randn(4, 8)
            torch.testing.assert_close(model(x), twin(x))
    assert len(lowered) > 1 and folder.is_dir()
    assert all(p.plan.moved_bytes > 0 for p in programs(model))
    assert len([r for r in caplog.records if r.name.startswith("chunkflow")]) <= 1


@pytest.mark.long
def test_a_process_was_killed_while_it_wrote(tmp_path: Path) -> None:
    """Each library in the caches is the beginning of one: those of kernels, and those of the search for instructions."""

    def run() -> tuple[str, int]:
        done = run_python("-c", RUN, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        return done.stdout, done.stderr.count("were written in part")

    whole, said = run()
    libraries = [*tmp_path.rglob("*.so")]
    assert libraries and not said and "True" in whole
    for path in libraries:
        inside = path.read_bytes()
        path.write_bytes(inside[: len(inside) // 2])
        os.utime(path, (0, path.stat().st_mtime - 60))  # one that is being written is left alone
    again, said = run()
    assert again == whole, "the same instructions, and the same numbers as plain PyTorch"
    assert said == 1
    assert all(_is_whole(path) for path in tmp_path.rglob("*.so")) and run() == (whole, 0)
