"""The sizing table of docs/deployment.md is what its script writes from its file, and each instance holds its replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sizing
from sizing import CASES, GPUS, HOST_RESERVED_GIB, PAGE, plan, planned, table, written

from chunkflow_compile.catalog.published import published
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import parse_bytes


def test_the_table_is_that_of_the_file() -> None:
    """If it is not: make sizing."""
    page, rows = PAGE.read_text(), planned()
    assert [(row.model, row.gpu) for row in rows] == [*CASES]
    assert written(page, rows) == page
    assert written(page, [replace(rows[0], seconds=rows[0].seconds + 1), *rows[1:]]) != page


def test_every_row_fits_its_gpu_and_its_instance() -> None:
    for row in planned():
        budget, gpu = parse_bytes(GPUS[row.gpu].budget, "memory"), load_profile(GPUS[row.gpu].profile)
        assert row.device_bytes <= budget < gpu.memory_bytes
        assert row.output.endswith(f"{published(row.model).steps} steps"), "the published call"
        assert row.seconds >= row.resident_seconds > 0
        assert row.instance is not None and row.instance.memory_gib >= row.host_bytes / 2**30 + HOST_RESERVED_GIB


def test_a_row_without_an_instance_or_a_fit_says_so() -> None:
    row = planned()[0]
    assert "none with enough memory" in table([replace(row, host_bytes=1 << 40)])
    assert "does not fit" in table([replace(row, resident_bytes=1 << 40)])
    assert "does not fit" not in table([replace(row, resident_bytes=1 << 30)])


def test_what_is_missing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizing, "planned", lambda: planned(tmp_path / "sizing.json"))
    assert sizing.main([]) == 2
    said = "sizing.json is missing: it contains the planned generations. Write it with --plan.\n"
    assert capsys.readouterr().err.endswith(said)
    with pytest.raises(ChunkflowError, match=r"deployment\.md has no place for the table: add the lines <!-- sizing"):
        written("# Deployment\n", [])


@pytest.mark.long
def test_the_planner_still_agrees() -> None:
    """If it does not: make sizing PLAN=--plan."""
    old = planned()[0]
    new = plan(old.model, old.gpu)
    assert new.seconds == pytest.approx(old.seconds, rel=1e-3)
    assert (new.device_bytes, new.host_bytes) == (old.device_bytes, old.host_bytes)
