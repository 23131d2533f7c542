"""The simulator: small cases computed by hand, and a program plays as its plan predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import plan_of, ulysses_cut
from problems import CHUNK, MACHINE, blocks_problem, problem, weight

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.placement.curve import plans_along
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.timeline import END_OF_CALL, Simulator, Timeline
from chunkflow_compile.passes.placement.windows import free_time_of
from chunkflow_compile.passes.plan import Windows
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Problem, Source, Weight
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.step import Scheduler, order
from chunkflow_compile.report.story import changes
from chunkflow_compile.simulate.played_steps import play_program

US = 1e-6
LATE = {"collective_latency_s": 1 * US}


def play(found: Problem, windows: dict[str, Windows], **change: object) -> Timeline:
    machine = replace(MACHINE, **change)  # type: ignore[arg-type]
    return Simulator(found, machine, CHUNK).play(Scheduler(found, CHUNK).step(windows))


def test_a_copy_that_compute_hides_costs_nothing() -> None:
    found = problem([5, 5], [weight(0, 4 * CHUNK, (1,))])
    played = play(found, {"w0": (0,) * 4})
    assert played.step_s == pytest.approx(10 * US)
    assert played.exposed_s == 0 and played.copy_s == pytest.approx(4 * US)
    assert played.slack["w0"] == pytest.approx(1 * US)
    assert played.peak_bytes == 4 * CHUNK


def test_a_copy_that_compute_does_not_hide_is_waited_for() -> None:
    found = problem([5, 5], [weight(0, 8 * CHUNK, (1,))])
    played = play(found, {"w0": (0,) * 8})
    assert played.step_s == pytest.approx(13 * US)
    assert played.exposed_s == pytest.approx(3 * US) and played.slack["w0"] == pytest.approx(-3 * US)


def test_four_ranks_behind_one_port_copy_at_a_quarter_of_its_rate() -> None:
    alone = problem([5, 5], [weight(0, 8 * CHUNK, (1,))])
    together, windows = replace(alone, ranks=4), {"w0": (0,) * 8}
    assert together.digest == alone.digest, "plans fit both"
    port = {"host_bandwidth": MACHINE.copy_rate}
    copied = [play(found, windows, **more).copy_s for found in (alone, together) for more in ({}, port)]
    assert copied == pytest.approx([8 * US, 8 * US, 8 * US, 32 * US])
    assert play(together, windows, **port).exposed_s == pytest.approx((32 - 5) * US)
    assert play(together, windows, node_ranks=2, **port).copy_s == pytest.approx(16 * US)
    measured = Timings(
        problem=together.digest, compute_s=(5 * US,) * 2, collective_s=(0.0,) * 2, copy_rate=2 * CHUNK * 1e6
    )
    machine = replace(MACHINE, **port)  # type: ignore[arg-type]
    assert Simulator(together, machine, CHUNK, measured).copy_seconds("w0", 0, 8) == pytest.approx(4 * US), (
        "as measured"
    )


def test_a_plan_knows_what_its_ranks_share() -> None:
    """The same bytes as for one rank on a link of a quarter; a bound that does not bind changes nothing."""
    found, goal = blocks_problem(4), {"chunk_bytes": CHUNK, "goal": Goal(memory=24 * CHUNK)}
    machine, together = replace(MACHINE, host_bandwidth=MACHINE.copy_rate), replace(found, ranks=4)
    shared = place(together, machine, **goal)  # type: ignore[arg-type]
    assert shared == place(found, replace(MACHINE, h2d_bandwidth=MACHINE.copy_rate / 4), **goal)  # type: ignore[arg-type]
    wide = replace(MACHINE, host_bandwidth=4 * MACHINE.copy_rate)
    assert place(together, wide, **goal) == place(found, MACHINE, **goal) != shared  # type: ignore[arg-type]
    curve = [{*plans_along(p, m, CHUNK)} for p, m in ((together, machine), (together, wide), (found, MACHINE))]
    assert curve[0] != curve[1] == curve[2]
    for host, told in ((machine, True), (wide, False)):
        settings = Settings(hardware=host, chunk_bytes=CHUNK)
        said = [c.what for c in changes(together.weights[0], 4, settings, lambda _: shared)]
        assert ("host memory twice as fast" in said) == told


def test_a_copy_beside_a_collective_slows_both_by_their_factors() -> None:
    """Copies of 4 start with region 0, which takes 1; then a collective of 2 runs beside the 3 that remain."""
    found = problem([1, 9], [weight(0, 4 * CHUNK, (1,))], [(1, 2)])
    fair = play(found, {"w0": (0,) * 4})
    # 1 alone, then 4 together, in which the collective's 2 and 2 of the copy cross; the last 1 of the copy alone.
    assert fair.collective_s == pytest.approx(4 * US) and fair.inflation_s == pytest.approx(2 * US)
    assert fair.exposed_s == pytest.approx(1 * US)
    assert fair.step_s == pytest.approx((1 + 4 + 1 + 9) * US)
    harsh = play(found, {"w0": (0,) * 4}, collective_slowdown=3.0, copy_slowdown=2.0)
    # Together 6, in which the copy's 3 are done as well.
    assert harsh.inflation_s == pytest.approx(4 * US) and harsh.exposed_s == 0
    apart = play(found, {"w0": (0,) * 4}, shared_link=False, collective_slowdown=1.0, copy_slowdown=1.0)
    assert apart.inflation_s == pytest.approx(0, abs=1e-15) and apart.exposed_s == pytest.approx(1 * US)


def with_attention(found: Problem, *regions: int) -> Problem:
    """The problem, of whose regions these are attention."""
    changed = [
        replace(r, cost=replace(r.cost, op="attention", attention=r.cost.flops)) if r.index in regions else r
        for r in found.regions
    ]
    return replace(found, regions=tuple(changed))


def test_attention_and_a_collective_stretch_each_other() -> None:
    """A collective of 4 starts with region 1, which takes 6, and is awaited before region 2."""
    bare = problem([1, 6, 9], [], [(2, 4)])
    bare = replace(bare, collectives=(replace(bare.collectives[0], before=1),))
    found, change = with_attention(bare, 1), {"attention_slowdown": 1.5}
    both = play(found, {}, **change)
    # Together 6, in which the collective's 4 cross and 4 of the region are done; its last 2 alone.
    assert both.step_s == pytest.approx((1 + 6 + 2 + 9) * US) and both.compute_s == pytest.approx((1 + 8 + 9) * US)
    assert both.collective_s == pytest.approx(6 * US) and both.inflation_s == pytest.approx(0, abs=1e-15)
    # At 2, one after the other is as fast.
    alone = replace(found, collectives=(replace(found.collectives[0], before=2),))
    assert play(found, {}, attention_slowdown=2.0).step_s == pytest.approx(play(alone, {}, **change).step_s)
    late = play(found, {}, **change, collective_latency_s=1 * US)
    assert late.collective_s == pytest.approx(7.5 * US), "its latency occupies the same kernels"
    for other in (bare, on_engines(found)):  # no attention, or no kernels
        assert play(other, {}, **change).step_s == pytest.approx((1 + 6 + 9) * US)


def test_attention_is_slower_only_while_a_collective_is_in_flight() -> None:
    """Two collectives of 1 and 2 in a row run while attention of 9 does; then it goes on alone."""
    found = with_attention(problem([1, 9, 1], [], [(2, 1), (2, 2)]), 1)
    found = replace(found, collectives=tuple(replace(c, before=1) for c in found.collectives))
    played = play(found, {}, attention_slowdown=2.0)
    assert played.compute_s == pytest.approx((1 + 6 + 6 + 1) * US) and played.collective_s == pytest.approx(6 * US)


def test_copies_and_attention_each_stretch_a_collective() -> None:
    """A copy of 20 and attention, in flight while a collective of 2 is; only the copy counts as inflation."""
    found = with_attention(problem([1, 30, 1], [weight(0, 20 * CHUNK, (2,))], [(2, 2)]), 1)
    found = replace(found, collectives=(replace(found.collectives[0], before=1),))
    played = play(found, {"w0": (1,) * 20}, attention_slowdown=1.5)
    # The collective takes 2 x 2 x 1.5: 4 of it because of the attention, and half of its other 4 because of the copy.
    assert played.collective_s == pytest.approx(6 * US) and played.inflation_s == pytest.approx(2 * US)


def on_engines(found: Problem, **change: int) -> Problem:
    """The problem with its collectives on copy engines."""
    return replace(found, collectives=tuple(replace(c, engine="copy", **change) for c in found.collectives))  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [True, False])
def test_a_collective_on_copy_engines_and_copies_take_turns(shared: bool) -> None:
    """Whether the link is shared or not: the engine is one."""
    change: dict[str, object] = {} if shared else {"shared_link": False, "copy_slowdown": 1, "collective_slowdown": 1}
    found = on_engines(problem([1, 9], [weight(0, 4 * CHUNK, (1,))], [(1, 2)]))
    # The collective is issued at 1, waits for the copy until 4, and takes 2.
    waits = play(found, {"w0": (0,) * 4}, **change)
    assert waits.collective_s == pytest.approx(5 * US) and waits.inflation_s == pytest.approx(3 * US)
    assert (
        waits.copy_s == pytest.approx(4 * US) and waits.step_s == pytest.approx((6 + 9) * US) and waits.exposed_s == 0
    )
    # Issued first, at 1, it has the engine until 3, and the copy comes after it.
    first = on_engines(problem([1, 9, 9], [weight(0, 4 * CHUNK, (2,))], [(1, 2)]), until=2)
    ahead = play(first, {"w0": (1,) * 4}, **change, compute_slowdown=1.5)
    assert ahead.collective_s == pytest.approx(2 * US) and ahead.inflation_s == pytest.approx(0, abs=1e-15)
    # Region 1 does 2 beside the collective, 4 / 1.5 beside the copy until 7, and the rest of its 9 alone.
    assert ahead.slack["w0"] == pytest.approx((9 - 2 - 4 / 1.5) * US) and ahead.copy_s == pytest.approx(4 * US)


def test_a_latency_leaves_the_engine_to_copies() -> None:
    """A copy of 2 in a latency of 3 delays nothing; one of 4 by the 1 that it takes longer."""
    for chunks, inflation in ((2, 0), (4, 1)):
        found = on_engines(problem([1, 9, 9], [weight(0, chunks * CHUNK, (2,))], [(1, 2)]), until=2)
        played = play(found, {"w0": (1,) * chunks}, collective_latency_s=3 * US)
        assert played.inflation_s == pytest.approx(inflation * US, abs=1e-15)
    # The first collective waits for the copy of 4 until 5 and ends at 7; the copy of 2 goes in the latency of the second.
    weights = [weight(0, 4 * CHUNK, (2,)), weight(1, 2 * CHUNK, (2,))]
    found = on_engines(problem([1, 9, 9], weights, [(1, 2), (1, 2)]), until=2)
    played = play(found, {"w0": (1,) * 4, "w1": (1,) * 2}, collective_latency_s=3 * US)
    assert played.slack["w1"] == pytest.approx(3 * US) and played.exposed_s == 0


def test_copies_keep_off_a_collective_that_needs_their_engine() -> None:
    """On a link that is not shared, only such a collective is in their way."""
    found = problem([20, 20], [weight(0, 8 * CHUNK, (0,)), weight(1, 8 * CHUNK, (1,))], [(1, 10)])
    machine = replace(MACHINE, shared_link=False, copy_slowdown=1.0, collective_slowdown=1.0)
    link = [
        free_time_of(s.play(Scheduler(p, CHUNK).step({})), s)
        for p in (found, on_engines(found))
        for s in (Simulator(p, machine, CHUNK),)
    ]
    assert [len(known.gaps) for known in link] == [1, 2]
    placed = place(on_engines(found), machine, Goal(memory=12 * CHUNK), chunk_bytes=CHUNK)
    assert placed.moved_bytes and placed.predicted.inflation_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("latency, inflation", [(0, 2), (1, 2), (2, 1), (3, 0), (5, 0)])
def test_a_copy_beside_the_latency_of_a_collective_slows_neither(latency: int, inflation: int) -> None:
    """As above: the copies that remain after the latency share the link with the collective's bytes."""
    found = problem([1, 9], [weight(0, 4 * CHUNK, (1,))], [(1, 2)])
    played = play(found, {"w0": (0,) * 4}, collective_latency_s=latency * US)
    assert played.collective_s == pytest.approx((latency + 2 + inflation) * US)
    assert played.inflation_s == pytest.approx(inflation * US, abs=1e-15)
    assert played.exposed_s == pytest.approx((1 if latency == 0 else 0) * US, abs=1e-15)
    assert played.copy_s == pytest.approx((4 + inflation) * US)


def test_a_copy_beside_compute_slows_compute_alone() -> None:
    """Copies of 4 beside a region of 10: it advances by 2 while they run, then by the 8 that remain."""
    found = problem([10, 5], [weight(0, 4 * CHUNK, (1,))])
    played = play(found, {"w0": (0,) * 4}, compute_slowdown=2.0)
    assert played.step_s == pytest.approx(17 * US) and played.compute_s == pytest.approx(17 * US)
    assert played.copy_s == pytest.approx(4 * US) and played.slack["w0"] == pytest.approx(8 * US)
    busy = play(problem([1, 9], [weight(0, 4 * CHUNK, (1,))], [(1, 2)]), {"w0": (0,) * 4}, **LATE, compute_slowdown=1.5)
    # The region takes 1.5, the latency 1.5 of the copy's 2.5; its last 1 shares the link with the collective's 2.
    assert busy.collective_s == pytest.approx((1.5 + 3) * US) and busy.inflation_s == pytest.approx(1.5 * US)
    assert busy.step_s == pytest.approx((1.5 + 4.5 + 9) * US) and busy.exposed_s == 0


def on_drive(index: int, chunks: int) -> Weight:
    """A weight in a file, which the second region reads."""
    return replace(weight(index, chunks * CHUNK, (1,)), source=Source(file=True))


@pytest.mark.parametrize(("chunk_us", "step_us"), [(1, 10), (2, 10), (4, 16)])
def test_the_drive_reads_ahead_of_the_copies(chunk_us: int, step_us: int) -> None:
    """Reads of 4, 8 or 16 a step: ahead of the copies, across the end of the step."""
    found = problem([5, 5], [on_drive(0, 2), on_drive(1, 2)])
    played = play(found, {"w0": (0,) * 2, "w1": (0,) * 2}, drive_bandwidth=CHUNK / (chunk_us * US))
    assert played.step_s == pytest.approx(step_us * US)
    assert played.exposed_s == pytest.approx((step_us - 10) * US)
    assert played.copy_s == pytest.approx(4 * US), "the link is free while the copy waits for its bytes"


def test_a_copy_that_waits_for_the_drive_holds_up_those_after_it() -> None:
    """Weights of 1, 1 and 2, the first two on the drive: their reads of 12 a step decide the step, and the other one's copy
    comes after."""
    found = problem([5, 5], [on_drive(0, 1), on_drive(1, 1), weight(2, 2 * CHUNK, (1,))])
    windows: dict[str, Windows] = {"w0": (0,), "w1": (0,), "w2": (0,) * 2}
    slow = play(found, windows, drive_bandwidth=CHUNK / (6 * US))
    assert slow.step_s == pytest.approx(12 * US) and slow.copy_s == pytest.approx(4 * US)
    fast = play(found, windows, drive_bandwidth=CHUNK / (4 * US))
    assert fast.step_s == pytest.approx(10 * US) and fast.exposed_s == 0


def test_compute_beside_a_copy_that_waits_for_the_drive_is_not_slowed() -> None:
    found = problem([5, 5], [on_drive(0, 1), on_drive(1, 1)])
    played = play(found, {"w0": (0,), "w1": (0,)}, compute_slowdown=2.0, drive_bandwidth=CHUNK / (6 * US))
    # the copies of 2 stretch the compute beside them from 1 to 2; the drive decides the step
    assert played.step_s == pytest.approx(12 * US)


def test_a_single_read_waits_for_its_own_copy() -> None:
    """It has the same bytes of the ring in every step."""
    played = play(problem([5, 5], [on_drive(0, 2)]), {"w0": (0,) * 2}, drive_bandwidth=CHUNK / (6 * US))
    assert played.step_s == pytest.approx((12 + 2) * US)


def test_steps_are_played_until_they_repeat() -> None:
    """The first step is cold; later steps find what the step before has fetched."""
    found = problem([5, 5], [weight(0, 3 * CHUNK, (0,))])
    assert play(found, {"w0": (1, 1, 1)}).step_s == pytest.approx(10 * US)
    assert play(found, {"w0": (0, 0, 0)}).step_s == pytest.approx(13 * US)


def test_a_resident_chunk_is_not_copied() -> None:
    found = problem([2, 2], [weight(0, 4 * CHUNK, (1,))])
    assert play(found, {"w0": (None, None, 0, 0)}).copy_s == pytest.approx(2 * US)


def test_each_chunk_and_each_collective_has_its_overhead() -> None:
    found = problem([50, 50], [weight(0, 4 * CHUNK, (1,))], [(1, 2)])
    played = play(found, {"w0": (0,) * 4}, chunk_s=1 * US, collective_latency_s=3 * US, launch_s=2 * US)
    assert played.copy_s == pytest.approx(8 * US) and played.collective_s == pytest.approx(5 * US)
    assert played.step_s == pytest.approx((52 + 5 + 52) * US)


def test_compute_waits_at_the_end_of_a_call_for_all_copies_issued_so_far() -> None:
    found = problem([5, 5, 5], [weight(0, 6 * CHUNK, (1,)), weight(1, 6 * CHUNK, (2,))])
    # copies for 6 us each, issued at 10 and at 0 us of the compute
    windows, simulator = {"w0": (2,) * 6, "w1": (0,) * 6}, Simulator(found, MACHINE, CHUNK)
    for joins, step_us, waits in (
        ((), 15, []),
        ((3,), 16, [(15, 16)]),
        ((1, 3), 17, [(5, 6), (16, 17)]),
        ((2, 3), 16, [(15, 16)]),
    ):
        played = simulator.play(Scheduler(found, CHUNK).step(windows, joins=joins))
        spans = [(s.start, s.end) for s in played.spans if (s.lane, s.name) == ("join", END_OF_CALL)]
        assert played.step_s == pytest.approx(step_us * US), joins
        assert spans == [pytest.approx((a * US, b * US)) for a, b in waits]
        assert played.exposed_s == pytest.approx(sum(b - a for a, b in waits) * US)
    resident = [simulator.play(Scheduler(found, CHUNK).step({}, joins=joins)) for joins in ((), (1, 3))]
    assert resident[0] == resident[1]


def test_no_gap_of_the_link_has_a_join_inside() -> None:
    found = problem([5, 5, 5], [], [(1, 2)])
    simulator = Simulator(found, MACHINE, CHUNK)
    resident = simulator.play(Scheduler(found, CHUNK).step({}))
    apart = [(0, 5), (7, 12), (12, 17)]
    for joins, gaps in (((), [(0, 5), (7, 17)]), ((3,), [(0, 5), (7, 17)]), ((2, 3), apart), ((1, 2, 3), apart)):
        found_gaps = [t / US for gap in free_time_of(resident, simulator, joins).gaps for t in gap]
        assert found_gaps == pytest.approx([t for gap in gaps for t in gap])


def test_a_program_plays_as_its_plan_predicts() -> None:
    cut = ulysses_cut(4)
    machine = replace(
        MACHINE, name="slow", launch_s=1e-3, h2d_bandwidth=2e7, gemm_flops={"float32": 1e12}, eta_gemm=1.0
    )
    for policy in ("layerwise", "layerwise-barrier", "chunkflow", "resident"):
        plan = plan_of(cut.problem, policy=policy)
        played = play_program(rewrite(cut, plan), machine)
        again = Simulator(cut.problem, machine, plan.chunk_bytes).play(order(cut.problem, plan))
        assert replace(played, spans=()) == replace(again, spans=()), policy
        joined = replace(plan, joins=(len(cut.problem.regions),))
        played = play_program(rewrite(cut, joined), machine)
        assert played.step_s == Simulator(cut.problem, machine, plan.chunk_bytes).step_under(joined)
        assert (played.copy_s > 0) == (policy != "resident")
        assert bool(plan.barriers) == (policy == "layerwise-barrier")
