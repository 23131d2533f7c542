"""How long it takes until the weights are there: predicted as chunkflow doctor does, shown, and measured meanwhile."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers import Terminal
from test_drive import LEAST, SIZE
from test_shared_weights import everywhere

from chunkflow_compile import apply, offload
from chunkflow_compile.catalog.small import small_model
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.pipeline.apply import unread

NAME = "WanTransformer3DModel"
SECONDS = 4


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint, on a drive that chunkflow calibrate has measured as so slow that it is read in SECONDS."""
    model = small_model("wan", SIZE)
    model.save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    nbytes = sum(p.nbytes for p in model.parameters() if p.nbytes >= LEAST)
    (tmp_path / "chunkflow").mkdir()
    measured = replace(load_profile(CPU), drive_bandwidth=nbytes / SECONDS)
    (tmp_path / "chunkflow" / "hardware.json").write_text(measured.to_json())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return str(tmp_path / "wan")


def loaded(folder: str) -> Any:
    return diffusers.WanTransformer3DModel.from_pretrained(folder)


def test_offload_says_how_long_it_reads(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    offload(loaded(saved), min_bytes=LEAST)
    assert not shown.getvalue(), "on the CPU each weight stays in the file"
    offload(loaded(saved), min_bytes=LEAST, dtype=torch.bfloat16)
    first, *_ = filter(None, re.split(r"[\r\n]", shown.getvalue()))
    assert first.startswith(f"chunkflow: moving {NAME} to the host, from a drive of 0.0 GB/s in {SECONDS} s:   0%")
    shown.truncate(0)
    offload(small_model("wan", SIZE), min_bytes=LEAST, dtype=torch.bfloat16)
    assert "from a drive" not in shown.getvalue(), "of weights in memory nothing is read"
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")
    shown.truncate(0)
    offload(loaded(saved), min_bytes=LEAST, dtype=torch.bfloat16)
    assert not shown.getvalue()


class Pipe:
    """Two components and nothing else."""

    def __init__(self, folder: str) -> None:
        self.components = {"one": loaded(folder), "two": loaded(folder)}

    def __call__(self) -> None:
        """Generate nothing."""


def on_a_rank(rank: int, folder: str) -> None:
    shown, bars = Terminal(), dict[int, tuple[str, int]]()
    one, told = loaded(folder), f"from a drive of 0.0 GB/s in {SECONDS} s"
    whole = sum(p.nbytes for p in one.parameters() if p.nbytes >= LEAST)
    buffers = sum(b.nbytes for b in one.buffers() if b.nbytes >= LEAST)

    def display(bar: Any, *_: object, **__: object) -> None:
        bars[id(bar)] = bar.desc, bar.total

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(Path(folder).parent))  # the server that forks has the one of its start
        patch.setattr(sys, "stderr", shown)
        patch.setattr("tqdm.std.tqdm.display", display)
        offload(loaded(folder), "cpu", min_bytes=LEAST, share=True)
        (bar,) = bars.values()
        assert bar[0] == f"chunkflow: moving {NAME} to the host, {told}"
        assert sum(everywhere(bar[1])) == whole + buffers, "the ranks write one copy together, in the time of one"
        bars.clear()
        apply(Pipe(folder), device="cpu", memory="64MiB", min_bytes=LEAST, lowering="eager", share=True)
        every, *parts = bars.values()
        assert re.fullmatch(rf"chunkflow: placing one, two, from a drive of 0.0 GB/s in {2 * SECONDS} s", every[0])
        assert [part[0] for part in parts] == [bar[0], bar[0]]


def test_each_rank_and_a_pipeline_say_it(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(on_a_rank, saved)


def test_the_prediction(saved: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = loaded(saved)
    assert unread(model.parameters()) == sum(p.nbytes for p in model.parameters())
    assert not unread(small_model("wan", SIZE).parameters())
    assert str(ReadTime(28_000_000_000, 2e9)) == "from a drive of 2.0 GB/s in 14 s"
    assert ReadTime(28_000_000_000, 2e9).text and not ReadTime(1_000_000_000, 2e9).text
    (tmp_path / "chunkflow" / "hardware.json").write_text("{")
    assert ReadTime.here(1).rate == load_profile(CPU).drive_bandwidth, "a damaged profile does not stop a move"
