"""Profiles: the built-in ones are valid and name the source of each figure; calibrate writes one of this machine.  The rate
of a drive, measured on a file; collectives of one process that stands for all ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from clocks import OwnClock
from torch.utils._python_dispatch import TorchDispatchMode

from chunkflow_compile.cli import calibrate as calibrate_command
from chunkflow_compile.cli.main import main
from chunkflow_compile.hardware import contention, device_figures, rank_figures, stopwatch
from chunkflow_compile.hardware.drive_rate import drive_rate
from chunkflow_compile.hardware.loopback import join_loopback
from chunkflow_compile.hardware.profiles import load_profile, measured_path, profile_names, profile_of_card
from chunkflow_compile.hardware.scaled import scaled, similar_profile
from chunkflow_compile.hardware.siblings import SIBLINGS
from chunkflow_compile.options import Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import RegionCost

# Of a profile, which no card has: what it is called, and what the ranks are on.
NO_FIGURES = {"name", "cards", "sources", "link_emulation"} | {
    f"node_{what}" for what in ("ranks", "bandwidth", "latency_s")
}


def test_the_built_in_profiles_have_a_source_for_each_figure() -> None:
    assert {"cpu", "a100-80gb-pcie", "h100-nvlink", "h100-pcie-x2", "h200", "rtx-4090-pcie"} <= set(profile_names())
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name and (profile.memory_bytes > 0) == (name != "cpu")
        assert set(profile.sources) == {f.name for f in fields(Hardware)} - NO_FIGURES, name
        assert profile.attention in profile.attention_flops
        assert profile.shared_link == (profile.copy_slowdown > 1)
        assumed = 1.1 if profile.shared_link and name != "cpu" else 2.0
        assert profile.attention_slowdown == assumed and "assumption" in profile.sources["attention_slowdown"].lower()
        if name != "cpu":
            times = profile.cache_bandwidth / profile.memory_bandwidth
            assert f" {times:.1f} times " in profile.sources["cache_bandwidth"], name
    paper = load_profile("h100-pcie-x2")
    assert (paper.h2d_bandwidth, paper.eta_pref) == (31.5e9, 0.89) and not paper.cards, "the link of the paper"


@pytest.mark.parametrize(
    ("name", "card", "pcie", "memory", "tflops", "tb"),
    [
        ("rtx-3060-pcie", "NVIDIA GeForce RTX 3060", 31.5, 12, 26, 0.36),
        ("rtx-3080-pcie", "NVIDIA GeForce RTX 3080", 31.5, 10, 63, 0.76),
        ("rtx-4060-ti-pcie", "NVIDIA GeForce RTX 4060 Ti", 15.75, 16, 44, 0.288),
        ("rtx-4070-ti-super-pcie", "NVIDIA GeForce RTX 4070 Ti SUPER", 31.5, 16, 85, 0.672),
        ("rtx-5060-ti-pcie", "NVIDIA GeForce RTX 5060 Ti", 31.5, 16, 50, 0.448),
        ("rtx-5070-ti-pcie", "NVIDIA GeForce RTX 5070 Ti", 63, 16, 98, 0.896),
        ("a10g-pcie", "NVIDIA A10G", 31.5, 24, 74, 0.6),
        ("l4-pcie", "NVIDIA L4", 31.5, 24, 69, 0.3),
        ("rtx-a5000-pcie", "NVIDIA RTX A5000", 31.5, 24, 94, 0.768),
        ("v100-pcie", "Tesla V100-SXM2-16GB", 15.75, 32, 85, 0.9),
        ("t4-pcie", "Tesla T4", 15.75, 16, 42, 0.32),
    ],
)
def test_a_sibling_of_a_card(name: str, card: str, pcie: float, memory: int, tflops: float, tb: float) -> None:
    """By its data sheet; its rates by multiprocessors.  Torch's name of the card finds it."""
    profile, like = load_profile(name), load_profile(SIBLINGS[name].like)
    assert profile_of_card(card) == name
    assert profile.h2d_bandwidth == pcie * 1e9 and profile.memory_bytes == memory << 30
    assert f"{pcie:.4g} GB/s a direction" in profile.sources["h2d_bandwidth"]
    assert profile.gemm_flops["bfloat16"] == pytest.approx(tflops * 1e12, rel=0.02)
    assert profile.memory_bandwidth == tb * 1e12
    for figure in ("gemm_flops", "cache_bandwidth"):
        assert profile.sources[figure].split(":")[0] in ("assumption", "measured"), figure
    assert profile.collective_bandwidth / profile.h2d_bandwidth in (
        pytest.approx(3 / 8, 0.01),
        pytest.approx(3 / 4, 0.01),
    )
    if name in ("v100-pcie", "t4-pcie"):  # a plan in bfloat16 is one in float16
        assert profile.gemm_flops["bfloat16"] == profile.gemm_flops["float16"] > 5 * profile.gemm_flops["float32"]
        assert "stands for the same model loaded in float16" in profile.sources["gemm_flops"]
        assert profile.attention == "efficient"
    else:
        assert profile.attention == like.attention and profile.eta_gemm == like.eta_gemm
    assert Hardware.from_json(profile.to_json()) == profile


def test_the_built_in_profiles_of_cards_have_a_memory() -> None:
    for name in profile_names():
        if name != "cpu":
            assert f"{load_profile(name).memory_bytes >> 30} GB" in load_profile(name).sources["memory_bytes"]


@pytest.mark.parametrize(
    ("name", "ranks", "rate"),
    [
        ("a100-80gb-nvlink", 4, 27.4e9),
        ("a100-80gb-nvlink", 8, 13.75e9),
        ("h100-nvlink", 8, 54.8e9),
        ("rtx-4090-pcie", 3, 27.4e9),
        ("rtx-4090-pcie", 4, 22.5e9),
        ("rtx-5090-pcie", 1, 54.8e9),
        ("rtx-5090-pcie", 2, 27.5e9),
        ("gh200", 4, 360e9),
    ],
)
def test_what_ranks_of_a_built_in_machine_share(name: str, ranks: int, rate: float) -> None:
    assert load_profile(name).shared_by(ranks).copy_rate == pytest.approx(rate, rel=1e-3)


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
    total_memory: int = 24 << 30


LIKE_L4, TO_COME = (
    Card("a card as large as an L4", 8, 9, 58, 2_040_000, 6_251_000, 192, 48 << 20),
    Card("a card to come", 13, 0, 170, 2_407_000, 14_001_000, 512, 96 << 20),
)


@pytest.mark.parametrize(
    ("card", "like", "gemm"),
    [
        (LIKE_L4, "rtx-4090-pcie", 0.37),
        (TO_COME, "rtx-5090-pcie", 1.0),
        (Card("a card whose driver tells nothing", 8, 6, 0, 0, 0, 0, 0), "rtx-3090-pcie", 1.0),
        (Card("a card whose driver tells no clock", 9, 0, 66, 0, 0, 0, 0), "h100-nvlink", 0.5),
        (Card("a Turing card", 7, 5, 54, 795_000, 5_001_000, 256, 4 << 20), "t4-pcie", 0.675),
        (Card("a card of before", 6, 1, 40, 1_530_000, 5_001_000, 256, 4 << 20), "v100-pcie", 0.5),
    ],
)
def test_a_card_without_a_profile_is_scaled_from_one(card: Card, like: str, gemm: float) -> None:
    assert similar_profile(card) == like
    near = load_profile(like)
    found = scaled(card, near)
    assert found.gemm_flops["bfloat16"] / near.gemm_flops["bfloat16"] == pytest.approx(gemm, abs=0.01)
    assert found.memory_bandwidth == (2e3 * card.memory_clock_rate * card.memory_bus_width / 8 or near.memory_bandwidth)
    assert found.memory_bytes == card.total_memory and found.sources["memory_bytes"] == "its driver"
    assert card.name in found.name and like in found.sources["gemm_flops"] and found.shared_link
    assert found.host_bandwidth == 0 and "not known" in found.sources["host_bandwidth"]
    assert "fair share" in found.sources["copy_slowdown"] and "fair share" in found.sources["collective_slowdown"]
    assert found.attention_slowdown == 1.1 and "not measured" in found.sources["attention_slowdown"]
    told = {"memory_bandwidth": card.memory_clock_rate, "cache_bytes": card.L2_cache_size}
    assert all((found.sources[figure] == near.sources[figure]) == (not value) for figure, value in told.items())
    assert (" and clock" in found.sources["gemm_flops"]) == (card.clock_rate > 0)


def test_the_profile_of_a_card_without_one_is_of_the_card_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = TO_COME, LIKE_L4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: cards[d if isinstance(d, int) else torch.device(d).index or 0]
    )
    for device, name in (("cuda:1", cards[1].name), ("cuda:0", cards[0].name), ("cuda", cards[0].name)):
        with pytest.warns(UserWarning, match=f"No hardware profile is of {name}"):
            chosen = Options().on(torch.device(device))
        assert chosen.profile().name == f"scaled for {name}"
    assert load_profile("scaled").name == f"scaled for {cards[0].name}"
    for name, said in (("scaled:2", "'scaled:2'.* has 2 cards"), ("scaled:x", "no hardware profile 'scaled:x'")):
        with pytest.raises(ChunkflowError, match=said):
            load_profile(name)


def test_the_rate_of_a_cache_is_less_the_start_of_a_kernel() -> None:
    clock, start_s, rate = OwnClock(), 2e-6, 5e12

    class Card(TorchDispatchMode):
        """Whose kernels read and write what they add to."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.add:
                clock.sleep(start_s + 2 * args[0].nbytes / rate)
            return func(*args, **(kwargs or {}))

    def in_a_row(call: Callable[[], object]) -> float:
        begin = clock.now()
        with Card():
            for _ in range(10):
                call()
        return (clock.now() - begin) / 10

    part = torch.ones(1 << 20)
    found = device_figures.cache_rate(part, in_a_row)
    assert found == pytest.approx(rate, rel=1e-3)
    cost = RegionCost(flops=0, dtype="float32", traffic=((part.nbytes, 2 * part.nbytes),), kernels=1)
    cached = replace(
        load_profile("h200"), cache_bandwidth=found, cache_bytes=4 * part.nbytes, kernel_s=start_s, launch_s=0.0
    )
    assert cost.seconds(cached) == pytest.approx(in_a_row(lambda: torch.add(part, 1, out=part)), rel=1e-3)
    assert device_figures.cache_rate(part, lambda call: 1.0) == 0, "no longer than for one element"


def test_a_collective_of_two_nodes_takes_the_slower_of_both_links() -> None:
    one = load_profile("h100-nvlink")
    two = replace(one, node_ranks=8, node_bandwidth=50e9)
    assert two.crossing_seconds(1 << 30, 8) == one.crossing_seconds(1 << 30, 8) == (1 << 30) / one.collective_bandwidth
    assert two.crossing_seconds(1 << 30, 16) == (1 << 30) * 8 / 15 / 50e9
    assert two.latency_s(16) > two.latency_s(8) == one.latency_s(16)


# A field of a profile, a value of another type, and what is said.
ODD = (
    ("name", 5, "name must be text, not 5"),
    ("cards", None, "cards must be a list of names of cards, not None"),
    ("cards", "NVIDIA L4", "cards must be a list of names of cards, not 'NVIDIA L4'"),
    ("cards", [5], r"cards must be a list of names of cards, not \[5\]"),
    ("attention", 5, "attention must be text, not 5"),
    ("attention", ["fa2"], r"attention must be text, not \['fa2'\]"),
    ("attention_flops", {"fa2": "fast"}, r"attention_flops\['fa2'\] must be a number, not 'fast'"),
    ("sources", ["a data sheet"], "sources must map fields to where their figures come from, not "),
    ("sources", {"eta_gemm": 5}, "sources must map fields to where their figures come from, not "),
    ("link_emulation", 5, "link_emulation must map fields to figures, not 5"),
    ("link_emulation", {"bandwith": 1e9}, "link_emulation is not valid: .*'bandwith'"),
    ("link_emulation", {"bandwidth": 1e9, "shared": 5}, "link_emulation.shared must be text, not 5"),
    ("link_emulation", {"bandwidth": 1e9, "order": []}, r"link_emulation.order must be fair or fifo, not \[\]"),
    ("memory_bandwidth", 4800, "memory_bandwidth=4800 is outside .* bytes, seconds"),
    ("attention_slowdown", 0.5, "attention_slowdown=0.5 is outside 1 .. 100"),
)
# And what is said of the profile as a whole.
ODD_TOGETHER = (
    ("gemm_flops", 5, "must map dtypes"),
    ("attention", "fa4", "h200 has no attention by fa4: it has cudnn, fa3, fa2"),
    ("schema", 1, "schema 1.*run chunkflow calibrate again"),
)


def test_a_profile_is_found_by_name_or_file_and_a_bad_one_is_named(tmp_path: Path) -> None:
    text = load_profile("h200").to_json()
    own = tmp_path / "own.json"
    own.write_text(text.replace('"h200"', '"own"'))
    assert load_profile(own).name == "own" and load_profile(str(own)) == load_profile(own)
    body = json.loads(text)
    for name in ("compute_slowdown", "attention_slowdown"):  # older profiles do not have them
        del body[name], body["sources"][name]
    own.write_text(json.dumps(body))
    assert (load_profile(own).compute_slowdown, load_profile(own).attention_slowdown) == (1, 2)
    del body["chunk_s"]
    own.write_text(json.dumps(body))
    with pytest.raises(ChunkflowError, match=r"own.json: The hardware profile lacks chunk_s"):
        load_profile(own)
    own.write_text("[]")
    with pytest.raises(ChunkflowError, match="not a hardware profile"):
        load_profile(own)
    for field, value, said in (*((f, v, f"own.json: Hardware field {said}") for f, v, said in ODD), *ODD_TOGETHER):
        own.write_text(json.dumps({**json.loads(text), field: value}))
        with pytest.raises(ChunkflowError, match=said):
            load_profile(own)
    with pytest.raises(ChunkflowError, match=r"hardware=5 is not a name"):
        load_profile(5)  # type: ignore[arg-type]
    for name, nearest in (
        ("rtx4090", "rtx-4090-pcie, rtx-4090-d-pcie, rtx-4090-laptop"),
        ("A100", "a100-80gb-pcie, a100-40gb-pcie, a100-80gb-nvlink"),
    ):
        fix = "Use one of them, a JSON file, or 'measured'; chunkflow hardware lists all"
        with pytest.raises(ChunkflowError, match=f"profile '{name}'; the nearest are {nearest}. {fix}"):
            load_profile(name)


class OwnTime(threading.local):
    """A clock for each thread: copies and exchanges take their bytes by a rate, and any other work a millisecond."""

    seconds = 0.0

    def perf_counter(self) -> float:
        self.seconds += 1e-3
        return self.seconds

    monotonic = perf_counter

    def taking(self, work: Callable[..., Any], nbytes: int) -> Callable[[], None]:
        def run() -> None:
            work()
            self.seconds += nbytes / 1e9

        return run


def on_own_time(patch: pytest.MonkeyPatch) -> None:
    time, copier, exchange = OwnTime(), contention.copier, rank_figures.all_to_all
    for module in (stopwatch, contention):
        patch.setattr(module, "time", time)
    for module in (contention, device_figures, rank_figures):
        patch.setattr(module, "copier", lambda device, size, *rest: time.taking(copier(device, size, *rest), size))
    patch.setattr(
        rank_figures, "all_to_all", lambda device, size, *rest: time.taking(exchange(device, size, *rest), size)
    )


def measure_little(rank: int, *args: Any) -> None:
    rank_figures.COLLECTIVE_SIZES, rank_figures.EXCHANGES, contention.TURNS = (4096, 4 << 20), 10, 3
    with pytest.MonkeyPatch.context() as patch:
        on_own_time(patch)
        rank_figures._measure_rank(rank, *args)


def copy_on_own_time(rank: int, *args: Any) -> None:
    """The second rank at half the rate of the first."""
    time = OwnTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch, "time", time)
        patch.setattr(rank_figures, "copier", lambda device, size, *_: time.taking(lambda: None, (1 + rank) * size))
        rank_figures._copy_together(rank, *args)


def test_attention_and_a_collective_that_take_turns_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor is the harmonic mean of both: what they get done together is as measured."""
    cpu, alone_s = torch.device("cpu"), iter((4e-3, 8e-3))
    monkeypatch.setattr(contention, "median_seconds", lambda *_: next(alone_s))
    monkeypatch.setattr(contention, "contended_seconds", lambda *_: (6e-3, 24e-3))
    found = contention.attention_slowdown(cpu, lambda: None, repeats=3)
    assert found == 2 and 2 / found == pytest.approx(1 / 1.5 + 1 / 3)


@pytest.mark.long
def test_ranks_that_copy_at_once(monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    monkeypatch.setattr(rank_figures, "_copy_together", copy_on_own_time)
    ((figure, rate, how),) = rank_figures.joint_copy_figures(torch.device("cpu"), None, 2)
    assert figure == "host_bandwidth" and "2 ranks that copy at once" in how
    assert rate == pytest.approx(2 * 0.5e9, rel=0.05), "twice that of the slower"


def test_calibrate_measures_this_machine_and_measured_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rank_figures, "_measure_rank", measure_little)
    on_own_time(monkeypatch)
    # by their own clock, all repeats take equally long
    monkeypatch.setattr(device_figures, "median_seconds", partial(contention.median_seconds, repeats=1))
    with pytest.raises(ChunkflowError, match="run chunkflow calibrate"):
        load_profile("measured")
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")
    times = iter(([1.0, 1.02], [1.0, 1.2]))  # before and after
    monkeypatch.setattr(calibrate_command, "repeated_seconds", lambda _: next(times))
    assert main(["calibrate", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "copy to the device" in shown.out and max(map(len, shown.out.splitlines()[:-1])) <= 100
    assert shown.err.startswith(
        "note: the machine was busy with other work, so the profile cannot be trusted: equal GEMMs"
    )
    assert "took from 1000 to 1200 ms" in " ".join(shown.err.split())
    profile = load_profile("measured")
    assert measured_path().is_relative_to(tmp_path)
    rate = pytest.approx(1e9, rel=1e-3)
    assert profile.name == "hardware" and profile.shared_link is False
    assert profile.gemm_flops["float32"] == pytest.approx(2 * 1024**3 / 1e-3)
    assert profile.attention_flops["cpu"] == pytest.approx(4 * 8 * 1024**2 * 128 / 1e-3)
    assert profile.host_bandwidth == profile.peer_bandwidth == 0
    assert all("--ranks N" in profile.sources[figure] for figure in ("host_bandwidth", "peer_bandwidth"))
    assert profile.h2d_bandwidth == rate and 2 * profile.collective_bandwidth == rate, "half of an exchange crosses"
    assert (profile.copy_slowdown, profile.collective_slowdown, profile.compute_slowdown) == (1, 1, 1)
    assert profile.attention_slowdown == 1 and "attention during a collective  1.00 times" in shown.out
    assert "measured on" in profile.sources["collective_bandwidth"]
    assert main(["calibrate", "--out", "/nowhere/hw.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_equal_work_takes_equally_long_on_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    on_own_time(monkeypatch)
    seconds = device_figures.repeated_seconds(torch.device("cpu"))
    assert len(seconds) > 2 and stopwatch.why_uneven("equal GEMMs", seconds) == ""
    assert stopwatch.why_uneven("they", [1.0, 1.05]) == "" != stopwatch.why_uneven("they", [1.0, 1.2])


def test_threads_that_compute_tell_whether_they_share_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = stopwatch._owned_shares(threads=2, seconds=0.01)
    assert len(shares) == 2 and all(0 < share < 1.2 for share in shares)
    monkeypatch.setattr(stopwatch, "_owned_shares", lambda threads, seconds: [1.0, 0.95])
    assert stopwatch.why_shared(2) == ""
    monkeypatch.setattr(stopwatch, "_owned_shares", lambda threads, seconds: [1.0, 0.51])
    assert stopwatch.why_shared(2) == "a thread had a processor for 51 % of the time"


def test_the_largest_file_of_a_folder_is_read(tmp_path: Path) -> None:
    small, empty = tmp_path / "small", tmp_path / "empty"
    small.write_bytes(b"x" * 100)
    empty.mkdir()
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    for path in (tmp_path, tmp_path / "large"):
        assert 1e5 < drive_rate(path) < 1e12
    for path, said in (
        (empty, "has no files: give the folder of a checkpoint"),
        (small, "has 100 B, too little to measure a drive"),
        (tmp_path / "none", "No such file or directory"),
    ):
        with pytest.raises(ChunkflowError, match=said):
            drive_rate(path)


def test_peers_send_back_what_they_receive() -> None:
    """One process stands for four.  Parts may differ if both directions agree."""
    join_loopback(4)
    try:
        check_loopback()
    finally:
        dist.destroy_process_group()


def check_loopback() -> None:
    assert dist.get_world_size() == 4 and dist.get_rank() == 0
    sent, received = torch.randn(8, 3), torch.empty(8, 3)
    assert torch.equal(funcol.wait_tensor(funcol.all_to_all_single(sent, None, None, dist.group.WORLD)), sent)
    dist.all_to_all_single(received, sent)
    assert torch.equal(received, sent)
    gathered = funcol.wait_tensor(funcol.all_gather_tensor(sent, 0, dist.group.WORLD))
    assert torch.equal(gathered, sent.repeat(4, 1))
    dist.barrier()
    sent, parts = torch.randn(10), [1, 2, 3, 4]
    assert torch.equal(funcol.wait_tensor(funcol.all_to_all_single(sent, parts, parts, dist.group.WORLD)), sent)
    with pytest.raises((NotImplementedError, RuntimeError), match="splits must be equal"):
        funcol.wait_tensor(funcol.all_to_all_single(sent, parts, parts[::-1], dist.group.WORLD))
