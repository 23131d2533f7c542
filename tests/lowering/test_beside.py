"""Workers lower regions beside the process that compiles, and are never needed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from conftest import OPTIONS, WITHIN
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import chunkflow_compile
from chunkflow_compile.lowering import beside
from chunkflow_compile.lowering.worker import State


class Widths(nn.Module):
    """A chain of products, no two alike, so that each is a region of its own; without a kernel to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32 + 8 * n, 40 + 8 * n, bias=False) for n in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def willing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers start at once, however small the regions, in caches that are empty."""
    monkeypatch.setattr(beside, "_CACHED_S", 0.0)
    monkeypatch.setattr(beside, "_START_S", 0.0)
    monkeypatch.setattr(beside, "_PATIENCE_S", WITHIN)  # however slowly a worker starts
    with torch.no_grad(), fresh_cache(), config.patch(compile_threads=2):
        yield


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the workers that a test starts."""
    found = list[Path]()
    start = beside._Worker.__init__

    def started(worker: Any, folder: Path, *rest: Any) -> None:
        found.append(folder)
        start(worker, folder, *rest)

    monkeypatch.setattr(beside._Worker, "__init__", started)
    return found


def compiled(*sizes: int) -> nn.Module:
    """Compile the chain, and compare its calls with eager ones."""
    model, twin = Widths(), Widths()
    twin.load_state_dict(model.state_dict())
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "group_bytes": 1})
    for rows in sizes:
        x = torch.randn(rows, 32)
        torch.testing.assert_close(run(x), twin(x))
    return model


def found_and_lowered() -> tuple[int, int]:
    """Regions that were in the caches when this process needed them, and those that were not."""
    return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]


def cannot_pickle(_: object) -> NoReturn:
    raise TypeError("cannot pickle 'module' object")


def test_what_a_worker_lowers_is_found(folders: list[Path], tmp_path: Path) -> None:
    model = compiled(4)
    assert found_and_lowered() == (2, 3), "half of those after the first"
    assert len(folders) == 1 and not folders[0].exists()
    assert chunkflow_compile.save(model, tmp_path / "regions.zip") == 5


@pytest.mark.long
def test_regions_of_open_sizes(folders: list[Path]) -> None:
    compiled(4, 6, 9)
    assert found_and_lowered() == (4, 6), "in each of two compilations"
    assert len(folders) == 2


@pytest.mark.parametrize(
    "fault",
    ["no interpreter", "it fails", "it hangs", "a region that cannot be packed", "a setting that cannot be packed"],
)
def test_without_its_worker_a_region_is_lowered_here(
    fault: str, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n" + ("echo no such thing >&2; exit 1" if fault == "it fails" else "exec sleep 60"))
    script.chmod(0o755)
    if fault == "a region that cannot be packed":
        monkeypatch.setattr(beside, "packed", cannot_pickle)
    elif fault == "a setting that cannot be packed":
        monkeypatch.setattr(beside.Job, "write", lambda *_: cannot_pickle(_))
    elif fault == "no interpreter":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    else:
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(beside, "_PATIENCE_S", -60.0 if fault == "it hangs" else 60.0)
    with caplog.at_level(logging.INFO, logger="chunkflow_compile"):
        compiled(4)
    assert found_and_lowered() == (0, 5)
    said = {"it fails": "no such thing", "it hangs": "took longer", "no interpreter": "No such file"}
    said["a setting that cannot be packed"] = "no worker can be started: cannot pickle"
    assert said.get(fault, "cannot be sent") in caplog.text
    assert not any(folder.exists() for folder in folders)


def test_a_worker_ends_with_a_compilation_that_fails(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[int]()
    end = beside._Worker.end

    def watched(worker: Any) -> None:
        end(worker)
        ended.append(worker._process.returncode)

    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(beside._Worker, "end", watched)
    monkeypatch.setattr(beside.Workers, "next", interrupted)
    with pytest.raises(KeyboardInterrupt), beside.Workers({}, torch.device("cpu")) as workers:
        workers.lend({"a": torch.fx.symbolic_trace(nn.ReLU()), "b": torch.fx.symbolic_trace(nn.ReLU())}, 1.0)
        workers.next([])
    assert ended and not folders[0].exists()


@pytest.mark.parametrize(
    ("inductor", "ranks", "threads", "expected"),
    [
        ({}, 1, 2, 1),
        ({}, 1, 64, 4),
        ({}, 2, 8, 3),
        ({}, 8, 8, 0),
        ({}, 1, 1, 0),
        ({"max_autotune": True}, 1, 8, 0),
        ({"fx_graph_cache": False}, 1, 8, 0),
    ],
)
def test_how_many(
    inductor: dict[str, bool], ranks: int, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with config.patch(compile_threads=threads):
        assert beside.most_workers(torch.device("cpu"), inductor) == expected


def test_none_without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.patch(force_disable_caches=True):
        assert beside.most_workers(torch.device("cpu"), {}) == 0


@given(st.integers(1, 60), st.floats(0.25, 60), st.integers(0, 4))
def test_shares(regions: int, region_s: float, workers: int) -> None:
    counts = beside.shares(regions, region_s, workers)
    assert len(counts) <= workers and all(counts)
    here = regions - sum(counts)
    assert here >= 1
    if counts:
        serial, split = regions * region_s, max(here, max(counts)) * region_s
        assert split < serial
        assert max(counts) <= here


def test_workers_divide_the_threads_of_inductor() -> None:
    """Each process has a pool of its own."""
    with config.patch(compile_threads=16):
        state = State.here(torch.device("cpu"), 4)
        assert state.compile_threads == 4
        state.set()
        assert config.compile_threads == 4
    with config.patch(compile_threads=1):
        assert State.here(torch.device("cpu"), 4).compile_threads == 1
