"""Timings: measurements replace the rates of the profile, and a plan tolerates copies that are slower than predicted."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CHUNK, MACHINE, blocks_problem

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.search import STRAIN, Planner
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.step import Scheduler
from chunkflow_compile.runtime.measurement import Measured, StepMeasurement, WindowSeconds, copying_share, measured
from chunkflow_compile.runtime.traffic import Copied, Traffic, Transfer

PROBLEM = blocks_problem(3)
COUNT = len(PROBLEM.regions)
AWAITED = sorted({min(c.until, COUNT - 1) for c in PROBLEM.collectives})


def timings(compute: list[float], collectives: dict[int, float | None], rate: float | None = None) -> Timings:
    return Timings(
        problem=PROBLEM.digest,
        compute_s=tuple(compute),
        collective_s=tuple(collectives.get(k, 0.0) for k in range(COUNT)),
        copy_rate=rate,
    )


def test_the_largest_times_of_ranks() -> None:
    """Those of a rank with another shard count, those of another program do not, and what none has measured stays unknown."""
    ours = timings([1.0, *[2.0] * (COUNT - 1)], {0: None, 1: 3.0, 2: None}, rate=5e9)
    theirs = replace(timings([2.0, *[1.0] * (COUNT - 1)], {0: 4.0, 1: 1.0, 2: None}, rate=4e9), problem="another shard")
    theirs = replace(theirs, copying=0.5, compute_slowdown=1.25, idle_s=(0.5,) * COUNT)
    other = replace(ours, compute_s=(9.0,), collective_s=(9.0,))
    found = ours.largest([Timings.of(json.loads(json.dumps(asdict(t)))) for t in (ours, theirs, other)])
    found.check(PROBLEM)
    assert found.compute_s == (2.0,) * COUNT and found.collective_s[:3] == (4.0, 3.0, None)
    assert (found.copy_rate, found.drive_rate, found.copying) == (4e9, None, 0.5)
    assert (found.compute_slowdown, found.idle_s) == (1.25, theirs.idle_s)
    assert ours.largest([ours, other]) == ours


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=COUNT, max_size=COUNT),
    st.lists(st.floats(1e-6, 1.0), min_size=len(AWAITED), max_size=len(AWAITED)),
)
def test_sums_equal_the_measured_sums(compute: list[float], collectives: list[float]) -> None:
    seen = timings(compute, dict(zip(AWAITED, collectives, strict=True)))
    simulator = Simulator(PROBLEM, MACHINE, CHUNK, seen)
    assert sum(simulator.compute_s) == pytest.approx(sum(compute))
    assert sum(simulator.collective_s) == pytest.approx(sum(collectives))
    resident = simulator.play(Scheduler(PROBLEM, CHUNK).step({}))
    assert resident.step_s == pytest.approx(sum(compute) + sum(collectives))
    by_key: dict[str, set[float]] = {}
    for region, seconds in zip(PROBLEM.regions, simulator.compute_s, strict=True):
        by_key.setdefault(region.key, set()).add(seconds)
    assert all(len(found) == 1 for found in by_key.values()), "equal regions take equal time"


def test_a_collective_never_measured_alone_takes_the_time_of_its_like_or_of_the_profile() -> None:
    plain = Simulator(PROBLEM, MACHINE, CHUNK).collective_s
    one = Simulator(PROBLEM, MACHINE, CHUNK, timings([1.0] * COUNT, {**dict.fromkeys(AWAITED), AWAITED[0]: 3.0}))
    assert one.collective_s == pytest.approx([1.0] * len(PROBLEM.collectives)), "three together took 3 s"
    none = Simulator(PROBLEM, MACHINE, CHUNK, timings([1.0] * COUNT, dict.fromkeys(AWAITED)))
    assert none.collective_s == pytest.approx(plain)


def test_the_measured_rate_of_copies_replaces_the_link_s() -> None:
    simulator = Simulator(PROBLEM, MACHINE, CHUNK, timings([1.0] * COUNT, {}, rate=1e6))
    weight = PROBLEM.weights[0].name
    assert simulator.copy_seconds(weight, 0, 1) == pytest.approx(PROBLEM.weights[0].nbytes / 1e6)
    assert simulator.with_slower_copies(1.5).copy_seconds(weight, 0, 1) == pytest.approx(
        1.5e-6 * PROBLEM.weights[0].nbytes
    )
    assert simulator.hardware.name == f"{MACHINE.name}, as measured"


@pytest.mark.parametrize("rate, factor", [(None, 1.0), (0.5, 2.0), (2.0, 0.5)])
def test_a_collective_holds_the_link_for_its_bytes_only(rate: float | None, factor: float) -> None:
    """Its bytes cross at the profile's rate, corrected as that of copies, and in no more time than it took."""
    seen = timings([1.0] * COUNT, dict.fromkeys(AWAITED, 1.0), None if rate is None else rate * MACHINE.copy_rate)
    bytes_s = [factor * c.nbytes / MACHINE.collective_bandwidth for c in PROBLEM.collectives]
    simulator = Simulator(PROBLEM, MACHINE, CHUNK, seen)
    assert simulator.link_s == pytest.approx(bytes_s) and sum(simulator.collective_s) == pytest.approx(len(AWAITED))
    short = timings([1.0] * COUNT, dict.fromkeys(AWAITED, 1e-9))
    assert (quick := Simulator(PROBLEM, MACHINE, CHUNK, short)).link_s == quick.collective_s


@given(st.floats(0, 1), st.floats(1, 3), st.booleans())
def test_compute_timed_beside_copies_is_corrected_by_the_slowdown(copying: float, factor: float, told: bool) -> None:
    """``told``: the factor was measured too, and replaces the profile's."""
    seen = replace(timings([1.0] * COUNT, {}), copying=copying, compute_slowdown=factor if told else None)
    simulator = Simulator(PROBLEM, replace(MACHINE, compute_slowdown=1.2 if told else factor), CHUNK, seen)
    assert simulator.hardware.compute_slowdown == factor
    assert simulator.compute_s == pytest.approx([1 / (1 + copying * (factor - 1))] * COUNT)


def test_timings_of_another_problem_are_refused() -> None:
    with pytest.raises(ChunkflowError, match=r"measured on problem [0-9a-f]{16}, this model is [0-9a-f]{16}"):
        place(blocks_problem(4), MACHINE, chunk_bytes=CHUNK, timings=timings([1.0] * COUNT, {}))


def test_of_equal_plans_place_returns_the_one_that_slower_copies_hurt_least() -> None:
    """A link that is just fast enough: without strain, the smallest plan would be chosen."""
    found = blocks_problem(6)
    for share in (0.45, 0.6, 0.8):
        memory = int(share * found.total_bytes)
        planner = Planner(found, Simulator(found, MACHINE, CHUNK))
        best = planner.fastest(memory)
        rivals = [c for m in range(len(planner.chunks)) if (c := planner.within(memory, m)) is not None]
        equal = [c for c in rivals if c.step_s <= best.step_s * (1 + 1e-9)]
        least = min(planner.strained(c) for c in equal) if equal else best.step_s
        assert planner.strained(best) <= least + 0.01 * planner.resident.step_s
        assert STRAIN > 1


def step(
    collective: list[float],
    beside: list[float],
    *,
    compute: tuple[float, float] = (1.0, 2.0),
    alone: tuple[float, int] = (0.0, 0),
) -> StepMeasurement:
    windows = WindowSeconds(array("d", compute), array("d", [0.0, 0.0]), array("d", collective), array("d", beside))
    return StepMeasurement(
        step_s=0.5 + sum(compute) + sum(collective),
        exposed_h2d_s=0.0,
        collective_s=sum(collective),
        copy_s=alone[0],
        alone_s=alone[0],
        alone_bytes=alone[1],
        collectives=2,
        moved_bytes=0,
        primed_bytes=0,
        windows=windows,
    )


def test_transfers_that_shared_the_link_do_not_count_for_its_speed() -> None:
    plan = place(PROBLEM, MACHINE, chunk_bytes=CHUNK)
    steps = [step([0.2, 0.9], [0.0, 0.9], alone=(2.0, 100)), step([0.5, 0.7], [0.5, 0.7], alone=(3.0, 200))]
    took = measured(plan, [s._replace(plan=plan.digest) for s in steps])
    with pytest.raises(ChunkflowError, match="No step was measured yet"):
        measured(plan, steps)  # they ran under another plan
    assert took.alone_s == [0.2, None] and took.copy_rate == pytest.approx(300 / 5.0)
    assert Measured.from_json(took.to_json()) == took
    found = took.timings()
    assert found.copying == pytest.approx(2.5 / took.step_s) == copying_share(10.0, 0.0, 10 * 2.5 / took.step_s)
    assert copying_share(100.0, 40.0, 60.0) == pytest.approx(1 / 3), "a copy during a wait slows no compute"
    assert copying_share(1.0, 1.0, 1.0) == 0 and copying_share(1.0, 0.5, 2.0) == 1
    assert sum(found.compute_s) == pytest.approx(took.step_s - took.collective_s), "it includes the host's share"
    assert replace(took, copy_rate=None).timings().copy_rate is None


def test_timings_add_up_to_the_step_even_with_outliers() -> None:
    plan = place(PROBLEM, MACHINE, chunk_bytes=CHUNK)
    bursts = [((2.0, 2.0), [0.2, 0.5]), ((1.0, 3.0), [0.4, 0.3]), ((1.0, 2.0), [0.2, 0.3])]
    steps = [step(collective, [0.0, 0.0], compute=compute)._replace(plan=plan.digest) for compute, collective in bursts]
    took = measured(plan, steps)
    assert (list(took.windows.compute_s), list(took.windows.collective_s)) == ([1.0, 2.0], [0.2, 0.3]), (
        "medians, without the bursts"
    )
    found = took.timings()
    assert (
        sum(found.compute_s) + sum(s or 0.0 for s in found.collective_s)
        == pytest.approx(took.step_s)
        == pytest.approx(5.2)
    )
    assert found.compute_s == pytest.approx((4 / 3 + 0.25, 8 / 3 + 0.25)) and found.collective_s == pytest.approx(
        (0.28, 0.42)
    )


def test_traffic_finds_the_copies_that_were_alone() -> None:
    traffic, windows = Traffic(), WindowSeconds(*(array("d", [0.0, 0.0]) for _ in range(4)))

    def run(transfer: Transfer, begin: float, end: float) -> None:
        transfer.begins(begin)
        transfer.ends(end)

    run(traffic.copy(10), 0.0, 1.0)
    run(traffic.copy(5), 2.5, 3.0)
    run(traffic.collective(windows, 0), 2.0, 4.0)
    run(traffic.collective(windows, 1), 5.0, 6.0)
    under_way = traffic.copy(7)
    under_way.begins(5.5)
    assert traffic.copied_bytes == 15
    assert traffic.drain(6.0) == Copied(1.5, 15, 1.0, 10)
    assert (list(windows.collective_s), list(windows.beside_s)) == ([2.0, 1.0], [2.0, 1.0])
    under_way.ends(7.0)
    run(traffic.copy(1), 8.0, 9.0)
    assert traffic.drain(9.0) == Copied(2.5, 8, 1.0, 1), "it overlapped the collective of the step before"
    assert traffic.copied_bytes == 23
    run(traffic.copy(2, "pull"), 10.0, 11.0)
    under_way = traffic.copy(3)
    under_way.begins(10.5)
    assert traffic.drain(11.0) == Copied(1.0, 2)
    under_way.ends(12.0)
    assert traffic.drain(12.0) == Copied(1.5, 3), "it overlapped the pull of the step before"


@settings(max_examples=200)
@given(lanes=st.tuples(*[st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=8)] * 3))
def test_traffic_agrees_with_a_plain_comparison(lanes: tuple[list[tuple[int, int]], ...]) -> None:
    """``lanes``: gap and length of each transfer, of copies, collectives and pulls."""
    spans: list[list[tuple[float, float]]] = []
    for lane in lanes:
        ends = [float(e) for e in accumulate(g + n for g, n in lane)]
        spans.append([(e - n, e) for e, (_, n) in zip(ends, lane, strict=True)])
    traffic, windows = Traffic(), WindowSeconds(*(array("d", [0.0]) for _ in range(4)))
    made: list[list[Transfer]] = [
        [traffic.copy(1) for _ in spans[0]],
        [traffic.collective(windows, 0) for _ in spans[1]],
        [traffic.copy(1, "pull") for _ in spans[2]],
    ]
    for ours, lane in zip(made, spans, strict=True):
        for transfer, (begin, end) in zip(ours, lane, strict=True):
            transfer.begins(begin)
            transfer.ends(end)

    def beside(one: tuple[float, float], others: list[tuple[float, float]]) -> bool:
        return any(one[0] < b and a < one[1] for a, b in others)

    found = traffic.drain(100.0)
    assert found.alone_bytes == sum(not beside(c, spans[1] + spans[2]) for c in spans[0])
    assert found.nbytes == len(spans[0]) + len(spans[2])
    assert windows.beside_s[0] == sum(b - a for a, b in spans[1] if beside((a, b), spans[0] + spans[2]))
