"""Models that run in parts: graph breaks, step caches, frames without weights."""

from __future__ import annotations

import contextlib
import logging

import diffusers
import pytest
import torch
from conftest import EAGER, OPTIONS
from helpers import Broken, check_steps, graphs, small_twins, twins
from step_caches import STEP_CACHES, step_cache
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import chunkflow_compile
from chunkflow_compile import cycles, offload, programs
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.placed.placement import placement_of

SIZE = Size(layers=3, singles=2)
MIN_BYTES = OPTIONS["min_bytes"]
pytestmark = pytest.mark.usefixtures("no_grad")


def large_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if p.nbytes >= MIN_BYTES)


def test_a_model_with_graph_breaks(caplog: pytest.LogCaptureFixture) -> None:
    """One of its parts streams nothing, and leaves the arena to the cycle of all of them."""
    model, twin = twins(Broken)
    run = torch.compile(model, backend="chunkflow", options=EAGER)
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        check_steps(run, twin, 3)
    assert any("helpers.py:" in r.message and "runs in parts" in r.message for r in caplog.records)
    found = programs(model)
    assert len({p.arena for p in found}) == 1 and len(found) == 3
    assert sum(p.plan.moved_bytes for p in found) == large_bytes(twin)
    check_steps(run, twin, 2)
    (route,) = cycles(model)
    last = route.measurements[-1]
    assert (last.moved_bytes, last.primed_bytes, route.jumps) == (route.cycle.plan.moved_bytes, 0, 0)
    x = torch.randn(6, 8)
    for m in (model, twin):
        m.blocks[1].up.weight.mul_(2)
    assert torch.equal(run(x), twin(x))


@pytest.mark.long
@pytest.mark.parametrize("by_kind", [False, True])
@pytest.mark.parametrize("cache", STEP_CACHES)
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_step_cache(family: str, cache: str, by_kind: bool) -> None:
    """Hits and misses in turns: the inputs change little, and every third time a lot.  By kind, no block runs eagerly."""
    model, twin = small_twins(family, SIZE)
    timestep, steps = 1000, 20
    for m in (model, twin):
        m.enable_cache(step_cache(cache, lambda: timestep, steps))  # type: ignore[operator]
    if by_kind:
        chunkflow_compile.compile(model, **EAGER)
    else:
        offload(model, min_bytes=MIN_BYTES)
        model.compile(backend="chunkflow", options=EAGER)
    base, flops, fetched = small_inputs(family, SIZE, 0), list[int](), list[int]()
    for step in range(steps):
        timestep = 500 if step > 1 else 1000  # the first two steps skip nothing
        changed = base["hidden_states"] + 0.01 * step + (step // 3)
        outputs, before = [], {id(p): len(p.measurements) for p in programs(model)}
        for p in programs(model):
            p.arena.streams.measure(steps)
        for m in (model, twin):
            context = m.cache_context("cond") if hasattr(m, "cache_context") else contextlib.nullcontext()
            counting = FlopCounterMode(display=False) if m is twin else contextlib.nullcontext()
            with context, counting:
                outputs.append(m(**{**base, "hidden_states": changed})[0])
            if m is twin:
                flops.append(counting.get_total_flops())
        assert torch.equal(*outputs)
        placement = placement_of(model)
        assert placement is not None
        fetched.append(placement.store.counts.fetched_bytes)
        if by_kind:
            new = [(p, m) for p in programs(model) for m in p.measurements[before.get(id(p), 0) :]]
            ran = sum(buffer.nbytes for p, _ in new for buffer in p.buffers.values())
            if step >= 12:  # the order has repeated
                assert sum(m.moved_bytes + m.primed_bytes for _, m in new) <= ran + new[0][0].arena.nbytes
    moved = [m.moved_bytes for p in programs(model) for m in p.measurements]
    eager = cache == "MagCache" and not by_kind  # diffusers keeps its hooks, and the blocks inside, out of compilation
    assert sum(moved) >= large_bytes(twin) or eager
    assert min(flops) < 0.9 * max(flops), "no step hit the cache"
    if by_kind:
        assert fetched[-1] == fetched[2], "ops outside the compiled parts fetched weights"
        assert graphs() <= 20, "the state of a hook was compiled into what it calls"


@pytest.mark.long
def test_faster_cache_with_guidance(caplog: pytest.LogCaptureFixture) -> None:
    """Half of the batch is skipped in turns: two graphs of the same weights, which run in one cycle."""
    model, twin = small_twins("wan", SIZE)
    for m in (model, twin):
        m.enable_cache(  # type: ignore[operator]
            diffusers.FasterCacheConfig(
                spatial_attention_block_skip_range=2,
                unconditional_batch_skip_range=2,
                attention_weight_callback=lambda _: 0.5,
                current_timestep_callback=lambda: 500,
            )
        )
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", options=EAGER)
    base = {k: torch.cat([v, v]) if torch.is_tensor(v) else v for k, v in small_inputs("wan", SIZE, 0).items()}
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        for step in range(12):
            inputs = {**base, "hidden_states": base["hidden_states"] + 0.01 * step}
            outputs = [m(**inputs)[0] for m in (model, twin)]
            assert torch.equal(*outputs)
    (route, *_) = cycles(model)
    assert sum(m.moved_bytes for m in route.measurements) >= large_bytes(twin)
    assert not any("as a cycle" in r.message for r in caplog.records)


def test_a_frame_without_weights_is_lowered_as_it_is() -> None:
    function = torch.compile(lambda x: torch.relu(x) + 1, backend="chunkflow", options=EAGER)
    x = torch.randn(3, 4)
    assert torch.equal(function(x), torch.relu(x) + 1)
