"""Lowered regions are found again: in Inductor's caches, and in a file that another process or machine loads."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE, OPTIONS
from helpers import Stack
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import chunkflow_compile
from chunkflow_compile import ChunkflowError


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "regions.zip"
    model = Stack()
    with torch.no_grad(), fresh_cache():
        assert run(model) == (0, 3)
        assert chunkflow_compile.save(model, path) == 3
    return path


def test_a_saved_region_is_not_compiled_again(file: Path, tmp_path: Path) -> None:
    model = Stack()
    with fresh_cache():
        assert chunkflow_compile.load(file) == 3
        assert run(model) == (3, 0)
        assert chunkflow_compile.save(model, tmp_path / "again.zip") == 3
    with fresh_cache():
        assert chunkflow_compile.load(tmp_path / "again.zip") == 3
        assert run(Stack()) == (3, 0)


def test_another_model_and_another_count_of_blocks_find_them_too(file: Path) -> None:
    with fresh_cache():
        assert chunkflow_compile.load(file) == 3
        assert run(Stack(layers=5)) == (3, 0), "the names of their ops differ"
        hits, _ = run(Stack(layers=3), by_kind=True)
        assert hits > 0


def test_other_settings_do_not(file: Path) -> None:
    with fresh_cache():
        assert chunkflow_compile.load(file) == 3
        hits, misses = run(Stack(), inductor={"max_fusion_size": 1})
        assert hits == 0 and misses == 3


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def tampered(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, blob in members.items():
            archive.writestr(name, blob[:-1] + b"!" if name == "region_1" else blob)


def of_another_release(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = {**json.loads(members["manifest.json"]), "torch": "2.0"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, blob in {**members, "manifest.json": json.dumps(manifest).encode()}.items():
            archive.writestr(name, blob)


@pytest.mark.parametrize("spoil", [cut_short, tampered, of_another_release, Path.unlink])
def test_a_file_that_does_not_fit_is_ignored(
    spoil: Any, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy.zip"
    copy.write_bytes(file.read_bytes())
    spoil(copy)
    with caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
        assert chunkflow_compile.load(copy) == 0
    (record,) = caplog.records
    assert f"{copy} is ignored: " in record.getMessage()


def test_a_model_that_was_not_called_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ChunkflowError, match="call the compiled model once"):
        chunkflow_compile.save(Stack(), tmp_path / "regions.zip")
    assert not [*tmp_path.iterdir()]


FILLS = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from conftest import HERE, OPTIONS
from helpers import Stack

torch.manual_seed(0)
model, x = Stack(), torch.randn(4, 8)
with torch.no_grad():
    expected = model(x)
    found = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)(x)
torch.testing.assert_close(found, expected)
"""


@pytest.mark.long
def test_two_processes_fill_one_cache(tmp_path: Path) -> None:
    """The precompiled header too, which is in the folder for temporary files."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FILLS, str(HERE), str(HERE.parent)]
    started = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(400) for process in started] == [0, 0]
    subprocess.run(command, env=environment, check=True, timeout=400)
