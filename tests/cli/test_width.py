"""What the commands print fits 100 columns, with the answer first; which machine they plan for; progress of long ones."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE
from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile import __version__
from chunkflow_compile.cli.arguments import DEFAULT_MACHINE
from chunkflow_compile.cli.calibrate import profile_table
from chunkflow_compile.cli.main import main
from chunkflow_compile.cli.parsers import AUDIENCES, COMMANDS
from chunkflow_compile.cli.planned_machine import choose_hardware, note_hardware
from chunkflow_compile.hardware.profiles import load_profile, profile_names
from chunkflow_compile.report.record import PROSE_WIDTH, ArmRecord, ComparisonRecord, fitted, prose, table
from chunkflow_compile.weights.progress import EVERY_S, QUIET_S, Lines, Progress

LONG, ULYSSES = (f"{HERE / 'two_blocks.py'}:{name}" for name in ("long_names", "ulysses"))
SIZES = ("--hardware", "cpu", "--min-bytes", "0", "--chunk-bytes", "4096")

pytestmark = pytest.mark.usefixtures("traced_once")


def wide(text: str) -> list[str]:
    """The lines of ``text`` that are longer than a page is wide, but for paths of this machine."""
    return [line for line in text.replace(f"{HERE}/", "").splitlines() if len(line) > PROSE_WIDTH]


def test_no_line_of_a_command_is_longer_than_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    within = ("--weight-memory", "80KiB")
    answers = {}
    for name, arguments in {
        "plan": ("plan", LONG, *SIZES, *within, "--weights"),
        "curve": ("plan", LONG, *SIZES, "--curve"),
        "simulate": ("simulate", LONG, *SIZES, "--weight-memory", "100KiB"),
        "on two ranks": ("simulate", ULYSSES, *SIZES, "--ulysses", "2"),
        "sweep": ("simulate", ULYSSES, *SIZES, "--sweep-ulysses", "1,2"),
        "why": ("why", LONG, "modulation_of_all", *SIZES, *within),
        "dump": ("dump", LONG, *SIZES, *within, "--out", str(tmp_path / "d")),
        "timeline": ("timeline", LONG, *SIZES, *within, "--out", str(tmp_path / "t.json")),
        "hardware": ("hardware",),
    }.items():
        assert main(arguments) == 0
        answers[name] = shown = capsys.readouterr().out.replace(str(tmp_path), "")
        assert not wide(shown), name
    assert "80.0 of 144.0 KiB of weights on the GPU" in answers["plan"].splitlines()[0]
    assert " per forward, " in answers["plan"].splitlines()[0] and " times all-resident; " in answers["plan"]
    assert answers["simulate"].startswith("chunkflow: ") and "all of them do not fit 100.0 KiB" in answers["simulate"]
    marks = {
        line.split()[0]: line.split()[-1] for line in answers["simulate"].splitlines() if line.endswith(("yes", "NO"))
    }
    assert marks["resident"] == "NO" and marks["chunkflow"] == "yes", "those that do not fit are marked"
    assert "collectives" not in answers["simulate"], "one rank has none"
    assert "collectives" in answers["on two ranks"] and answers["sweep"].startswith("Take degree ")
    assert len(answers["why"].partition("read by")[2].partition("slot")[0].splitlines()) > 2, "of eight readers"
    assert main(["dump", LONG, *SIZES, "--annotate"]) == 0
    assert capsys.readouterr().out.startswith("# proved: no weight is read before it has arrived")
    assert main(["plan", LONG, *SIZES, *within]) == 0
    assert "single_transformer_blocks" not in capsys.readouterr().out, "blocks and weights only with --weights"
    assert not wide(profile_table(load_profile("h100-nvlink")))


def test_no_line_of_the_help_is_longer_than_a_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    listed = [name for names in AUDIENCES.values() for name in names]
    assert listed == list(COMMANDS)
    for command in ([], *([name] for name in COMMANDS)):
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--help"])
        page = capsys.readouterr().out
        assert not wide(page), command
        assert "rtx-5090" not in page, "chunkflow hardware lists the profiles"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"chunkflow {__version__}\n"
    assert main(["plam", "flux.1-dev"]) == 2
    assert "There is no command 'plam'; did you mean 'plan'?" in capsys.readouterr().err
    assert main(["nothing"]) == 2 and "did you mean" not in capsys.readouterr().err


@given(st.lists(st.tuples(*[st.text("ab ", max_size=60)] * 9), min_size=1, max_size=4))
def test_a_table_is_as_wide_as_a_page_and_loses_nothing(rows: list[tuple[str, ...]]) -> None:
    headers = [f"column {n}" for n in range(9)]
    text = fitted([(f"row {i}", *row) for i, row in enumerate(rows)], ["", *headers])
    assert not wide(text)
    letters = sum(cell.count("a") for row in rows for cell in row)
    assert text.count("a") == letters
    assert not wide(prose("word " * 50))


def test_columns_of_collectives_are_shown_where_there_are_any() -> None:
    arm = ArmRecord(step_s=1.0, exposed_h2d_s=0.0, collective_s=0.0, weights_device_bytes=1, weights_total_bytes=2)
    extra = {"collectives slowed by": {"a": "0.0 ms"}, "other": {"a": "x"}}
    assert "collectives" not in (one := table(ComparisonRecord(model="", degree=1, arms={"a": arm}), extra))
    assert "other" in one and "waited" in one
    assert table(ComparisonRecord(model="", degree=2, arms={"a": arm}), extra).count("collectives") == 2


@pytest.mark.parametrize(
    ("card", "profile", "said"),
    [
        ("NVIDIA H200", "h200", "note: planned for h200 (this machine's NVIDIA H200)\n"),
        ("NVIDIA Of Tomorrow", "scaled:0", "scaled:0 (this NVIDIA Of Tomorrow; chunkflow calibrate measures it)"),
        (None, DEFAULT_MACHINE, f"note: planned for {DEFAULT_MACHINE} (the default without a GPU; "),
    ],
)
def test_commands_plan_for_the_gpu_of_this_machine(
    card: str | None, profile: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without one for the same machine, whatever the command."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    properties = SimpleNamespace(name=card, major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    arguments = argparse.Namespace(hardware=None, hardware_note="")
    choose_hardware(arguments)
    assert arguments.hardware == profile and not capsys.readouterr().err, "checks of arguments come first"
    note_hardware(arguments)
    note_hardware(arguments)
    assert said in (shown := capsys.readouterr().err) and shown.count("\n") == 1 and not wide(shown)
    named = argparse.Namespace(hardware="cpu", hardware_note="")
    choose_hardware(named)
    note_hardware(named)
    assert named.hardware == "cpu" and not capsys.readouterr().err


def test_hardware_lists_each_profile_with_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert set(profile_names()) <= set(rows)
    assert "24 GiB" in rows["rtx-4090-pcie"] and "27.4" in rows["rtx-4090-pcie"]
    assert rows["rtx-4090-pcie"].endswith("GEMMs, attention") and rows["rtx-4080-pcie"].endswith(" -")
    assert rows["h200"].endswith("PCIe") and "PCIe" not in rows["h20-nvlink"], "it was measured on one of them"


def test_a_phase_of_two_seconds_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    clock = SimpleNamespace(now=100.0)
    lines = Lines(lambda: clock.now)

    def after(seconds: float, phase: str = "") -> str:
        clock.now += seconds
        lines.begin(phase) if phase else lines.tick()
        return capsys.readouterr().err

    assert after(0.0, "tracing") == after(0.9 * QUIET_S) == ""
    assert after(0.1 * QUIET_S) == f"{QUIET_S:4.0f} s  tracing\n"
    assert after(0.5 * EVERY_S) == "" and after(0.5 * EVERY_S) == f"{QUIET_S + EVERY_S:4.0f} s  tracing\n"
    assert after(0.5 * QUIET_S, "planning") == "", "not more often"
    assert "planning" in after(0.5 * QUIET_S) and "drawing" in after(QUIET_S, "drawing")


def test_no_thread_of_progress_outlives_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    progress = Progress(2)
    with progress.phase("one"):
        assert threading.active_count() == before + 1
    with pytest.raises(ValueError), progress.phase("two"):
        raise ValueError
    assert threading.active_count() == before
