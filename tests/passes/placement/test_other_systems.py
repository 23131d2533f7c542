"""Weights that the ranks have only together, as other systems do it: two blocks by hand, and what must hold of any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import CHUNK, MACHINE, blocks_problem, problem, weight

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import SHARDED
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.simulate.played_steps import PlayedStep
from chunkflow_compile.simulate.sharded import play_sharded, why_not

US = 1e-6
# Copies have a link of their own, on which a chunk takes a microsecond; a gather has another, of the same rate.
APART = replace(MACHINE, shared_link=False, copy_slowdown=1.0, collective_slowdown=1.0)
# Four microseconds of compute a block, of 8 chunks each, and a weight of a chunk that both read.
TWO = problem([4, 4], [weight(0, 8 * CHUNK, (0,)), weight(1, 8 * CHUNK, (1,)), weight(2, CHUNK, (0, 1))], blocks=2)

# The same with an exchange of 2 in the middle of each block of 4 + 4.
EXCHANGING = problem([4] * 4, [weight(0, 8 * CHUNK, (0,)), weight(1, 8 * CHUNK, (2,))], [(1, 2), (3, 2)], blocks=2)


def resident(found: Problem, hardware: Hardware) -> float:
    predicted = place(found, hardware, Goal(policy="resident"), chunk_bytes=CHUNK).predicted
    assert predicted is not None
    return predicted.step_s


def on_four(way: str, found: Problem = TWO, **change: object) -> PlayedStep:
    machine = replace(APART, **change)  # type: ignore[arg-type]
    return play_sharded(way, replace(found, ranks=4), machine, 4)  # type: ignore[arg-type]


def test_two_blocks_by_hand() -> None:
    """Of a block, each of four ranks copies 2 chunks and gathers 6: fsdp waits 6 - 4 a block, after copies 8 - 4."""
    gathered, copied = on_four("fsdp"), on_four("distributed-layerwise")
    assert gathered.timeline.step_s == pytest.approx(2 * 6 * US)
    assert gathered.timeline.exposed_s == pytest.approx(2 * 2 * US)
    assert copied.timeline.step_s == pytest.approx(2 * 8 * US)
    assert copied.timeline.exposed_s == pytest.approx(2 * 4 * US)
    assert copied.timeline.copy_s == pytest.approx(2 * 2 * US) and gathered.timeline.copy_s == 0
    for played, kept in ((gathered, 4), (copied, 0)):
        assert played.timeline.collective_s == pytest.approx(2 * 6 * US)
        assert played.device_bytes == (2 * 8 + kept + 1) * CHUNK, "two slots, the shards, and what both blocks read"
        assert played.moved_bytes == 16 * CHUNK


def test_a_gather_takes_the_latency_of_a_collective_and_is_hidden_where_compute_is_longer() -> None:
    late = {"collective_latency_s": 1 * US}
    assert on_four("fsdp", **late).timeline.step_s == pytest.approx(2 * 7 * US)
    longer = problem([10, 10], TWO.weights, blocks=2)
    for way in SHARDED:
        assert on_four(way, longer, **late).timeline.step_s == pytest.approx(2 * 10 * US)
        assert on_four(way, longer, **late).timeline.exposed_s == 0


def test_gathers_and_the_models_collectives_take_turns() -> None:
    """The second block's exchange of 2, at its beginning, comes before the gather of the first block."""
    exchanging = problem([4, 4], TWO.weights, [(1, 2)], blocks=2)
    assert on_four("fsdp", exchanging).timeline.step_s == pytest.approx((6 + 2 + 6) * US)
    held = on_four("fsdp", EXCHANGING).timeline
    assert held.step_s == pytest.approx(2 * (6 + 2 + 4) * US), (
        "the exchange waits for the gather, compute for the exchange"
    )
    assert held.exposed_s == 0
    fetched = on_four(
        "distributed-layerwise", EXCHANGING
    ).timeline  # its shard arrives after 2, so the gather is first too
    assert fetched.step_s == pytest.approx(2 * (2 + 6 + 2 + 4) * US)
    slow = on_four(
        "distributed-layerwise", EXCHANGING, h2d_bandwidth=CHUNK * 0.25e6
    ).timeline  # after 8: the exchange is over
    assert slow.step_s == pytest.approx(2 * (8 + 6) * US)


def test_ranks_that_share_the_hosts_memory_copy_at_their_part_of_its_rate() -> None:
    shared = on_four("distributed-layerwise", host_bandwidth=2 * CHUNK * 1e6)
    assert shared.timeline.step_s == pytest.approx(2 * (4 + 6) * US)
    assert on_four("fsdp", host_bandwidth=2 * CHUNK * 1e6).timeline.step_s == pytest.approx(2 * 6 * US)


def test_on_one_link_copies_and_exchanges_slow_each_other() -> None:
    """An exchange of 2 begins at 4, in the middle of a copy of 8: it ends at 8, the copy at 10, and the gather at 16."""
    shared = {"shared_link": True, "copy_slowdown": 2.0, "collective_slowdown": 2.0, "h2d_bandwidth": CHUNK * 0.25e6}
    played = on_four("distributed-layerwise", EXCHANGING, **shared).timeline
    assert played.step_s == pytest.approx(2 * 16 * US) and played.inflation_s == pytest.approx(2 * 2 * US)


@pytest.mark.parametrize("way", SHARDED)
def test_more_ranks_copy_less_and_gather_more_and_no_way_beats_all_weights_resident(way: str) -> None:
    found = blocks_problem(4)
    steps = {n: play_sharded(way, replace(found, ranks=n), APART, n) for n in (2, 4, 8)}  # type: ignore[arg-type]
    copied = [step.timeline.copy_s for step in steps.values()]
    gathered = [step.timeline.collective_s for step in steps.values()]
    held = [step.device_bytes for step in steps.values()]
    assert (
        copied == sorted(copied, reverse=True) and gathered == sorted(gathered) and held == sorted(held, reverse=True)
    )
    for n, step in steps.items():
        assert step.timeline.step_s >= resident(replace(found, ranks=n), APART) * (1 - 1e-9)


@pytest.mark.parametrize("way", SHARDED)
@pytest.mark.parametrize("found", [TWO, blocks_problem(3, exchange=0.0), problem([5], [weight(0, CHUNK, (0,))])])
def test_on_links_of_no_length_a_step_is_the_resident_one(way: str, found: Problem) -> None:
    endless = {"h2d_bandwidth": 1e13, "collective_bandwidth": 1e13}
    assert on_four(way, found, **endless).timeline.step_s == pytest.approx(resident(found, APART), rel=1e-3)


def test_one_rank_or_no_block_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        ChunkflowError, match=r"^Policy fsdp is not for this .* and there is one only: give --ulysses 2"
    ):
        play_sharded("fsdp", TWO, APART, 1)
    tied = problem([4, 4], [weight(0, CHUNK, (0, 1))], blocks=2)
    assert (
        why_not(tied, 2)
        == "It splits blocks among ranks, and no block of a ModuleList has weights that it alone reads."
    )
    assert not why_not(TWO, 2)
