"""What Inductor does once for the CPU beside tracing, and caches that disappear meanwhile or were written in part."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack, run_python, twins
from torch._inductor import config, cpu_vec_isa

from chunkflow_compile import programs
from chunkflow_compile.hardware.caches import _is_whole
from chunkflow_compile.lowering import lower, warm_up

pytestmark = pytest.mark.usefixtures("no_grad")

CPU = torch.device("cpu")
ASK = """
import os, torch
from torch._inductor import cpu_vec_isa
from chunkflow_compile.lowering.warm_up import vector_instructions, warm_up
if (child := os.fork()) == 0:
    print(cpu_vec_isa.pick_vec_isa(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
warm_up(torch.device("cpu"))
print(vector_instructions())
print(cpu_vec_isa.pick_vec_isa())
"""


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


@pytest.fixture
def fresh() -> Any:
    warm_up._started.cache_clear()
    yield
    warm_up._started.cache_clear()


def test_the_same_instructions_as_inductor_finds() -> None:
    """In a process that has searched for nothing, and in a child of it that does not warm up."""
    done = run_python("-c", ASK)
    theirs, *ours = done.stdout.splitlines()
    assert ours == [theirs, theirs]


def test_it_starts_once_and_not_where_the_user_has_chosen(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (begun.append(self.name), start(self)))
    with config.patch({"cpp.simdlen": 256}):
        warm_up.warm_up(CPU)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    warm_up.warm_up(CPU)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    warm_up.warm_up(torch.device("meta"))
    assert not begun
    for _ in range(2):
        warm_up.warm_up(CPU)
        warm_up.vector_instructions()
    assert begun == ["chunkflow-warm-up"]


def test_a_search_that_fails_holds_nobody_up(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = cpu_vec_isa.pick_vec_isa()

    def fails() -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(warm_up, "_of_this_cpu", fails)
    warm_up.warm_up(CPU)
    assert warm_up.vector_instructions() is known


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
    assert 1 <= said <= 2
    assert all(_is_whole(path) for path in tmp_path.rglob("*.so")) and run() == (whole, 0)
