"""Where the stand-in for CUDA's runtime cannot be built, it says why.  Its own tests: make test-stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from stand_in_cuda import build
from stand_in_cuda.build import CannotBuildError


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_no_cuda_build_of_torch(tmp_path: Path) -> None:
    with pytest.raises(CannotBuildError, match=r"is built for the CPU only: install a CUDA build"):
        build.build(tmp_path)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "runtime_name", lambda _: "libcudart.so.13")
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(CannotBuildError, match=r"There is no compiler: install gcc and g\+\+"):
        build.build(tmp_path)


def test_a_compiler_that_fails_is_quoted() -> None:
    with pytest.raises(CannotBuildError, match=r"missing.cpp"):
        build._compile("g++", "missing.cpp")


def test_a_torch_that_links_no_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libc10_cuda.so").touch()
    nothing = subprocess.CompletedProcess([], 0, stdout="", stderr="")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: nothing)
    with pytest.raises(CannotBuildError, match=r"links no shared CUDA runtime"):
        build.runtime_name(tmp_path)
