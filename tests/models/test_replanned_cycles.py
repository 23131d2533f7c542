"""Cycles that are given another plan: from measured times, or for another goal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import EAGER, OPTIONS
from helpers import Stack, check_steps, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import Arena, cycles, offload, programs, replan
from chunkflow_compile.runtime.bound_cycle import BoundCycle
from chunkflow_compile.runtime.device import CpuDevice
from chunkflow_compile.weights.host_buffer import buffer_of

PAUSE_S = 0.02
pytestmark = pytest.mark.usefixtures("no_grad")


def pair(**options: Any) -> tuple[nn.Module, Callable[[int], None]]:
    """Blocks compiled one by one; and a step that compares with the same as it is."""
    model, twin = twins(lambda: Stack(4))
    offload(model, min_bytes=OPTIONS["min_bytes"])
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**EAGER, **options})
    return model, lambda _: check_steps(model, twin, 1)


def run(model: nn.Module, step: Callable[[int], None], steps: int = 6) -> BoundCycle:
    """Runs steps; the cycle is planned after the second.  Returns the cycle of the last, which is warm."""
    for i in range(steps):
        step(i)
    (route,) = cycles(model)
    newest = [p.measurements[-1] for p in programs(model)]
    assert sum(m.primed_bytes for m in newest) == 0
    assert sum(m.moved_bytes for m in newest) == route.cycle.plan.moved_bytes > 0
    return route


def test_a_cycle_is_planned_from_its_times_and_those_between_its_calls() -> None:
    clock = OwnClock()
    model, step = pair(arena=Arena(make=lambda *_: CpuDevice(clock=clock.host)))
    model.blocks[1].register_forward_pre_hook(torch.compiler.disable(lambda *_: clock.sleep(PAUSE_S)))
    before = run(model, step)
    timings = before.times.timings(1)
    assert timings is not None
    idle = [0.0] * len(timings.compute_s)
    idle[before.cycle.starts[1] - 1] = PAUSE_S  # before the second block
    assert timings.idle_s == pytest.approx(idle)
    replan(model, as_measured=True)
    after = run(model, step)
    assert after is not before and after.keys == before.keys
    assert after.cycle.plan.hardware.endswith("as measured")
    assert after.cycle.plan.predicted is not None and after.cycle.plan.predicted.step_s >= PAUSE_S


def test_a_cycle_plans_itself_again() -> None:
    model, step = pair(replan_after=2)
    for i in range(3):
        step(i)
    (before,) = cycles(model)
    assert not before.cycle.plan.hardware.endswith("as measured")
    after = run(model, step, 8)
    assert after.cycle.plan.hardware.endswith("as measured") or after is before  # if the placement is the same
    assert after.replan_after == 0


def test_a_cycle_that_contains_its_jumps_plans_itself_again() -> None:
    """Two passes over it are no cycle of their own, and one that is learnt but does not run holds nothing up."""
    model, step = pair(replan_after=2)
    x = torch.randn(4, model.blocks[0].up.in_features)
    for i in range(24):
        step(i)
        model.blocks[0](x)  # a jump, while the blocks alone are the cycle
        if i > 12:
            lengths = {len(route.keys) for route in cycles(model)}
    assert 5 in lengths and not lengths & {8, 10, 15, 20}
    (route,) = (r for r in cycles(model) if len(r.keys) == 5)
    assert route.replan_after == 0


def test_a_cycle_for_another_goal() -> None:
    model, step = pair()
    before = run(model, step)
    whole = sum(p.nbytes for p in model.parameters())
    replan(model, weight_memory=whole // 2)
    after = run(model, step)
    assert after.cycle.plan.device_bytes <= whole // 2
    assert after.keys != before.keys or after is not before
    replan(model, policy="layerwise")
    for i in range(4):
        step(i)
    assert cycles(model) == (), "the user chose the placement"


def test_a_cycle_that_fits_a_smaller_budget_goes_on() -> None:
    model, step = pair(weight_memory=sum(p.nbytes for p in Stack(4).parameters()) // 2, slowdown=None, hardware="cpu")
    before = run(model, step)
    needed = before.cycle.plan.device_bytes + before.settings.external_bytes
    replan(model, weight_memory=needed)
    assert run(model, step) is before, "no other plan is faster within less memory"
    assert all(p.variant.settings.goal.memory == needed for p in programs(model))
    replan(model, weight_memory=needed - 1)
    smaller = run(model, step)
    assert smaller is not before and smaller.cycle.plan.device_bytes < before.cycle.plan.device_bytes
    replan(model, weight_memory=needed + 1)
    assert run(model, step) is not smaller, "there may be a faster one"


def with_residents(**options: Any) -> dict[str, Any]:
    """Options for plans with resident weights: of a machine where copies take longest."""
    return {**{k: v for k, v in EAGER.items() if k not in ("hardware", "slowdown")}, **options}


def on_device(arena: Arena, *models: nn.Module) -> int:
    """Bytes of the arena and of all copies of weights beside it, whoever keeps them."""
    buffers = [buffer for model in models for p in model.parameters() if (buffer := buffer_of(p)) is not None]
    copies = {id(made): made.nbytes for buffer in buffers if (made := buffer.on_device) is not None}
    return arena.nbytes + sum(copies.values())


class Parted(nn.Module):
    """A norm, whose weights are small, and two stacks, with graph breaks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), Stack(3), Stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_part_without_large_weights_has_no_budget_of_its_own() -> None:
    model, twin = twins(Parted)
    memory = sum(p.nbytes for p in model.parameters()) * 3 // 4
    offload(model, min_bytes=OPTIONS["min_bytes"])
    options = with_residents(weight_memory=memory, disable=["cycle"])
    model.compile(backend="chunkflow", options=options)
    for _ in range(3):
        check_steps(model, twin, 1)
        assert on_device(programs(model)[0].arena, model) <= memory


def test_what_programs_leave_is_freed_where_the_next_has_no_room_beside_it() -> None:
    """In turns and not; and a size that comes in a cycle keeps nothing for a plan of its own."""
    arena, models = Arena(), [Stack(4).eval(), Stack(4).eval()]
    plain = copy.deepcopy(models)
    memory = sum(p.nbytes for p in models[0].parameters()) * 9 // 10
    for model in models:
        options = with_residents(weight_memory=memory, arena=arena)
        model.compile(backend="chunkflow", fullgraph=True, dynamic=True, options=options)
    in_cycles = list[bool]()
    order = (*[0, 1] * 5, 1, 1, 1, 1, *[0, 1] * 2, 0, 0, 0, 0, *[0, 1] * 4)
    for i, rows in (*((i, 4) for i in order), *((i, rows) for rows in (7, 7, 9) for i in (0, 1))):
        check_steps(models[i], plain[i], 1, (rows, 8))
        assert on_device(arena, *models) == arena.held <= 2 * memory
        in_cycles.append(programs(models[0])[0].order.current is not None)
    assert not all(in_cycles) and all(in_cycles[-6:])


def test_a_cycle_that_is_forgotten_when_it_was_planned_again() -> None:
    """One of its models gets a placement that the user has chosen; the other goes on."""
    arena = Arena()
    (first, step), (second, step_second) = pair(arena=arena), pair(arena=arena)
    for i in range(6):
        step(i)
        step_second(i)
    replan(first, as_measured=True)
    replan(first, policy="layerwise")
    for i in range(3):
        step(i)
        step_second(i)
    assert all(len(route.keys) == 4 for route in cycles(second)), "of the other alone"
    assert cycles(second)


def test_a_size_that_comes_after_a_replan_runs_in_the_same_cycle() -> None:
    (model, twin), budget = twins(lambda: Stack(4)), 36_000
    chunkflow_compile.compile(model, **{**EAGER, "slowdown": None, "weight_memory": 10**9})

    def step(rows: int) -> None:
        check_steps(model, twin, 1, (rows, 8))

    for _ in range(3):
        step(4)
    replan(model, weight_memory=budget)
    for _ in range(4):
        step(4)
    (route,) = cycles(model)
    for rows in (6, 6, 9, 9, 12):
        step(rows)
        assert cycles(model) == (route,) and route.cycle.plan.device_bytes <= budget
        assert programs(model)[0].arena.nbytes <= budget
