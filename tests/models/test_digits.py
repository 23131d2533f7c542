"""The digits of ``make demo``: readable, drawn twice with the same bytes, and one sentence for each cause of failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import HERE

pytest.importorskip("diffusers")
FOLDER = HERE.parent / "examples" / "digits"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The scripts draw.py and train.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import draw
    import train

    yield draw, train
    for name in ("draw", "train", "digits"):
        sys.modules.pop(name, None)


@pytest.fixture
def drawing(scripts: tuple[ModuleType, ModuleType]) -> Any:
    """What the way without ChunkFlow might have drawn."""
    draw, _ = scripts
    return draw.Drawing(name="baseline", images=torch.rand(10, 8, 8), weights=2 << 20)


def ends(draw: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The sentence with which draw.py ends; its exit status is 1."""
    monkeypatch.setattr(sys, "argv", ["draw.py", *arguments])
    with pytest.raises(SystemExit) as end:
        draw.main()
    said = str(end.value)
    assert said.startswith("draw.py") and "\n" not in said
    return said


def test_both_ways_draw_the_same_readable_digits(
    scripts: tuple[ModuleType, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw, _ = scripts
    drawn = list[Any]()
    monkeypatch.setattr(draw, "report", lambda drawings, out: drawn.extend(drawings) or report(drawings, out))
    report, out = draw.__dict__["report"].__globals__["report"], tmp_path / "digits.png"
    assert report is not None and out
