"""Weights in pieces on the devices of the ranks: what pulls take, what they slow, what they leave of a budget."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CHUNK, MACHINE, blocks_problem, problem, small_problems, weight

from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.passes.pieces import piece_bytes
from chunkflow_compile.passes.placement.curve import on_grid, plans_along
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.placement.search import Planner
from chunkflow_compile.passes.placement.timeline import Simulator, Timeline
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem, Source
from chunkflow_compile.passes.step import Scheduler

US = 1e-6
about = partial(pytest.approx, rel=1e-3, abs=1e-12)
# Pulls are four times as fast as copies, on the link of collectives.
NVLINK = replace(MACHINE, shared_link=False, copy_slowdown=1.0, collective_slowdown=1.0, peer_bandwidth=4 * CHUNK * 1e6)


def on_devices(found: Problem, ranks: int, *names: str) -> Problem:
    """With pieces of these weights, or of all that may stream, on the devices of the ranks."""
    chosen = set(names) or {w.name for w in found.weights if w.keep is None}
    return replace(
        found, weights=tuple(replace(w, source=Source(ranks=ranks * (w.name in chosen))) for w in found.weights)
    )


def play(found: Problem, windows: dict[str, tuple[int | None, ...]], machine: Hardware = NVLINK) -> Timeline:
    return Simulator(found, machine, CHUNK).play(Scheduler(found, CHUNK).step(windows))


def test_a_pull_takes_the_bytes_of_the_others_and_its_own() -> None:
    found = on_devices(problem([50, 50], [weight(0, 8 * CHUNK, (1,))]), 2)
    assert play(found, {"w0": (0,) * 8}).copy_s == about(1 * US), "half of them, at four chunks a microsecond"
    slow = replace(NVLINK, memory_bandwidth=4 * CHUNK * 1e6)
    assert play(found, {"w0": (0,) * 8}, slow).copy_s == about(3 * US), "the own half is read and written"
    start = replace(NVLINK, chunk_s=5 * US)
    assert play(found, {"w0": (0,) * 8}, start).copy_s == about((1 + 8 * 5) * US), "one start a chunk"
    odd = on_devices(problem([50, 50], [weight(0, 8 * CHUNK, (1,))]), 3)
    assert play(odd, {"w0": (0,) * 8}).copy_s == about((2816 + 2816) / (4 * CHUNK) * US), "one has less"


def test_a_pull_and_a_collective_stretch_each_other() -> None:
    found = problem([9, 9], [weight(0, 16 * CHUNK, (1,))], [(1, 8.0)])
    windows = {"w0": (1,) * 16}  # of 2 us, beside no collective
    alone = play(on_devices(found, 2), windows)
    assert alone.copy_s == about(2 * US) and alone.inflation_s == about(0)
    beside = replace(found, collectives=tuple(replace(c, before=0) for c in found.collectives))
    windows = {"w0": (0,) * 16}
    for pull, collective in ((2.0, 2.0), (1.0, 3.0), (3.0, 1.0)):
        machine = replace(NVLINK, pull_slowdown=pull, collective_pull_slowdown=collective)
        played = play(on_devices(beside, 2), windows, machine)
        assert played.copy_s == about(2 * pull * US)
        assert played.inflation_s == about(2 * pull * US * (1 - 1 / collective))
    assert play(beside, {"w0": (0,) * 16}).inflation_s == about(0), "a copy from host memory takes another link"


def test_a_region_is_stretched_by_what_is_in_flight() -> None:
    """A copy, and beside it a pull that takes twice as long: each by its own factor."""
    found = problem([12, 50], [weight(0, 2 * CHUNK, (1,)), weight(1, 32 * CHUNK, (1,))])
    machine = replace(NVLINK, compute_slowdown=2.0, compute_pull_slowdown=1.25)
    windows = {"w0": (0,) * 2, "w1": (0,) * 32}
    played = play(on_devices(found, 2, "w1"), windows, machine)
    assert played.copy_s == about((2 + 4) * US)
    assert played.compute_s == about((62 + 2 * (1 - 1 / 2.5) + 2 * (1 - 1 / 1.25)) * US)
    crowded = play(on_devices(found, 2, "w1"), windows, replace(machine, shared_link=True))
    assert crowded.copy_s == about((4 + 6) * US), "each takes half of a link that they share"


def test_pulls_keep_clear_of_collectives_and_copies_need_not() -> None:
    found, machine = blocks_problem(8, 30.0), replace(NVLINK, peer_bandwidth=1.01 * MACHINE.copy_rate)
    pulled = place(on_devices(found, 2), machine, Goal(slowdown=1.0), chunk_bytes=CHUNK)
    assert pulled.predicted is not None and pulled.predicted.inflation_s == 0
    spans = pulled.predicted.spans
    meet = [
        (c.name, s.name)
        for s in spans
        for c in spans
        if s.lane == "collective" and c.lane == "pull" and c.start < s.end - 1e-9 and s.start < c.end - 1e-9
    ]
    assert pulled.pulled_bytes > 0 and not meet


def test_weights_in_host_memory_stay_first() -> None:
    found = blocks_problem(6, 9.0)
    names = [w.name for w in found.weights]
    planner = Planner(on_devices(found, 2, *names[::2]), Simulator(on_devices(found, 2, *names[::2]), NVLINK, CHUNK))
    pulled = [planner.chunks[i].lane == "pull" for i in planner.ranking]
    assert pulled == sorted(pulled) and {*pulled} == {False, True}


@settings(max_examples=60, deadline=None)
@given(found=small_problems(), ranks=st.integers(2, 5), every=st.integers(1, 2), room=st.integers(0, 6))
def test_pieces_count_against_memory(found: Problem, ranks: int, every: int, room: int) -> None:
    found = on_devices(found, ranks, *(w.name for w in found.weights[::every]))
    pieces = sum(piece_bytes(w.nbytes, w.source.ranks) for w in found.weights if w.source.sharded)
    assert found.piece_bytes == pieces > 0
    least = least_memory(found, NVLINK, CHUNK)
    plan = place(found, NVLINK, Goal(memory=least + room * CHUNK), chunk_bytes=CHUNK)
    assert plan.piece_bytes == pieces and pieces < plan.device_bytes <= least + room * CHUNK
    for planned, given_ in zip(plan.weights, found.weights, strict=True):
        assert planned.source == given_.source
        assert planned.home in ("device", "peers" if given_.source.sharded else "host")
        assert (planned in plan.streamed) == (planned.home != "device")
    from_host = sum(plan.streamed_bytes(w) for w in plan.weights if w.home == "host")
    assert 0 <= plan.pulled_bytes <= plan.moved_bytes - from_host
    assert plan.pulled_bytes >= (plan.moved_bytes - from_host) * (ranks - 1) / ranks
    assert Plan.from_json(plan.to_json()) == plan
    assert (found.digest == on_devices(found, 0).digest) == (not pieces)
    with pytest.raises(ChunkflowError, match=r"too little: the program needs .* of them for this rank's pieces of wei"):
        place(found, NVLINK, Goal(memory=least - 256), chunk_bytes=CHUNK)


def test_the_curve_of_weights_in_pieces() -> None:
    found = on_devices(blocks_problem(3, 9.0), 2)
    points = on_grid(plans_along(found, NVLINK, CHUNK), CHUNK)
    assert points[0].memory == least_memory(found, NVLINK, CHUNK)
    assert points[-1].memory == found.total_bytes + found.piece_bytes


def test_plans_without_pieces_are_as_they_were() -> None:
    """Problems and plans keep their digests, and their files their bytes."""
    found = blocks_problem(2)
    assert found.digest == "f65d61ab22013e91"
    plan = place(found, MACHINE, Goal(memory=20 * CHUNK), chunk_bytes=CHUNK)
    assert plan.digest == "ef25826bc0c4ffd0" and "peers" not in plan.to_json()
    pulled = place(on_devices(found, 2, "w0"), NVLINK, Goal(memory=24 * CHUNK), chunk_bytes=CHUNK)
    stored = json.loads(pulled.to_json())["weights"]
    assert [w.get("peers") for w in stored[:2]] == [2, None]


def test_ranks_that_cannot_pull() -> None:
    h100, gh200 = load_profile("h100-nvlink"), load_profile("gh200")
    assert not h100.why_no_peers(8)
    for machine, ranks, why in (
        (h100, 1, "it takes a Ulysses degree of 2 or more"),
        (load_profile("rtx-4090-pcie"), 2, "rtx-4090-pcie has no peer_bandwidth: its cards cannot read each other's"),
        (replace(h100, node_ranks=4), 8, "the 8 ranks are on several machines, 4 on each"),
        (gh200, 4, "a rank pulls 340 GB/s from the others, and copies 360 GB/s from host memory"),
    ):
        assert why in machine.why_no_peers(ranks)
    assert not replace(gh200, host_bandwidth=4e11).why_no_peers(4), "they share host memory, and not the links"
    found = on_devices(blocks_problem(2), 4)
    with pytest.raises(ChunkflowError, match="pieces on the devices of 4 ranks, but numbers has no peer_bandwidth"):
        place(found, MACHINE, chunk_bytes=CHUNK)


def test_an_emulated_link_to_other_ranks() -> None:
    """Collectives take it too, and copies have their own."""
    cpu, link = load_profile("cpu"), LinkEmulation(bandwidth=1e8)
    one, two = (on_emulated_link(cpu, replace(link, peers=peers), 4) for peers in (0.0, 6e8))
    assert one.shared_link and one.why_no_peers(4)
    assert not two.shared_link and not two.why_no_peers(4)
    assert (two.peer_bandwidth, two.collective_bandwidth, two.copy_rate) == (6e8, 6e8, 1e8)
