"""Profiles: the built-in ones are valid and name the source of each figure; calibrate writes one of this machine."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from chunkflow_compile.cli.main import main
from chunkflow_compile.hardware.profiles import load_profile, measured_path, profile_names
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware


def test_the_built_in_profiles_are_the_named_ones_and_have_a_source_for_each_figure() -> None:
    expected = ["cpu", "h100-nvlink", "h100-pcie-x2", "h200", "l40s-pcie", "rtx-4090-pcie", "rtx-5090-pcie"]
    assert profile_names() == expected
    for name in expected:
        profile = load_profile(name)
        assert profile.name == name
        figures = {f.name for f in fields(Hardware)} - {"name", "sources", "link_emulation"}
        assert set(profile.sources) == figures, name
        assert profile.shared_link == (name not in ("h100-nvlink", "h200"))


def test_the_paper_s_machine_has_the_paper_s_constants() -> None:
    paper = load_profile("h100-pcie-x2")
    assert paper.peak_flops["bfloat16"] == 756e12
    assert (paper.h2d_bandwidth, paper.eta_pref) == (31.5e9, 0.89)


def test_a_profile_is_found_by_name_or_file_and_a_bad_one_is_named(tmp_path: Path) -> None:
    text = load_profile("h200").to_json()
    own = tmp_path / "own.json"
    own.write_text(text.replace('"h200"', '"own"'))
    assert load_profile(own).name == "own" and load_profile(str(own)) == load_profile(own)
    own.write_text(text.replace('"memory_bandwidth": 4800000000000.0', '"memory_bandwidth": 4800'))
    with pytest.raises(
        ChunkflowError, match=r"own.json: Hardware field memory_bandwidth=4800 is outside .* bytes, seconds"
    ):
        load_profile(own)
    body = json.loads(text)
    del body["compute_slowdown"]  # older profiles do not have it
    own.write_text(json.dumps(body))
    assert load_profile(own).compute_slowdown == 1
    del body["chunk_s"]
    own.write_text(json.dumps(body))
    with pytest.raises(ChunkflowError, match=r"own.json: The hardware profile lacks chunk_s"):
        load_profile(own)
    for odd, sentence in (
        ("[]", "not a hardware profile"),
        (json.dumps({**json.loads(text), "peak_flops": 5}), "must map dtypes"),
    ):
        own.write_text(odd)
        with pytest.raises(ChunkflowError, match=sentence):
            load_profile(own)
    with pytest.raises(ChunkflowError, match=r"hardware=5 is not a name"):
        load_profile(5)  # type: ignore[arg-type]
    with pytest.raises(
        ChunkflowError, match=r"no hardware profile 'h300': use one of cpu, .*a JSON file, or 'measured'"
    ):
        load_profile("h300")


def test_calibrate_measures_this_machine_and_measured_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ChunkflowError, match="run chunkflow calibrate"):
        load_profile("measured")
    assert main(["calibrate", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "copy to the device" in shown.out and "100%" in shown.err
    profile = load_profile("measured")
    assert measured_path().is_relative_to(tmp_path)
    assert profile.name == "hardware" and profile.shared_link in (True, False)
    assert 1e9 < profile.peak_flops["float32"] < 1e14
    assert 1e8 < profile.h2d_bandwidth < 1e12 and 1e6 < profile.collective_bandwidth < 1e12
    assert min(profile.copy_slowdown, profile.collective_slowdown, profile.compute_slowdown) >= 1
    assert "measured on" in profile.sources["collective_bandwidth"]
    assert main(["calibrate", "--out", "/nowhere/hw.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
