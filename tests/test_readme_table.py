"""The chart and the table of the README are what the cards' pages and the planner say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import readme_table
from readme_table import (
    BENCHMARKS,
    CARDS,
    CHART,
    CHUNKFLOW,
    GROUP,
    MODELS,
    PLAIN,
    README,
    measured,
    plan,
    planned,
    written,
)

from chunkflow_compile.passes.errors import ChunkflowError


def test_the_readme_is_not_stale() -> None:
    """If it is: make readme-table."""
    shown = measured()
    assert README.read_text() == written(README.read_text(), [*shown, *planned()], shown)
    assert CHART.read_bytes().startswith(b"\x89PNG")


def test_every_model_on_every_card() -> None:
    rows = planned()
    assert [(row.model, row.card) for row in rows] == [(model, card) for model in MODELS for card, *_ in CARDS]
    for row in rows:
        ours, group, plain = (row.ways[way] for way in (CHUNKFLOW, GROUP, PLAIN))
        assert ours.nbytes <= min(row.room, plain.nbytes) and ours.step_s <= group.step_s * 1.001, row
        assert plain.step_s <= ours.step_s * 1.000001


@pytest.mark.long
def test_the_planner_says_so_still() -> None:
    """If it does not: make readme-table PLAN=--plan."""
    new = plan("wan2.2-ti2v-5b", 1)
    old = {row.card: row for row in planned() if row.model == "wan2.2-ti2v-5b"}
    for row in new:
        for name, way in row.ways.items():
            assert way.step_s == pytest.approx(old[row.card].ways[name].step_s, rel=1e-4)
            assert way.nbytes == old[row.card].ways[name].nbytes


def test_what_is_missing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChunkflowError, match=r"h200\.json is missing: it has what was measured on the H200"):
        measured(tmp_path)
    shutil.copy(BENCHMARKS / "h100.json", tmp_path / "h200.json")
    with pytest.raises(ChunkflowError, match=r"h200\.json has no case 'wan2.2-ti2v-5b, frames 81'; it has flux"):
        measured(tmp_path)
    with pytest.raises(
        ChunkflowError, match=r"planned.json is missing: it has the planned steps. Write it again with --plan"
    ):
        planned(tmp_path / "planned.json")
    with pytest.raises(ChunkflowError, match=r"README.md has no place for the chart: put <!-- chart"):
        written("# ChunkFlow\n", [], measured())
    before = README.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert readme_table.main([]) == 2
    assert "A picture needs matplotlib" in capsys.readouterr().err and README.read_bytes() == before
