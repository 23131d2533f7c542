"""Calls that come in another order than before: each is right at once, and what repeats becomes a cycle."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_cycles import arena_of, check, primed, taken

from chunkflow_compile import cycles, programs

pytestmark = pytest.mark.usefixtures("no_grad")


def test_any_order_of_calls_is_right(record_property: Callable[[str, object], None]) -> None:
    """Passes, skipped blocks, repeated blocks, two sizes, in any order."""
    jumps = 0
    for seed in range(4):
        torch._dynamo.reset()
        rng = random.Random(seed)
        model, twin = taken(debug="poison")
        for i in range(40):
            order = list(range(5))
            if i > 2 and rng.random() < 0.5:
                order = [*rng.sample(order, rng.randint(1, 5)), rng.randrange(5)]
            check(model, twin, order, rng.choice([2, 4]))
        assert cycles(model)
        jumps += sum(route.jumps for route in cycles(model))
    assert jumps > 20
    record_property("counts", f"{jumps} jumps")


def test_a_jump_moves_what_runs_and_at_most_an_arena() -> None:
    """A step cache that skips all blocks but the first, now and then."""
    model, twin = taken()
    for i in range(15):
        order = [0] if i in (4, 6, 7, 9, 12, 13) else list(range(5))
        check(model, twin, order)
        if order == [0]:
            ran = [p for p in programs(model) if p.measurements]
            (first,) = [p for p in ran if "blocks.0.up.weight" in {b.name for b in p.buffers.values()}]
            cost = first.measurements[-1]
            assert cost.moved_bytes + cost.primed_bytes <= first.plan.moved_bytes + 2 * arena_of(model).nbytes
    assert sum(route.jumps for route in cycles(model)) >= 4


def test_jumps_that_repeat_become_a_cycle() -> None:
    model, twin = taken()
    for _ in range(16):
        for order in (range(5), [0]):
            check(model, twin, order)
    assert len(cycles(model)[0].cycle.calls) == 6
    before = cycles(model)[0].jumps
    for order in (range(5), [0]) * 2:
        check(model, twin, order)
    assert cycles(model)[0].jumps == before


def test_a_jump_looks_ahead_of_where_it_comes_from() -> None:
    """Calls are skipped before the first and before the second of two calls of one block: wherever the cycle begins, the one
    that follows is not the first in it for one of both."""
    model, twin = taken()
    for _ in range(8):
        check(model, twin, [0, 1, 0, 2, 3])
    (route,) = (route for route in cycles(model) if len(route.keys) == 5)
    assert route.jumps == 0
    for order, jumps in (([0, 0, 2, 3], 1), ([0, 1, 0], 1), ([0, 1, 0, 2, 3], 2)):
        check(model, twin, order)
        assert route.jumps == jumps, order


def test_two_sizes_in_turns_are_one_cycle() -> None:
    """Guidance with two text lengths: both calls of a block read the same weights."""
    model, twin = taken()
    for i in range(10):
        for rows in (4, 6):
            check(model, twin, range(5), rows)
            if i > 3:
                assert primed(model) == 0
    (route,) = cycles(model)
    assert len(route.cycle.calls) == 5 and route.jumps == 0
