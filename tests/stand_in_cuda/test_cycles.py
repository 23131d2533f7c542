"""Cycles and sizes on a card: on real events, within the memory of their plans, also where the device lags by twenty calls,
as it does where blocks are compiled one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers import Stack, check_steps, graphs
from test_gpu import MIB, OPTIONS
from torch import nn

import chunkflow_compile
from chunkflow_compile import cycles, explain, offload, programs, replan, restore
from chunkflow_compile.cli.main import main
from chunkflow_compile.runtime.device_base import EVERY, FIRST_STEPS

from . import control
from .test_findings import placed


def step(model: nn.Module, twin: nn.Module, order: list[int]) -> None:
    x = torch.randn(16, 8, device="cuda")
    found = []
    for m in (model, twin):
        y = m.embed(x)
        for i in order:
            y = m.blocks[i](y)
        found.append(m.head(y))
    assert torch.equal(*found), order


def test_a_cycle_and_its_jumps() -> None:
    """Of a model of 4 MiB of weights in a budget of half of them."""
    model, _, twin = placed(4, 256)
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**OPTIONS, "policy": "chunkflow", "weight_memory": 2 * MIB})
    order = [0, 1, 2, 3]
    for _ in range(3):
        step(model, twin, order)
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


def test_sizes_in_turns() -> None:
    """Two compilations, a plan for each size, one arena."""
    model, run, twin = placed(4, 256, policy="chunkflow", weight_memory=2 * MIB)
    for rows, columns in 3 * [(2, 3), (4, 6), (8, 5), (16, 9)]:
        check_steps(run, twin, 1, (rows, columns, 8), "cuda")
    torch.cuda.synchronize()
    found = programs(model)
    assert graphs() == 2
    assert len(found) in (4, 5), "one more if torch prefers the open sizes at the first one too"
    assert all(m.moved_bytes == p.plan.moved_bytes > 0 for p in found for m in p.measurements if not m.primed_bytes)
    assert found[0].arena.nbytes <= 2 * MIB


LAYERS, LAG = 30, 20


class Lagging:
    """A model compiled by kind on a device that lags by ``LAG`` calls from the third step on; and its twin."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.twin, model = Stack(LAYERS, 64).eval().cuda(), Stack(LAYERS, 64).eval()
        model.load_state_dict(self.twin.state_dict())
        offload(model, "cuda", min_bytes=4096)
        memory = sum(p.nbytes for p in model.parameters()) // 2
        chosen = {**OPTIONS, "policy": "chunkflow", "weight_memory": memory, **options}
        self.model = chunkflow_compile.compile(model, **chosen)
        self.inputs = [torch.randn(16, 8, device="cuda") for _ in range(4)]
        self.begun: list[torch.cuda.Event] = []  # one for each call
        self.steps = 0
        for _ in range(2):
            before = control.counts()["operations queued"]
            self.step()
        queued = control.counts()["operations queued"] - before
        control.settings(lag=(LAG + 6) * queued // LAYERS)  # another plan may queue less for a call

    def step(self) -> torch.Tensor:
        y = self.model.embed(self.inputs[self.steps % 4])
        for block in self.model.blocks:
            self.begun.append(torch.cuda.Event())
            self.begun[-1].record()
            y = block(y)
        self.steps += 1
        return self.model.head(y)

    def run(self, steps: int, planned: int = -1) -> None:
        """``planned``: the step after which the host waits for the device, to plan again from what it took."""
        outputs = []
        for i in range(steps):
            outputs.append(self.step())
            assert self.begun[-LAG].query() == (i == planned), "else the device lags further"
        first = self.steps - steps
        control.settings(lag=0)
        for i, y in enumerate(outputs):
            assert torch.equal(y, self.twin(self.inputs[(first + i) % 4]))


def test_passes_are_measured_and_planned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lagging = Lagging(replan_after=2, dump=str(tmp_path))
    model = lagging.model
    lagging.run(8, planned=2)
    (route,) = cycles(model)
    assert len(route.keys) == LAYERS and route.jumps == 0 and len(route.measurements) >= 1
    assert route.replan_after == 0, "it was planned again"
    assert {len(p.measurements) for p in programs(model)} == {lagging.steps}, "each call is measured"
    for order in ([3, 4, 5], [0, 7]):  # jumps end a pass: its calls count, and it does not
        before, passes = sum(len(p.measurements) for p in programs(model)), len(route.measurements)
        for i in order:
            model.blocks[i](torch.randn(16, 64, device="cuda"))
        assert sum(len(p.measurements) for p in programs(model)) == before + len(order)
        assert len(route.measurements) == passes
    newest = route.measurements[-1]
    assert newest.moved_bytes == route.cycle.plan.moved_bytes > 0 == newest.primed_bytes
    assert all(s > 0 for s in newest.windows.compute_s)
    replan(model, as_measured=True)
    for _ in range(4):
        lagging.step()
    again = cycles(model)[0]
    assert again is not route and again.cycle.plan.hardware.endswith("as measured")
    explained = explain(model)
    assert explained.plan == again.cycle.plan.digest and explained.steps >= 2
    for _ in range(2):
        lagging.step()
    assert main(["explain", str(tmp_path), "--details"]) == 0
    told = capsys.readouterr().out
    assert f"cycle_of_{LAYERS}_{again.cycle.plan.digest}" in told and "as measured" in told


def test_two_passes_in_sixteen_are_marked_and_the_second_counts() -> None:
    lagging = Lagging()
    lagging.step()
    (route,) = cycles(lagging.model)
    lagging.run(FIRST_STEPS)
    before, read = len(route.measurements), []
    for _ in range(EVERY):
        with control.counted() as made:
            lagging.step()
        read.append(
            "cudaEventElapsedTime" in made or made["cudaEventCreateWithFlags"] > LAYERS
        )  # beside this test's own
    assert not any(read[:-2]), "a pass that is not marked creates and reads no event"
    assert (before, len(route.measurements)) == (FIRST_STEPS + 1, FIRST_STEPS + 2)
