"""Containers: a user without an account or HOME, and a folder for compile caches that cannot be used."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fork
from helpers import run_python

import chunkflow_compile
from chunkflow_compile.hardware import caches
from chunkflow_compile.hardware.caches import FOLDER_VARIABLE
from chunkflow_compile.lowering import lower

RUN = """
import warnings
warnings.simplefilter("always")
warnings.showwarning = lambda message, kind, *_: print("warned:", message) if kind is UserWarning else None

import torch
from torch import nn
from chunkflow_compile import offload, programs

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

for size in (2, 3):
    torch._dynamo.reset()
    model, x = Net().eval(), torch.randn(size, 64)
    with torch.no_grad():
        want = model(x)
        offload(model, min_bytes=1024)
        run = torch.compile(model, backend="chunkflow", options={"lowering": "eager", "min_bytes": 1024})
        for _ in range(2):
            assert torch.equal(run(x), want)
    assert programs(model)
"""


def in_a_fork(rank: int, printed: str, environment: dict[str, str | None], user: int) -> None:
    """Runs it in this process, as another user; what has been imported may lie where that user cannot go."""
    import torch._inductor.compile_fx  # noqa: F401

    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    with open(printed, "w") as file, contextlib.redirect_stdout(file):
        if user != os.getuid():
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        exec(RUN, {})


def warned(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("warned: ")]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an account")
def test_a_user_without_an_account_or_home(tmp_path: Path) -> None:
    """One warning about HOME.  The cache folder, which this user cannot write, is not needed where nothing is compiled."""
    with tempfile.TemporaryDirectory() as cache:  # a folder of pytest is for root only
        os.chmod(cache, 0o755)
        environment = {"HOME": None, "XDG_CACHE_HOME": None, FOLDER_VARIABLE: cache}
        fork(in_a_fork, (str(tmp_path / "printed"), environment, 12345), 1)
    (found,) = warned((tmp_path / "printed").read_text())
    assert "This user has no home folder: set HOME or XDG_CACHE_HOME" in found


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """torch's compiler cannot be imported with it."""
    (tmp_path / "taken").touch()
    done = run_python("-c", RUN, OMP_NUM_THREADS="1", **{FOLDER_VARIABLE: f"{tmp_path}/taken/below"})
    found = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "ChunkflowError: Inductor has no folder to compile in: " in found, done.stderr
    assert f"taken/below cannot be used (Not a directory). To go on, set {FOLDER_VARIABLE} to a folder" in found


def test_a_cache_folder_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled: a sentence; regions that are not compiled run."""
    monkeypatch.setattr(caches, "_tested_folder", lambda path: caches.Folder(path, fault="Read-only file system"))
    with pytest.raises(
        chunkflow_compile.ChunkflowError, match=rf"no folder to compile in: .*Read-only.* set {FOLDER_VARIABLE}"
    ):
        caches.check_compile_cache(needed=True)
    caches.check_compile_cache(needed=False)


def test_a_cache_folder_that_becomes_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a region is lowered.  An error that is not about files keeps its own message."""

    def fails(error: Exception) -> Any:
        def lowers(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(lower, "through_inductor", lowers)
        lower._from_whole_caches(torch.fx.GraphModule({}, torch.fx.Graph()), {})

    with pytest.raises(OSError, match="No space left"):
        fails(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(caches, "_tested_folder", lambda path: caches.Folder(path, 0, "0 B are free"))
    with pytest.raises(chunkflow_compile.ChunkflowError, match=rf"\(0 B are free\). To go on, set {FOLDER_VARIABLE}"):
        fails(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(ValueError, match="no symbols here"):
        fails(ValueError("no symbols here"))
