"""Blocks compiled one by one on a card: the course runs on real events, within the memory of its plan."""

from __future__ import annotations

import random

import torch
from helpers import Stack

from chunkflow_compile import courses, explain, offload, programs, replan, restore

from . import control
from .test_findings import MIB, OPTIONS


def blocks(layers: int = 4, width: int = 256, **options: object) -> tuple[Stack, Stack]:
    """A model of a MiB of weights a layer in a budget of 2 MiB, and its twin."""
    torch.manual_seed(0)
    twin = Stack(layers, width).eval().to("cuda")
    torch.manual_seed(0)
    model = offload(Stack(layers, width).eval(), "cuda", min_bytes=OPTIONS["min_bytes"])
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**OPTIONS, "policy": "chunkflow", "memory": 2 * MIB, **options})
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


def test_a_course_and_its_jumps() -> None:
    model, twin = blocks()
    order = [0, 1, 2, 3]
    with torch.no_grad():
        for _ in range(3):
            step(model, twin, order)
            programs(model)[0].arena.courses.settle()
        (route,) = courses(model)
        for _ in range(3):
            step(model, twin, order)
            newest = [p.measurements[-1] for p in programs(model)]
            assert sum(m.moved_bytes for m in newest) == route.course.plan.moved_bytes > 0
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
    assert route.course.plan.arena_bytes <= arena <= 2 * MIB
    before = torch.cuda.memory_allocated()
    restore(model, "cpu")
    small = sum(p.nbytes for p in twin.parameters() if p.nbytes < OPTIONS["min_bytes"])
    assert arena <= before - torch.cuda.memory_allocated() <= arena + small + MIB // 8


def test_a_device_twenty_calls_behind() -> None:
    """The host runs ahead as on a card: each call of each pass is measured, and planned again from that."""
    layers, passes = 24, 6
    model, twin = blocks(layers, replan_after=passes - 2)
    inputs = [torch.randn(16, 8, device="cuda") for _ in range(passes)]
    with torch.no_grad():
        for _ in range(3):
            step(model, twin, [*range(layers)])
            programs(model)[0].arena.courses.settle()
        (route,) = courses(model)
        told, events, behind = len(route.measurements), [], 0
        control.settings(kernel_us=4000)
        outputs = []
        for x in inputs:
            y = model.embed(x)
            for block in model.blocks:
                y = block(y)
                events.append(torch.cuda.Event())
                events[-1].record()
                behind = max(behind, sum(not e.query() for e in events[-40:]))
            outputs.append(model.head(y))
        control.settings(**control.DEFAULTS)
        torch.cuda.synchronize()
        assert behind >= 20
        assert len(route.measurements) == told + passes
        assert all(len(m.windows.compute_s) == len(route.course.plan.regions) for m in route.measurements)
        assert all(torch.equal(y, twin(x)) for x, y in zip(inputs, outputs, strict=True))
        explained = explain(model)
        assert explained.plan == route.course.plan.digest and len(explained.calls) == layers
        planned = route.course.plan.digest
        for _ in range(2):  # a pass plans again, the next one runs it
            step(model, twin, [*range(layers)])
            programs(model)[0].arena.courses.settle()
        step(model, twin, [*range(layers)])
        assert route.replan_after == 0 or courses(model)[0].course.plan.digest != planned
        replan(model, as_measured=True)
        step(model, twin, [*range(layers)])
    restore(model, "cpu")
