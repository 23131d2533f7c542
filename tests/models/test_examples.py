"""The examples of the guide: short, and with ``--tiny`` they run anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HERE, WITHIN

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
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(example), "--tiny"],
        cwd=tmp_path,  # where it saves its pictures
        env={**os.environ, "PYTHONPATH": path, "CHUNKFLOW_PROGRESS": "0"},
        capture_output=True,
        text=True,
        timeout=2 * WITHIN,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "budget: " in done.stdout and "transformer" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == SAVED[name]
