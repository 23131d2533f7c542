"""Where the stand-in for CUDA's runtime cannot be built, it says why.  Its own tests: make test-stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from stand_in_cuda import build
from stand_in_cuda.build import CannotBuildError


def test_it_says_why_it_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for the CPU, a compiler that fails or is missing, a torch that links no runtime."""
    if torch.version.cuda is None:
        with pytest.raises(CannotBuildError, match=r"is built for the CPU only: install a CUDA build"):
            build.build(tmp_path)
    with pytest.raises(CannotBuildError, match=r"missing.cpp"):
        build._compile("g++", "missing.cpp")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libc10_cuda.so").touch()
    nothing = subprocess.CompletedProcess([], 0, stdout="", stderr="")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: nothing)
    with pytest.raises(CannotBuildError, match=r"links no shared CUDA runtime"):
        build.runtime_name(tmp_path)
    monkeypatch.setattr(build, "runtime_name", lambda _: "libcudart.so.13")
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(CannotBuildError, match=r"There is no compiler: install gcc and g\+\+"):
        build.build(tmp_path)
