"""Cycles at their limits: calls in another order, calls inside calls, too little memory, decisions of one rank."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator

import diffusers
import pytest
import torch
from conftest import EAGER, OPTIONS
from helpers import Stack, check_steps, memory_named, twins
from test_cycles import arena_of, check, primed, taken
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, cycles, offload, programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses

SIZE = Size(layers=3, singles=2)
MIN_BYTES = OPTIONS["min_bytes"]
pytestmark = pytest.mark.usefixtures("no_grad", "kept_dynamo")


def test_any_order_of_calls_is_right() -> None:
    """Passes, skipped blocks, repeated blocks, two sizes, in any order."""
    jumps = 0
    for seed in range(2):
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
    assert jumps > 10


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


def test_a_size_that_is_forgotten_leaves_the_cycles_of_other_weights_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models run as cycles of one arena; the newest size of one of them ends the programs of a size of the other."""
    monkeypatch.setattr("chunkflow_compile.runtime.variants.KEPT_SIZES", 2)
    arena = Arena()
    (one, one_twin), (other, other_twin) = taken(3, arena=arena), taken(3, arena=arena)
    for rows in [4] * 4 + [6] * 2:
        check(one, one_twin, range(3), rows)
    for _ in range(5):
        check(other, other_twin, range(3), 4)
    counts, ended = programs(other)[0].call.counts, programs(one)[-1]
    before = counts.cold_starts
    check(other, other_twin, range(3), 8)
    assert ended.closed and counts.cold_starts == before
    check(one, one_twin, range(3), 6)
    check(other, other_twin, range(3), 8)
    assert counts.cold_starts == before + 1, "the other cycle has used the arena"


class Calls(Stack):
    """Calls another model from inside one of its ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.ops.chunkflow_tests.other(self.blocks[0](self.embed(x))))


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[torch.Tensor], torch.Tensor]], None]]:
    """Sets what the op ``chunkflow_tests::other`` calls."""
    called: list[Callable[[torch.Tensor], torch.Tensor]] = []
    library = torch.library.Library("chunkflow_tests", "DEF")
    library.define("other(Tensor x) -> Tensor")
    library.impl("other", lambda x: x + called[-1](x[:, :8]).sum(), "CPU")
    library.impl("other", lambda x: torch.empty_like(x), "Meta")
    yield called.append
    library._destroy()


def test_a_call_inside_another_call(other: Callable[..., None]) -> None:
    inner, inner_twin = twins(lambda: Stack(width=64))
    outer, outer_twin = twins(Calls)
    arena = Arena()
    run_inner, run = (
        torch.compile(m, backend="chunkflow", fullgraph=True, options={**EAGER, "arena": arena}) for m in (inner, outer)
    )
    x = torch.randn(4, 8)
    other(run_inner)
    for _ in range(2):
        with pytest.raises(ChunkflowError, match=r"called inside a call of blocks\.0 .* Give the inner model its own"):
            run(x)
        assert torch.equal(run_inner(x), inner_twin(x)), "the next call is right"
    other(torch.compile(inner, backend="chunkflow", fullgraph=True, options={**EAGER, "arena": Arena()}))
    got = run(x)
    other(inner_twin)
    assert torch.equal(got, outer_twin(x))


def with_biases(layers: int) -> tuple[Stack, Stack]:
    """Small weights, which stay on the device."""
    both = twins(lambda: Stack(layers))
    for m in both:
        for block in m.blocks:
            block.up.bias = nn.Parameter(torch.ones(block.up.out_features))
    return both


def test_a_cycle_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Each model fits alone.  Both do not, because of what stays on the device of each."""
    arena, pairs = Arena(), [with_biases(4), with_biases(4)]
    kept = sum(p.nbytes for p in pairs[0][0].parameters() if p.nbytes < MIN_BYTES)
    alone = kept + pairs[0][0].blocks[0].up.weight.nbytes
    options = {**EAGER, "slowdown": None, "weight_memory": alone, "group_bytes": 1, "arena": arena}
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        for model, _ in pairs:
            model.compile(backend="chunkflow", fullgraph=True, options=options)
        for _ in range(4):
            for model, twin in pairs:
                check_steps(model, twin, 1)
    assert cycles(pairs[0][0]) == ()
    (said,) = [r.message for r in caplog.records if "2 calls repeat" in r.message]
    assert "each runs under its own plan" in said and "Give weight_memory=" in said
    assert arena.nbytes + kept <= alone


def floor(unread: int) -> int:
    """The least budget of a block of a model that has ``unread`` numbers beside it."""
    model, _ = with_biases(4)
    model.unread = nn.Parameter(torch.zeros(unread))
    torch._dynamo.reset()
    run = torch.compile(
        model.blocks[0], backend="chunkflow", options={**EAGER, "slowdown": None, "weight_memory": "1B"}
    )
    with pytest.raises(Exception, match="weight_memory=1 B is too little") as told:
        run(torch.randn(4, 32))
    return memory_named(told.value)


def test_memory_counts_what_a_program_does_not_read() -> None:
    """A part, and a weight that no forward reads."""
    least = floor(0)
    assert floor(512) == pytest.approx(least + 2048, abs=1), "it is named with a decimal"
    model, twin = with_biases(4)
    kept = sum(p.nbytes for p in model.parameters() if p.nbytes < MIN_BYTES)
    offload(model, min_bytes=MIN_BYTES)
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**EAGER, "slowdown": None, "weight_memory": least})
    check_steps(model, twin, 6)
    (route,) = cycles(model)
    assert route.arena.nbytes + kept <= least


def caches_on_a_rank(rank: int) -> None:
    model = small_model("wan", SIZE)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))  # type: ignore[operator]
    enable_ulysses(model, 2)
    model.compile_repeated_blocks(backend="chunkflow", options=EAGER)  # type: ignore[operator]
    said = "FirstBlockCache compares activations, of which each rank has its own part"
    with pytest.raises(Exception, match=said), model.cache_context("cond"):  # type: ignore[operator]
        model(**small_inputs("wan", SIZE, 0))


@pytest.mark.long
def test_a_step_cache_that_decides_on_two_ranks(on_ranks: Callable[..., None]) -> None:
    on_ranks(caches_on_a_rank)


def test_models_whose_roots_are_gone_have_budgets_of_their_own() -> None:
    """Their blocks are all that is left of them, in a list of the user's."""
    arena, left = Arena("cpu"), []
    for _ in range(2):
        model = offload(Stack(2, width=64).eval(), min_bytes=4096)
        for block in model.blocks:
            block.compile(backend="chunkflow", options={**EAGER, "arena": arena})
        left.append([*model.blocks])
        del model
    gc.collect()
    for blocks in left:
        for block in blocks:
            block(torch.randn(4, 64))
    assert len(arena.programs) == 4 and len({program.call.model for program in arena.programs}) == 2
