"""Which weights a plan packs: none where copies hide, all where the link is the bound, a share of each block in between.

And which lie in pieces on the devices of the ranks: as many as leave room for all others to stay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import Block, InTurn, aimed, with_goal
from torch import nn

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut, make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers, streamable
from chunkflow_compile.passes.graph.traced import Repeats, Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.choice import planned_for, to_fewer_peers, to_pack
from chunkflow_compile.passes.planning import Settings, make_plan

BLOCKS, WIDTH = 8, 256
STEP = 0.01


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(InTurn(Block(WIDTH) for _ in range(BLOCKS)).bfloat16(), {"x": torch.randn(64, WIDTH).bfloat16()}, 0)


def machine(cut: Cut, load: float) -> Hardware:
    """All weights are computed with in ``STEP``, copied in ``load`` times that, and unpacked in a fifth of it."""
    total, flops = cut.problem.total_bytes, sum(region.cost.flops for region in cut.problem.regions)
    return replace(
        load_profile("h100-nvlink"),
        gemm_flops={"bfloat16": flops / STEP},
        memory_bandwidth=10 * total / STEP,
        h2d_bandwidth=total / (load * STEP),
        **dict.fromkeys(("eta_gemm", "eta_pref", "eta_memory", "compute_slowdown"), 1.0),
        **dict.fromkeys(("launch_s", "chunk_s", "kernel_s"), 0.0),
        cache_bytes=0,
    )


def settings(cut: Cut, load: float, **other: object) -> Settings:
    memory = round(0.6 * cut.problem.total_bytes)
    given = {"memory": memory, "chunk_bytes": 16384, "group_bytes": 1, **other}
    return Settings(hardware=machine(cut, load), **with_goal(**given))


def steps(cut: Cut, load: float, chosen: Cut) -> dict[str, float]:
    """The predicted step with no weight, all, and those of the choice packed."""
    names, goal = packable(cut), settings(cut, load)
    cuts = {"none": cut, "all": packed(cut, names), "chosen": chosen}
    return {form: make_plan(c.problem, goal).predicted.step_s for form, c in cuts.items()}


@pytest.mark.parametrize(("load", "share"), [(1.6, 0.0), (2.2, 0.5), (4.0, 1.0)])
def test_as_many_as_make_the_step_shorter(traced: Traced, load: float, share: float) -> None:
    cut = make_cut(traced, 1)
    chosen = choose_cut(traced, settings(cut, load, pack="auto"))
    names = chosen.packed
    assert len(names) == share * 2 * BLOCKS == share * len(packable(cut))
    positions = {name.split(".", 2)[2] for name in names}
    assert len(names) == len(positions) * BLOCKS, "the same ones of each block"
    step = steps(cut, load, chosen)
    best = min(step["none"], step["all"])
    assert step["chosen"] < best if share == 0.5 else step["chosen"] == best
    if share == 0.5:
        assert to_pack(cut, partial(make_plan, settings=settings(cut, load))) == names, "the same again"


def test_what_settings_ask_for(traced: Traced) -> None:
    cut = make_cut(traced, 1)
    able, one = packable(cut), frozenset({"blocks.3.up.weight"})
    for pack, names in ((False, frozenset()), (True, able), (one, one), (one | {"another"}, one)):
        assert choose_cut(traced, settings(cut, 4.0, pack=pack)).packed == names
    for without in ({"memory": None}, {"part": True}):
        assert not choose_cut(traced, settings(cut, 4.0, pack="auto", **without)).packed, "nothing to judge it by"


def test_a_plan_says_what_it_is_for(traced: Traced) -> None:
    cut = make_cut(traced, 1)
    goal = settings(cut, 2.2, pack="auto")
    half = choose_cut(traced, goal)
    plan = make_plan(half.problem, goal)
    assert planned_for(cut, plan) == half.packed
    assert choose_cut(traced, replace(aimed(goal, memory=None), plan=plan)).packed == half.packed


def test_memory_in_which_only_packed_weights_fit() -> None:
    """A region of six weights: those of three quarters and one unpacked are fewer bytes."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    traced = trace(InTurn([layers]).bfloat16(), {"x": torch.randn(4, WIDTH).bfloat16()}, 0)
    cut = make_cut(traced)
    goal = settings(cut, 4.0, memory=cut.problem.total_bytes - 2048, group_bytes=None, chunk_bytes=1024)
    with pytest.raises(ChunkflowError, match="too little"):
        make_plan(cut.problem, goal)
    assert choose_cut(traced, replace(aimed(goal, pack="auto"), group_bytes=1 << 20)).packed == packable(cut)


def to_peers(cut: Cut, load: float, **other: object) -> Settings:
    """Two ranks, which pull at four times the rate of copies."""
    goal = settings(cut, load, ranks=2, peers="auto", **other)
    return replace(goal, hardware=replace(goal.hardware, peer_bandwidth=4 * goal.hardware.copy_rate))


def test_weights_that_stay_have_no_pieces(traced: Traced) -> None:
    cut = make_cut(traced, 1)
    goal = to_peers(cut, 11.0, memory=round(0.75 * cut.problem.total_bytes), chunk_bytes=1 << 18)
    best = choose_cut(traced, goal)
    plan, host, everything = (make_plan(c.problem, goal) for c in (best, cut, on_peers(cut, streamable(cut), 2)))
    assert {w.name for w in plan.streamed} <= best.on_peers == {w.name for w in plan.weights if w.source.sharded}
    assert 0 < len(best.on_peers) <= len(streamable(cut)) - 2
    assert all(p.device_bytes <= goal.goal.memory for p in (plan, host, everything))
    steps = [p.predicted.step_s / p.predicted.resident_step_s for p in (plan, everything, host)]
    assert steps[0] < 0.99 * steps[1] and steps[1] < 0.5 * steps[2]
    again = replace(aimed(goal, memory=None), plan=plan)
    assert choose_cut(traced, again).on_peers == best.on_peers
    assert choose_cut(traced, aimed(goal, peers=best.on_peers | {"other"})).problem == best.problem
    assert choose_cut(traced, aimed(goal, peers=True)).on_peers == streamable(cut)


def test_fewer_pieces_where_they_leave_room(traced: Traced) -> None:
    """A cut whose plan has more to pull than its gaps hold, and memory left."""
    cut = make_cut(traced, 1)
    goal = to_peers(cut, 11.0, memory=round(0.85 * cut.problem.total_bytes), chunk_bytes=1 << 18)
    plan, everything = partial(make_plan, settings=goal), on_peers(cut, streamable(cut), 2)
    names = to_fewer_peers(everything, plan, 2)
    fewer, pulled = plan(on_peers(cut, names, 2).problem), plan(everything.problem)
    assert frozenset() < names < streamable(cut)
    assert fewer.predicted.step_s < 0.99 * pulled.predicted.step_s and fewer.device_bytes <= goal.goal.memory
    ample = partial(make_plan, settings=aimed(goal, memory=2 * cut.problem.total_bytes))
    assert to_fewer_peers(everything, ample, 2) == everything.on_peers
    assert to_fewer_peers(cut, plan, 2) == frozenset(), "there are none"


def test_some_come_from_the_host_beside_pulls(traced: Traced) -> None:
    """Where the link of the ranks is the bound, and the other link would have nothing to do."""
    cut = make_cut(traced, 1)
    goal = to_peers(cut, 6.0, memory=round(0.7 * cut.problem.total_bytes), chunk_bytes=1 << 18)
    goal = replace(goal, hardware=replace(goal.hardware, peer_bandwidth=1.5 * goal.hardware.copy_rate))
    plan, pulls = (make_plan(c.problem, goal) for c in (choose_cut(traced, goal), on_peers(cut, streamable(cut), 2)))
    assert {w.home for w in plan.streamed} == {"host", "peers"}
    assert plan.predicted.step_s < 0.95 * pulls.predicted.step_s
    lanes = {s.lane for s in plan.predicted.spans}
    assert {"copy", "pull"} <= lanes


def test_no_pieces_where_copies_hide_or_ranks_cannot_pull(traced: Traced) -> None:
    cut = make_cut(traced, 1)
    assert not choose_cut(traced, to_peers(cut, 1.6)).on_peers
    for change, why in (
        ({"hardware": machine(cut, 4.0)}, "but h100-nvlink has no peer_bandwidth"),
        ({"ranks": 0}, "but there is one rank only"),
    ):
        goal = replace(to_peers(cut, 4.0), **change)
        if "hardware" in change:
            goal = replace(goal, hardware=replace(goal.hardware, peer_bandwidth=0.0))
        assert not choose_cut(traced, goal).on_peers
        with pytest.raises(ChunkflowError, match=f"peers=True keeps weights on the devices of all ranks, {why}"):
            choose_cut(traced, aimed(goal, peers=True))


def test_fewer_bytes_for_the_same_step(traced: Traced) -> None:
    """Without a budget, the plan for a step is the smallest."""
    cut = make_cut(traced, 1)
    goal = aimed(to_peers(cut, 4.0), memory=None, slowdown=1.02)
    plans = [make_plan(c.problem, goal) for c in (choose_cut(traced, goal), cut)]
    assert plans[0].device_bytes < 0.8 * plans[1].device_bytes
    assert all(p.predicted.step_s <= 1.0201 * p.predicted.resident_step_s for p in plans)


def test_a_share_where_pieces_of_all_have_no_room(traced: Traced) -> None:
    cut = make_cut(traced, 1)
    goal = to_peers(cut, 4.0, memory=round(0.4 * cut.problem.total_bytes))
    with pytest.raises(ChunkflowError, match="too little"):
        make_plan(on_peers(cut, streamable(cut), 2).problem, goal)
    best = choose_cut(traced, goal)
    plan, host = (make_plan(c.problem, goal) for c in (best, cut))
    assert {w.home for w in plan.streamed} == {"host", "peers"} and plan.device_bytes <= goal.goal.memory
    assert plan.predicted.step_s < 0.9 * host.predicted.step_s


def test_blocks_in_turns(traced: Traced) -> None:
    """One program stands for all blocks: a weight has pieces in each of them or in none."""
    one = trace(InTurn([Block(WIDTH)]).bfloat16(), {"x": torch.randn(64, WIDTH).bfloat16()}, 0)
    cut = make_cut(one, 1)
    goal, total = to_peers(cut, 4.0), 8 * cut.problem.total_bytes
    turns = replace(one, repeats=Repeats(count=8, goal=Goal(memory=round(0.6 * total))))
    assert choose_cut(turns, goal).on_peers


def test_packed_weights_in_pieces(traced: Traced) -> None:
    cut = make_cut(traced, 1)
    both = choose_cut(traced, to_peers(cut, 4.0, pack=True))
    assert both.packed == packable(cut) and both.on_peers
    assert both.problem.piece_bytes == pytest.approx(
        sum(w.nbytes for w in both.problem.weights if w.source.sharded) / 2, rel=1e-3
    )
