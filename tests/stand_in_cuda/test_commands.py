"""Commands for a card, to their last line.  No kernel computes: nothing measured here means anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from chunkflow_compile.passes.hardware import Hardware

ROOT = Path(__file__).parent.parent.parent
CHUNKFLOW = str(Path(sys.executable).parent / "chunkflow")


def ran(*command: str, seconds: float = 900) -> str:
    env = {**os.environ, "STAND_IN_COMPUTE": "0", "STAND_IN_DEVICES": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_calibration(tmp_path: Path) -> None:
    out = tmp_path / "card.json"
    ran(CHUNKFLOW, "calibrate", "--device", "cuda", "--loopback", "--out", str(out))
    found = Hardware.from_json(out.read_text())
    assert found.h2d_bandwidth > 0 and found.peak_flops and "measured on NVIDIA H200" in found.sources["peak_flops"]


def test_the_doctor_sees_the_card() -> None:
    assert "NVIDIA H200" in ran(CHUNKFLOW, "doctor")


def test_the_benchmark_of_a_card_runs_to_its_last_line(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    ran(sys.executable, "docs/benchmarks/gpu.py", "--dry-run", "--steps", "3", "--seconds", "800", "--out", str(page))
    text, record = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert "A dry run" in text and "The card by itself" in text and "failed" not in text, text
    assert record["card"]["pin_s"] > 0 and record["card"]["copied"] * 8 == record["card"]["pinned"]
    arms = [set(case["steps_s"]) for case in record["cases"]]
    assert len(arms) == 2 and {"resident", "layerwise", "chunkflow", "inductor"} <= arms[0]
    assert any("diffusers" in arm for arm in arms[0])
    lines = [json.loads(line) for line in (tmp_path / "gpu_steps.jsonl").read_text().splitlines()]
    assert sum("case" in line for line in lines) == 2 and sum("seconds" in line for line in lines) >= 3 * len(arms[0])
