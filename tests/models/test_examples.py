"""The examples of the guide: short, and with ``--tiny`` they run anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import HERE
from helpers import run_python

SAVED = {
    "flux": ["flux_0.png", "flux_1.png"],
    "wan": ["wan.gif"],
    "qwen_image_edit": ["edited.png"],
    "quantised_lora": ["lora.png", "plain.png"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", SAVED)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    for module in ("diffusers", "transformers", *(("torchao", "peft") if name == "quantised_lora" else ())):
        pytest.importorskip(module)
    example = HERE.parent / "examples" / f"{name}.py"
    assert len(example.read_text().splitlines()) < 60, "it is short"
    done = run_python(str(example), "--tiny", folder=tmp_path, CHUNKFLOW_PROGRESS="0")  # where it saves its pictures
    assert done.returncode == 0, done.stderr[-2000:]
    assert "budget: " in done.stdout and "transformer" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == SAVED[name]
