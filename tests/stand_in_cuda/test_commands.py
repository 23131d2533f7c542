"""Commands for a card, to their last line.  No kernel computes, and time is the stand-in's own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import WITHIN

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

ROOT = Path(__file__).parent.parent.parent
CHUNKFLOW = (sys.executable, "-m", "chunkflow_compile.cli.main")


def run(*command: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """A command, which ends with ``code``."""
    env = {**os.environ, "STAND_IN_COMPUTE": "0", "STAND_IN_DEVICES": "1", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WITHIN * 3, cwd=ROOT)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_calibration(tmp_path: Path) -> None:
    """On the stand-in's own clock, where a kernel takes 2 ms and streams and devices share nothing."""
    out, stand_in = tmp_path / "card.json", {"STAND_IN_RATE": "40e9", "STAND_IN_DEVICES": "2"}
    run(*CHUNKFLOW, "calibrate", "--device", "cuda", "--loopback", "--out", str(out), **stand_in)
    found, kernel_s, rate = Hardware.from_json(out.read_text()), 0.002, pytest.approx(40e9, rel=1e-3)
    assert found.kernel_s == kernel_s and "measured on NVIDIA H200" in found.sources["gemm_flops"]
    assert {*found.gemm_flops.values()} == {round(2 * 8192**3 / kernel_s)} and len(found.gemm_flops) == 3
    assert found.h2d_bandwidth == rate and found.collective_bandwidth == rate and found.chunk_s < 1e-7
    assert found.host_bandwidth == pytest.approx(80e9, rel=1e-3)
    assert (found.copy_slowdown, found.collective_slowdown, found.compute_slowdown) == (1, 1, 1)
    assert found.attention_slowdown == 1
    why = "a rank pulls 20.38 GB/s from the others, and copies 40 GB/s from host memory"
    assert found.peer_bandwidth == 0 and why in found.sources["peer_bandwidth"]


def test_the_doctor_sees_the_card() -> None:
    assert "NVIDIA H200" in run(*CHUNKFLOW, "doctor").stdout


def card(folder: Path, *more: str, **given: Any) -> subprocess.CompletedProcess[str]:
    """What make card DRY=1 runs; its tests are beside this file."""
    script = str(ROOT / "docs" / "benchmarks" / "gpu_parts.py")
    return run(sys.executable, script, "--dry-run", "--out", str(folder), *more, **given)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "benchmarks"))


def json_of(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_the_first_half_hour_on_a_card(tmp_path: Path) -> None:
    """Its parts leave their figures and the page as they go, and what has passed is not run again."""
    card(tmp_path, "--parts", "facts,profile")
    facts = json_of(tmp_path, "gpu_card.json")
    assert len(facts) == 9 and all(part["passed"] for part in facts.values())
    assert "copies of one direction" in (tmp_path / "gpu.md").read_text()
    moved = tmp_path / "on another machine"
    done = card(moved, "--parts", "facts,profile,wan,loopback,flux", "--resume", str(tmp_path))
    assert done.stdout.endswith("5 of 9 parts ran and passed\n"), done.stdout[-3000:]
    assert "--- facts" not in done.stdout and "--- wan" in done.stdout
    text, cases = (moved / "gpu.md").read_text(), json_of(moved, "gpu.json")["cases"]
    assert "A rehearsal" in text and "Not covered by one GPU" in text and "Failed" not in text, text
    assert len(cases) == 4 and all(case["record"] for case in cases.values())
    steps = cases["wan"]["record"]["steps_s"]
    assert {"resident", "layerwise", "chunkflow", "by-kind", "apply", "inductor"} <= steps.keys() and any(
        "diffusers" in a for a in steps
    )
    assert cases["wan"]["record"]["arms"]["layerwise"]["moved_bytes_per_step"] > 0
    assert "diffusers-group-offload" in cases["wan"]["record"]["host_bounds"], "eager: it has no place to wait"
    lines = lines_of(moved / "gpu_steps.jsonl")
    turns = sum(len(turns) for case in cases.values() for turns in case["record"]["steps_s"].values())
    assert sum("case" in line for line in lines) == 4 and sum("seconds" in line for line in lines) == turns > 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_users_call(tmp_path: Path, scripts: None) -> None:
    """A case that has ended is not run again, and one that fails says so; outputs are compared across processes."""
    from gpu_page import write

    out, script = tmp_path / "gpu_calls.jsonl", str(ROOT / "docs" / "benchmarks" / "card_calls.py")
    model = "wan2.2-ti2v-5b"
    cases = [f"{case} {model}" for case in ("compile", "packed", "apply", "adapters")]
    call = (
        sys.executable,
        script,
        "--out",
        str(out),
        "--small",
        "--seconds",
        f"{3 * WITHIN}",
        "--cases",
        ",".join(cases),
    )
    run(*call, STAND_IN_COMPUTE="1")
    found = lines_of(out)
    assert [line["case"] for line in found if line.get("ended")] == ["compile", "packed", "apply", "adapters"]
    equal = [(line["case"], line["arm"], line["equal"]) for line in found if "equal" in line]
    assert [case for case, _, same in equal if same] == [*3 * ["compile"], *2 * ["packed"], "apply"] + 2 * [
        "adapters"
    ], equal
    for line in found:
        if "step_ms" in line:
            assert line["step_ms"] > 0 < line["host_ms"] and (line["moved_bytes"] > 0) == (
                "%" in line["arm"] or line["case"] == "apply"
            )
    assert all(line["restored"] for line in found if line["case"] == "apply" and "restored" in line)
    assert all(not line["compiled"] for line in found if line["case"] == "adapters" and "compiled" in line)
    run(*call)
    assert lines_of(out) == found
    run(*call[:-1], "adapters flux.1-dev", code=1)  # no kernel computes
    assert "failed" in lines_of(out)[-1]
    write(tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert "## Public calls" in text and "* **adapters, flux.1-dev: " in text


def test_whether_a_step_can_be_one_graph(tmp_path: Path) -> None:
    card(tmp_path, "--parts", "graphs", STAND_IN_COMPUTE="1")
    found = lines_of(tmp_path / "gpu_graphs.jsonl")
    assert [line["check"] for line in found if line.get("ended")] == [
        "overlap",
        "launches",
        "host bytes",
        "unregistered",
        "events",
        "nccl",
    ]
    read = [line["read"] for line in found if "read" in line]
    # host bytes, then four orders of an external event: in the second and the fourth nothing orders the copy
    assert len(read) == 5 and read[0] and read[1] and read[3]
    assert any("GO: copies inside a graph" in line.get("says", "") for line in found)
    assert "## A step as one CUDA graph" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_is_cut_off_loses_nothing(tmp_path: Path, scripts: None) -> None:
    """The page of a run that ended after some turns of a case, and of one for which no time was left."""
    from gpu_page import write

    card(tmp_path, "--parts", "profile")
    turns = [{"case": "wan"}, {"arm": "chunkflow", "step": 0, "seconds": 0.25, "host": 0.1}]
    (tmp_path / "gpu_steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in turns))
    done = card(tmp_path, "--parts", "wan,flux", "--seconds", "60", code=3)
    assert "no time was left for wan, flux" in done.stdout, done.stdout
    write(tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    assert "Cut off after 1 measured turns" in text and "* chunkflow: 250.0 ms per step" in text


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"STAND_IN_DRIVER": "12040"}, r"The NVIDIA driver on your system is too old \(found version 12040\)"),
        ({"STAND_IN_TAKEN": "4e9"}, r"3\.73 GiB of the 8\.00 GiB of cuda:0 are held by another process"),
        ({"STAND_IN_DEVICES": "0"}, r"There is no cuda:0: .* finds no GPU or no driver"),
    ],
)
def test_a_card_that_cannot_be_measured(tmp_path: Path, env: dict[str, str], says: str) -> None:
    done = card(tmp_path, code=2, **env)
    assert re.search(says, done.stderr) and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_wheel_that_is_missing(monkeypatch: pytest.MonkeyPatch, scripts: None) -> None:
    from gpu_card import ready

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ChunkflowError, match=r"diffusers is missing here\. .*pip download .* diffusers=="):
        ready()
