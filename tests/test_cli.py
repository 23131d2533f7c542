"""The command line: the demo's table and record, and what bad use says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chunkflow_compile.cli.main import main


def chunkflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chunkflow_compile.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_demo_streams_on_two_ranks_and_writes_the_record(tmp_path: Path) -> None:
    record, dump = tmp_path / "demo.json", tmp_path / "dump"
    done = chunkflow("demo", "--layers", "4", "--steps", "3", "--json", str(record), "--dump", str(dump))
    assert done.returncode == 0, done.stderr
    written = json.loads(record.read_text())
    assert written.keys() == {"schema", "model", "degree", "arms"}
    assert (written["schema"], written["degree"]) == (1, 2)
    assert list(written["arms"]) == ["resident", "chunkflow"]
    resident, streamed = written["arms"].values()
    keys = {"step_s", "exposed_h2d_s", "collective_s", "weights_device_bytes", "weights_total_bytes"}
    assert resident.keys() == streamed.keys() == keys | {"moved_bytes_per_step", "equal_to_resident"}
    assert streamed["equal_to_resident"] is True
    assert streamed["moved_bytes_per_step"] > 0 == resident["moved_bytes_per_step"]
    assert streamed["weights_device_bytes"] < 0.4 * streamed["weights_total_bytes"]
    assert all(arm["step_s"] > arm["collective_s"] > 0 for arm in (resident, streamed))
    assert re.search(r"(?m)^chunkflow .* yes$", done.stdout)
    assert "\r" not in done.stdout, "the progress bar goes to stderr"
    program = Path(re.search(r"(?m)^program: (.*)$", done.stdout)[1])
    assert program.is_relative_to(dump)
    assert "prefetch('blocks.1." in program.read_text() and "all_to_all_single" in program.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--layers", "0"], "--layers and --steps must be at least 1"),
        (
            ["demo", "--json", "/nowhere/f.json"],
            "cannot be written: [Errno 2] No such file or directory: '/nowhere/f.json'",
        ),
        (["demo", "--dump", "/proc/nowhere"], "cannot be written: [Errno 2]"),
    ],
)
def test_bad_use_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    assert "example: chunkflow demo" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([])
