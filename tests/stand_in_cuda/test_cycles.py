"""Blocks compiled one by one on a card: the cycle runs on real events, within the memory of its plan."""

from __future__ import annotations

import random

import torch
from helpers import Stack

from chunkflow_compile import cycles, offload, programs, restore

from .test_findings import MIB, OPTIONS


def blocks(layers: int = 4, width: int = 256) -> tuple[Stack, Stack]:
    """A model of 4 MiB of weights in a budget of half of them, and its twin."""
    torch.manual_seed(0)
    twin = Stack(layers, width).eval().to("cuda")
    torch.manual_seed(0)
    model = offload(Stack(layers, width).eval(), "cuda", min_bytes=OPTIONS["min_bytes"])
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**OPTIONS, "policy": "chunkflow", "memory": 2 * MIB})
    return model, twin


def step(model: Stack, twin: Stack, order: list[int]) -> None:
    x = torch.randn(16, 8, device="cuda")
    found = []
    for m in (model, twin):
        y = m.embed(x)
        for i in order:
            y = m.blocks[i](y)
        found.append(m.head(y))
    assert torch.equal(*found), order


def test_a_cycle_and_its_jumps() -> None:
    model, twin = blocks()
    order = [0, 1, 2, 3]
    with torch.no_grad():
        for _ in range(3):
            step(model, twin, order)
            programs(model)[0].arena.cycles.wait_planned()
        (route,) = cycles(model)
        for _ in range(3):
            step(model, twin, order)
            newest = [p.measurements[-1] for p in programs(model)]
            assert sum(m.moved_bytes for m in newest) == route.cycle.plan.moved_bytes > 0
            assert not any(m.primed_bytes for m in newest)
        rng = random.Random(0)
        for _ in range(20):
            step(model, twin, rng.sample(order, rng.randint(1, 4)))
        assert route.jumps > 5
        for m in (model, twin):
            m.blocks[2].up.weight.mul_(0.5)
        step(model, twin, order)
    torch.cuda.synchronize()
    arena = programs(model)[0].arena.nbytes
    assert route.cycle.plan.arena_bytes <= arena <= 2 * MIB
    before = torch.cuda.memory_allocated()
    restore(model, "cpu")
    small = sum(p.nbytes for p in twin.parameters() if p.nbytes < OPTIONS["min_bytes"])
    assert arena <= before - torch.cuda.memory_allocated() <= arena + small + MIB // 8
