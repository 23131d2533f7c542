"""Placement: against the optimum of small problems and the bounds of large ones; limits, reasons, determinism."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest
from helpers import aimed, with_goal
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CHUNK, MACHINE, blocks_problem, machines, problem, small_problems, weight

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import POLICIES
from chunkflow_compile.passes.placement.curve import on_grid, plans_along
from chunkflow_compile.passes.placement.place import PlanBuilder, least_memory, place
from chunkflow_compile.passes.placement.search import Planner
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, join_loss, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.units import enough, size


def planned(found: Problem, machine: Hardware = MACHINE, **goal: object) -> Plan:
    return place(found, machine, **with_goal(**{"chunk_bytes": CHUNK, **goal}))


def ratio(plan: Plan) -> float:
    """The predicted step over the step with all weights resident."""
    assert plan.predicted is not None
    return plan.predicted.step_s / plan.predicted.resident_step_s


def floor(found: Problem, machine: Hardware = MACHINE) -> int:
    return least_memory(found, machine, CHUNK)


def best_of_all(found: Problem, machine: Hardware, memory: int) -> float:
    """The fastest step of all placements of the chunks that fit ``memory``."""
    planner = Planner(found, Simulator(found, machine, CHUNK))
    builder = PlanBuilder(planner)
    choices = [(None, *range(c.first, c.last - planner.count, -1)) for c in planner.chunks]
    plays = [planner.play(placed, hard) for placed in product(*choices) for hard in (False, True)]
    return next(c.step_s for c in sorted(plays, key=lambda c: c.step_s) if builder.slots(c) <= memory)


@pytest.mark.long
def test_nearly_all_are_within_ten_percent_of_the_optimum_at_equal_memory() -> None:
    """Of small problems, in which one chunk is a large share of the step: the search moves many chunks at once."""
    ratios = []

    @settings(max_examples=100, derandomize=True)
    @given(small_problems(), machines(), st.floats(0, 1))
    def compare(found: Problem, machine: Hardware, room: float) -> None:
        least = floor(found, machine)
        memory = least + int(room * (found.total_bytes + CHUNK - least))
        plan = planned(found, machine, memory=memory)
        assert plan.device_bytes <= memory
        assert plan.predicted is not None
        ratios.append(plan.predicted.step_s / best_of_all(found, machine, memory))

    compare()
    assert sum(r <= 1.1 for r in ratios) >= 0.95 * len(ratios)
    assert max(ratios) <= 2


@pytest.mark.parametrize("count", [25, pytest.param(100, marks=pytest.mark.long)])
def test_a_goal_is_kept(count: int) -> None:
    slowdowns = st.one_of(st.none(), st.sampled_from([1.0, 1.02, 1.3, 3.0]))
    drawn = given(small_problems(chunks=12), machines(), st.floats(0, 1), slowdowns)
    settings(max_examples=count)(drawn(check_goal))()


def check_goal(found: Problem, machine: Hardware, room: float, slowdown: float | None) -> None:
    if slowdown is not None:
        assert ratio(planned(found, machine, slowdown=slowdown)) <= slowdown + 1e-6
        return
    least = floor(found, machine)
    assert planned(found, machine, memory=least).device_bytes == least
    with pytest.raises(ChunkflowError, match=f"Give weight_memory='{enough(least)}' "):
        planned(found, machine, memory=least - 1)
    memory = least + int(room * found.total_bytes)
    plan = planned(found, machine, memory=memory)
    assert plan.device_bytes <= memory
    assert plan.predicted is not None and plan.predicted.peak_bytes <= plan.device_bytes


def test_memory_counts_activations_and_weight_memory_does_not() -> None:
    found, held = blocks_problem(4), (CHUNK, 3 * CHUNK + 5)
    regions = (replace(region, live=held[k % 2]) for k, region in enumerate(found.regions))
    found, live = replace(found, regions=tuple(regions)), max(held)
    least = floor(found)
    tight = least + CHUNK
    both = planned(found, memory=tight + live, activations=True)
    assert both == planned(found, memory=tight) != planned(found, memory=tight + live)
    assert both.device_bytes + live <= tight + live
    assert planned(found, memory=least + live, activations=True).device_bytes == least
    said = rf"{re.escape(size(live))} of them for activations, .*Give memory='{enough(least + live)}' or more"
    with pytest.raises(ChunkflowError, match=f"^memory=.* is too little: .*{said}"):
        planned(found, memory=least + live - 1, activations=True)
    with pytest.raises(ChunkflowError, match=r"^memory=.* is below the .* that policy resident takes"):
        planned(found, policy="resident", memory=found.total_bytes + live - 1, activations=True)
    assert not planned(found, policy="resident", memory=found.total_bytes + live, activations=True).streamed


@pytest.mark.parametrize("compute", [10.0, 18.0, 25.0, 40.0, 80.0])
@pytest.mark.parametrize("exchange", [1.0, 4.0])
def test_streaming_everything_takes_as_long_as_the_step_or_the_link_at_most_two_percent_more(
    compute: float, exchange: float
) -> None:
    planner = Planner(
        blocks_problem(16, compute, exchange), Simulator(blocks_problem(16, compute, exchange), MACHINE, CHUNK)
    )
    found = planner.candidate(0, None)
    assert found is not None and None not in found.placed
    busy = sum(c.seconds for c in planner.chunks) + sum(planner.simulator.collective_s)
    bound = max(planner.resident.step_s, busy)
    assert bound * (1 - 1e-9) <= found.step_s <= 1.02 * bound


@pytest.mark.parametrize("compute", [10.0, 40.0])
def test_everything_resident_is_the_resident_policy_exactly(compute: float) -> None:
    found = blocks_problem(6, compute)
    planner = Planner(found, Simulator(found, MACHINE, CHUNK))
    assert planner.play([None] * len(planner.chunks)).timeline == replace(planner.resident, spans=())
    ample = planned(found, memory=2 * found.total_bytes)
    resident = planned(found, policy="resident")
    assert ample.predicted is not None and resident.predicted is not None
    assert ample.predicted.step_s == pytest.approx(resident.predicted.step_s, abs=1e-9)
    assert resident.device_bytes == found.total_bytes and resident.moved_bytes == 0
    in_the_arena = planned(found, memory=2 * found.total_bytes, residents_in_arena=True)
    assert any(None in w.windows for w in in_the_arena.streamed)
    step_s = Simulator(found, MACHINE, CHUNK).step_under(in_the_arena)
    assert in_the_arena.predicted is not None and step_s == pytest.approx(in_the_arena.predicted.step_s, abs=1e-9)


@pytest.mark.parametrize(
    ("compute", "exchange"),
    [(8.0, 4.0), (30.0, 6.0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((20.0, 2.0), (60.0, 4.0)))],
)
def test_never_slower_than_layerwise_in_its_memory_nor_larger_at_its_step(compute: float, exchange: float) -> None:
    found = blocks_problem(6, compute, exchange)
    layerwise = planned(found, policy="layerwise")
    barrier = planned(found, policy="layerwise-barrier")
    assert layerwise.predicted is not None and barrier.predicted is not None
    assert layerwise.moved_bytes == barrier.moved_bytes == found.total_bytes
    fast = planned(found, memory=layerwise.device_bytes)
    assert ratio(fast) <= ratio(layerwise) * (1 + 1e-9)
    small = planned(found, slowdown=ratio(layerwise))
    assert small.device_bytes <= layerwise.device_bytes


@pytest.mark.parametrize("room", [20, *(pytest.param(room, marks=pytest.mark.long) for room in (24, 28))])
def test_slots_of_weights_that_come_and_go_in_order_cost_at_most_one_percent(room: int) -> None:
    """Room for the weights of one or two regions, and the link is the bound: gaps between slots would be missed."""
    regions = [(6, 6), (1,) * 7, (4,) * 4] * 20
    sizes = [(size, k) for k, chunks in enumerate(regions) for size in chunks]
    found = problem([6.0] * len(regions), [weight(i, size * CHUNK, (k,)) for i, (size, k) in enumerate(sizes)])
    plan = planned(found, memory=room * CHUNK)
    without = Planner(found, Simulator(found, MACHINE, CHUNK)).fastest(room * CHUNK)
    assert plan.predicted is not None and plan.moved_bytes > 0.9 * found.total_bytes
    assert plan.device_bytes <= room * CHUNK
    assert plan.predicted.step_s <= 1.01 * without.step_s


@pytest.mark.parametrize("share", [0.4, pytest.param(0.6, marks=pytest.mark.long), 0.8])
def test_weights_lie_beside_an_arena_that_is_larger_than_they_need(share: float) -> None:
    """As where a preamble runs in it: what the arena has too much does not cost the others their place."""
    found = blocks_problem(6, 8.0)
    small = planned(found, memory=int(share * found.total_bytes))
    arena = small.arena_bytes + found.total_bytes // 4
    memory = small.device_bytes - small.arena_bytes + arena
    plan = planned(found, memory=memory, arena=arena)
    assert plan.arena_bytes >= arena and plan.device_bytes <= memory
    assert plan.predicted is not None and small.predicted is not None
    assert plan.predicted.step_s <= 1.01 * small.predicted.step_s
    assert planned(found, memory=memory).predicted.step_s <= plan.predicted.step_s  # type: ignore[union-attr]


def test_the_memory_curve_never_rises_in_steps_of_a_chunk() -> None:
    found = blocks_problem(6, 18.0)
    points = on_grid(plans_along(found, MACHINE, CHUNK), CHUNK)
    assert points[0].memory == floor(found) and points[-1].memory == found.total_bytes
    assert points[-1].step_s == points[-1].resident_step_s
    assert len(points) > 60
    for a, b in pairwise(points):
        assert 0 < b.memory - a.memory <= CHUNK and b.step_s <= a.step_s
    assert points[0].step_s > 1.1 * points[-1].step_s


def test_residents_are_spread_over_the_blocks() -> None:
    found = blocks_problem(12, 9.0)  # per block, copies take 13 and compute takes 9
    plan = planned(found, memory=found.total_bytes // 2)
    by_block = dict.fromkeys(range(12), 0)
    for w in plan.weights:
        kept = w.nbytes if w.home == "device" else sum(CHUNK for k in w.windows if k is None)
        by_block[w.first_use // 4] += kept
    assert min(by_block.values()) > 0
    assert max(by_block.values()) - min(by_block.values()) <= 5 * CHUNK


def test_copies_keep_clear_of_collectives_only_where_they_share_the_link() -> None:
    found = blocks_problem(8, 30.0)
    hidden = planned(found, slowdown=1.0)
    assert hidden.predicted.inflation_s == 0  # type: ignore[union-attr]
    apart = replace(MACHINE, shared_link=False, copy_slowdown=1.0, collective_slowdown=1.0)
    assert planned(found, apart, slowdown=1.0).device_bytes <= hidden.device_bytes
    tight = blocks_problem(8, 12.0)  # per block, copies take 13, compute 12 and collectives 16
    free, bound = planned(tight, apart, slowdown=1.0), planned(tight, slowdown=1.0)
    assert free.moved_bytes == tight.total_bytes > bound.moved_bytes > 0

    def beside(plan: Plan) -> bool:
        spans = plan.predicted.spans if plan.predicted is not None else ()
        copies = [s for s in spans if s.lane == "copy"]
        meet = (
            c.start < s.end - 1e-9 and s.start < c.end - 1e-9 for s in spans if s.lane == "collective" for c in copies
        )
        return any(meet)

    assert beside(free) and not beside(bound)


def test_every_weight_says_why_it_is_where_it_is() -> None:
    weights = [
        weight(0, 4 * CHUNK, (1,)),
        weight(1, 4 * CHUNK, (2,)),
        weight(2, 64, (0, 2), keep="small: 64 bytes"),
        weight(3, 2 * CHUNK, (), keep=None),
    ]
    found = problem([6, 6, 6], weights)
    roomy, tight = planned(found), planned(found, memory=floor(found))
    reasons = {w.name: w.why for w in roomy.weights}
    assert re.match(
        r"hidden: copied from window \d, \d windows? ahead of region 1, there \d\.\d{3} ms before", reasons["w0"]
    )
    assert reasons["w2"] == "small: 64 bytes" and reasons["w3"] == "no region reads it"
    exposed = next(w for w in tight.weights if w.name == "w1")
    assert exposed.slack_s is not None and exposed.slack_s < 0
    assert (
        f"exposed by {-exposed.slack_s * 1e3:.3f} ms because" in exposed.why and "would take more memory" in exposed.why
    )
    slow = replace(MACHINE, h2d_bandwidth=CHUNK * 1e5)
    assert any("kept because window" in w.why for w in planned(found, slow).weights)
    outside = planned(problem([6, 6], [weight(0, CHUNK, (0,))]), policy="layerwise")
    assert all(w.why for w in outside.weights)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_survives_json_and_tells_its_problem(policy: str) -> None:
    found = blocks_problem(3)
    plan = planned(found, policy=policy, memory=2 * found.total_bytes if policy == "layerwise-prefix" else None)
    text = plan.to_json()
    assert Plan.from_json(text) == plan and Plan.from_json(text).to_json() == text
    plan.check_problem(found)
    with pytest.raises(ChunkflowError, match=r"made for problem [0-9a-f]{16}, this model is .*Make the plan again"):
        plan.check_problem(blocks_problem(3, compute=41.0))
    with pytest.raises(ChunkflowError, match=r"only one of them has the weight w2\d"):
        plan.check_problem(blocks_problem(4))
    with pytest.raises(ChunkflowError, match="edited after it was written"):
        Plan.from_json(text.replace('"arena_bytes": ', '"arena_bytes": 1'))
    with pytest.raises(ChunkflowError, match="schema 99, this version reads"):
        Plan.from_json(text.replace('"schema": 3', '"schema": 99'))
    with pytest.raises(ChunkflowError, match="not a ChunkFlow plan"):
        Plan.from_json("{}")


def test_a_policy_without_a_branch_is_an_error() -> None:
    """It would be layerwise, with the same figures."""
    found = problem([6], [weight(0, CHUNK, (0,))])
    with pytest.raises(ChunkflowError, match="Policy two-ahead has no windows: add its branch to _policy_windows"):
        planned(found, policy="two-ahead")


def test_a_budget_of_the_whole_model_keeps_the_whole_model() -> None:
    """Slots are rounded up to 256 bytes; resident weights are not."""
    found = problem([6], [weight(i, 100, (0,)) for i in range(10)])
    plan = planned(found, memory=1000)
    assert plan.device_bytes == 1000 and not plan.streamed
    assert planned(found, slowdown=9.0).device_bytes <= 1000
    with pytest.raises(ChunkflowError, match="Give weight_memory='1000B' "):
        planned(found, memory=999)


@pytest.mark.parametrize("goal", [{}, {"memory": 1 << 20}, {"policy": "layerwise"}])
def test_empty_weights_and_a_link_without_free_time_are_planned(goal: dict[str, object]) -> None:
    found = problem([6, 6], [weight(0, 0, (0,)), weight(1, 2 * CHUNK, (1,))])
    assert next(w.why for w in planned(found, **goal).weights if w.name == "w0") == "empty"
    busy = problem([1, 1], [weight(0, 2 * CHUNK, (1,))], [(0, 9)])
    covering = replace(busy, collectives=(replace(busy.collectives[0], until=2),))
    assert ratio(planned(covering, **goal)) >= 1
    assert planned(problem([0, 0], [weight(0, CHUNK, (1,))]), **goal).predicted is not None


def test_a_barrier_holds_for_copies_of_the_step_before() -> None:
    found = problem([6, 6, 6], [weight(0, 20 * CHUNK, (1,))], [(1, 8)])
    planner = Planner(found, Simulator(found, MACHINE, CHUNK))
    assert planner.play([-1] * 20).timeline.inflation_s > 1e-6
    assert planner.play([-1] * 20, hard=True).timeline.inflation_s == pytest.approx(0, abs=1e-12)


def test_a_plan_of_layerwise_barrier_names_the_collective_that_waits() -> None:
    plan = planned(blocks_problem(4, 8.0), policy="layerwise-barrier")
    reasons = [w.why for w in plan.weights]
    assert all(re.search(r"; c\d+ waits until it is there$", why) for why in reasons), reasons
    assert all(w.slack_s is not None and w.slack_s >= 0 for w in plan.weights), "readers never wait, collectives do"


@pytest.mark.parametrize(
    ("compute", "share", "calls"),
    [
        (8.0, 0.2, 4),
        (13.0, 0.5, 1),
        (40.0, 0.2, 4),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((8.0, 0.2, 1), (13.0, 0.5, 4), (40.0, 0.2, 1))),
    ],
)
def test_joins_cost_little_as_no_copy_is_planned_across_one(compute: float, share: float, calls: int) -> None:
    found = blocks_problem(8, compute)  # 13 us of copies a block, 16 of collectives
    count = len(found.regions)
    ends = range(count // calls, count + 1, count // calls)
    goal = Settings(hardware=MACHINE, chunk_bytes=CHUNK, goal=Goal(memory=int(share * found.total_bytes)))
    plan = make_plan(found, replace(goal, joined=True), ends=ends)
    assert plan.joins == tuple(ends) and plan.device_bytes <= share * found.total_bytes
    assert plan == make_plan(found, replace(goal, joined=True), ends=ends)
    assert plan.predicted is not None and plan.moved_bytes > 0
    assert plan.predicted.step_s == pytest.approx(Simulator(found, MACHINE, CHUNK).step_under(plan), abs=1e-9)
    assert join_loss(found, goal, ends=ends) < 0.02
    given = replace(goal, plan=replace(plan, joins=()))
    as_given = join_loss(found, given, ends=ends)
    assert as_given == pytest.approx(
        plan.predicted.step_s / Simulator(found, MACHINE, CHUNK).step_under(given.plan) - 1
    )


@pytest.mark.parametrize("count", [25, pytest.param(100, marks=pytest.mark.long)])
def test_a_goal_is_kept_with_joins(count: int) -> None:
    drawn = given(small_problems(chunks=12), machines(), st.floats(0, 1), st.booleans())
    settings(max_examples=count)(drawn(check_goal_with_joins))()


def check_goal_with_joins(found: Problem, machine: Hardware, room: float, two: bool) -> None:
    memory = floor(found, machine) + int(room * found.total_bytes)
    joins = (1, len(found.regions)) if two else (len(found.regions),)
    plan = planned(found, machine, memory=memory, joins=joins)
    assert plan.device_bytes <= memory and plan.joins == joins
    assert plan.predicted is not None and plan.predicted.peak_bytes <= plan.device_bytes
    assert ratio(planned(found, machine, slowdown=1.3, joins=joins)) <= 1.3 + 1e-6


def test_joins_are_asked_for_and_kept_without_streamed_weights() -> None:
    found = blocks_problem(2)
    ample = Settings(hardware=MACHINE, chunk_bytes=CHUNK, goal=Goal(memory=2 * found.total_bytes))
    resident = aimed(ample, policy="resident", memory=None)
    for goal in (ample, resident):
        plan = make_plan(found, replace(goal, joined=True))
        assert make_plan(found, goal).joins == () and plan.joins == (len(found.regions),)
        assert join_loss(found, goal) == pytest.approx(0, abs=1e-9)
    assert not make_plan(found, replace(resident, joined=True)).streamed
    assert join_loss(found, Settings(hardware=MACHINE, chunk_bytes=CHUNK, goal=Goal(slowdown=1.5))) < 0.02


def test_both_goals_and_impossible_ones_are_refused() -> None:
    found = blocks_problem(2)
    with pytest.raises(ChunkflowError, match="not both"):
        planned(found, memory=1 << 20, slowdown=1.1)
    with pytest.raises(ChunkflowError, match=r"slowdown=0.5 is below 1"):
        planned(found, slowdown=0.5)
    with pytest.raises(ChunkflowError, match=r"policy resident takes; it has no smaller plan"):
        planned(found, policy="resident", memory=CHUNK)
    with pytest.raises(ChunkflowError, match=r"layerwise has one plan only: slowdown=1.5 would change nothing"):
        planned(found, policy="layerwise", slowdown=1.5)
    # two slots of 256 bytes, one after the other in the same place: more than both weights, which have odd sizes
    odd = problem([5, 5], [weight(0, 100, (0,)), weight(1, 100, (1,))])
    with pytest.raises(ChunkflowError, match="weight_memory=200 B is too little: the program needs 256 B"):
        planned(odd, memory=200, residents_in_arena=True)
    assert planned(odd, memory=256, residents_in_arena=True).device_bytes == 256


@pytest.mark.parametrize("blocks", [30, pytest.param(60, marks=pytest.mark.long)])
def test_blocks_are_planned_at_once_and_in_proportion_to_half_as_many(blocks: int) -> None:
    """By the calls of functions, which are the same on every machine: three million take half a second on a fast core.

    For a quadratic planner every ratio would be 4.
    """

    def calls(found: Problem, goal: dict[str, object]) -> int:
        made = itertools.count()
        sys.setprofile(lambda frame, event, arg: next(made) if event in ("call", "c_call") else None)
        try:
            planned(found, **goal)
        finally:
            sys.setprofile(None)
        return next(made)

    for goal in ({}, {"memory": 200 * CHUNK}):
        half, whole = (calls(blocks_problem(count, 20.0), goal) for count in (blocks // 2, blocks))
        assert 50_000 < whole < blocks * 150_000 and whole / half <= 2.5, (half, whole)
