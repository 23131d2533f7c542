"""Profiles: the built-in ones are valid and name the source of each figure; calibrate writes one of this machine."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from chunkflow_compile.cli.main import main
from chunkflow_compile.hardware.profiles import load_profile, measured_path, profile_names
from chunkflow_compile.hardware.scaled import alike, scaled
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

# Of a profile, which no card has: what it is called, and what the ranks are on.
NO_FIGURES = {"name", "cards", "sources", "link_emulation", "node_ranks", "node_bandwidth", "node_latency_s"}


def test_the_built_in_profiles_have_a_source_for_each_figure() -> None:
    assert {"cpu", "a100-80gb-pcie", "h100-nvlink", "h100-pcie-x2", "h200", "rtx-4090-pcie"} <= set(profile_names())
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert set(profile.sources) == {f.name for f in fields(Hardware)} - NO_FIGURES, name
        assert profile.attention in profile.attention_flops
        assert profile.shared_link == (profile.copy_slowdown > 1)


def test_the_paper_s_machine_has_the_paper_s_link() -> None:
    paper = load_profile("h100-pcie-x2")
    assert (paper.h2d_bandwidth, paper.eta_pref) == (31.5e9, 0.89) and not paper.cards


class Card(NamedTuple):
    """As ``torch.cuda.get_device_properties`` says."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    L2_cache_size: int


@pytest.mark.parametrize(
    ("card", "like", "gemm"),
    [
        (Card("NVIDIA L4", 8, 9, 58, 2_040_000, 6_251_000, 192, 48 << 20), "rtx-4090-pcie", 0.37),
        (Card("a card to come", 13, 0, 170, 2_407_000, 14_001_000, 512, 96 << 20), "rtx-5090-pcie", 1.0),
        (Card("a card whose driver tells nothing", 8, 6, 0, 0, 0, 0, 0), "rtx-3090-pcie", 1.0),
        (Card("a card of before", 7, 5, 54, 705_000, 5_001_000, 256, 4 << 20), "a100-80gb-nvlink", 0.25),
    ],
)
def test_a_card_without_a_profile_is_scaled_from_one(card: Card, like: str, gemm: float) -> None:
    assert alike(card) == like
    near = load_profile(like)
    found = scaled(card, near)
    assert found.gemm_flops["bfloat16"] / near.gemm_flops["bfloat16"] == pytest.approx(gemm, abs=0.01)
    assert found.memory_bandwidth == (2e3 * card.memory_clock_rate * card.memory_bus_width / 8 or near.memory_bandwidth)
    assert card.name in found.name and like in found.sources["gemm_flops"] and found.shared_link


def test_a_collective_of_two_nodes_takes_the_slower_of_both_links() -> None:
    one = load_profile("h100-nvlink")
    two = replace(one, node_ranks=8, node_bandwidth=50e9)
    assert two.crossing_seconds(1 << 30, 8) == one.crossing_seconds(1 << 30, 8) == (1 << 30) / one.collective_bandwidth
    assert two.crossing_seconds(1 << 30, 16) == (1 << 30) * 8 / 15 / 50e9
    assert two.latency_s(16) > two.latency_s(8) == one.latency_s(16)


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
        (json.dumps({**json.loads(text), "gemm_flops": 5}), "must map dtypes"),
        (
            json.dumps({**json.loads(text), "attention": "fa4"}),
            "h200 has no attention by fa4: it has cudnn, fa3, fa2",
        ),
        (json.dumps({**json.loads(text), "schema": 1}), "schema 1.*run chunkflow calibrate again"),
    ):
        own.write_text(odd)
        with pytest.raises(ChunkflowError, match=sentence):
            load_profile(own)
    with pytest.raises(ChunkflowError, match=r"hardware=5 is not a name"):
        load_profile(5)  # type: ignore[arg-type]
    with pytest.raises(
        ChunkflowError,
        match=r"no hardware profile 'h300'; the nearest is 'h200'. Use one of .*a JSON file, or 'measured'",
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
    assert 1e9 < profile.gemm_flops["float32"] < 1e14 and 1e9 < profile.attention_flops["cpu"] < 1e14
    assert 1e8 < profile.h2d_bandwidth < 1e12 and 1e6 < profile.collective_bandwidth < 1e12
    assert min(profile.copy_slowdown, profile.collective_slowdown, profile.compute_slowdown) >= 1
    assert "measured on" in profile.sources["collective_bandwidth"]
    assert main(["calibrate", "--out", "/nowhere/hw.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
