"""A new plan between two calls, on request or from measurements: nothing is compiled again, and no output changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EAGER, OPTIONS
from helpers import Stack, check_steps, stack
from torch import nn

from chunkflow_compile import ChunkflowError, explain, offload, programs, replan, restore
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.runtime.device import CpuDevice
from chunkflow_compile.runtime.measurement import SCHEMA, Measured

SMALL = {"weight_memory": 50000, "slowdown": None}


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, **options})


def check(run: nn.Module, twin: nn.Module, steps: int = 3) -> None:
    """Equal to the twin, and every byte of the plan copied."""
    check_steps(run, twin, steps)
    session = programs(run)[-1]
    assert session.measurements[-1].moved_bytes == session.plan.moved_bytes


def test_a_running_model_is_given_other_goals(no_grad: None) -> None:
    model, twin = stack(6), stack(6)
    run = compiled(model, debug=("threads", "poison"))
    check(run, twin)
    (first,) = programs(model)
    goals: list[tuple[dict[str, Any], str]] = [
        ({"policy": "resident"}, "resident"),
        ({"memory": 60000}, "chunkflow"),
        ({"weight_memory": "50 KB", "as_measured": True}, "chunkflow"),
        ({"policy": "layerwise"}, "layerwise"),
        ({"as_measured": True}, "layerwise"),
        ({"slowdown": 1.5}, "chunkflow"),
    ]
    seen, measured = [], False
    for goal, policy in goals:
        assert replan(run, **goal) is run
        check(run, twin)
        (session,) = programs(model)
        assert session.variant.regions is first.variant.regions, "nothing was lowered again"
        assert session.plan.policy == policy
        assert session.plan.device_bytes <= (50000 if "weight_memory" in goal else 10**9)
        if "memory" in goal:
            assert 0 < session.program.problem.live_bytes <= 60000 - session.plan.device_bytes
        measured |= goal.get("as_measured", False)  # and later plans keep it
        assert ("as measured" in session.plan.hardware) == measured
        assert explain(run).plan == session.plan.digest and len(session.measurements) == 3
        seen.append(session.plan.moved_bytes)
    assert seen[0] == 0 < min(seen[1:])
    replan(model, weight_memory=30000)
    replan(model, as_measured=True)  # before a call with the other goal, which stays
    check(run, twin)
    (session,) = programs(model)
    assert session.variant.settings.goal.memory == 30000 >= session.plan.device_bytes
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    check(run, twin)


def test_a_goal_that_cannot_be_reached_changes_nothing(no_grad: None) -> None:
    model, twin = stack(6), stack(6)
    run = compiled(model)
    with pytest.raises(
        ChunkflowError, match="No program of this model runs yet: compile it with ChunkFlow and call it"
    ):
        replan(run)
    offload(model, min_bytes=4096)
    check(run, twin)
    (before,) = programs(model)
    for goal, said in (
        ({"weight_memory": "100B"}, "weight_memory=100 B is too little"),
        ({"weight_memory": 100, "slowdown": 2.0}, "Give weight_memory or slowdown, not both"),
        ({"memory": "1MiB", "weight_memory": "1MiB"}, "Give memory, for weights and activations, or weight_memory, "),
        ({"policy": "layerwise-prefix"}, "layerwise-prefix keeps what fits a budget: give weight_memory="),
        ({"policy": "eager"}, "policy='eager' is unknown"),
    ):
        with pytest.raises(ChunkflowError, match=said):
            replan(run, **goal)  # type: ignore[arg-type]
    check(run, twin)
    assert programs(model) == (before,)


def test_a_plan_that_finds_no_room_gives_way_to_the_one_before(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = stack(6), stack(6)
    run = compiled(model, weight_memory=50000, slowdown=None)
    check(run, twin)
    before = programs(model)[0].plan
    replan(run, policy="layerwise")
    coming = programs(model)[0].call.active.variant
    assert coming.program.plan.arena_bytes != before.arena_bytes
    allocate, least = CpuDevice.allocate, coming.program.plan.arena_bytes

    def full(device: CpuDevice, nbytes: int) -> torch.Tensor:
        if least <= nbytes < least + 1024:
            raise RuntimeError("out of memory")
        return allocate(device, nbytes)

    monkeypatch.setattr(CpuDevice, "allocate", full)
    with pytest.raises(ChunkflowError, match=r"no room for an arena of .*out of memory"):
        run(torch.randn(4, 8))
    check(run, twin)
    assert programs(model)[-1].plan == before


def test_every_resolution_keeps_its_new_plan_whatever_the_arena_does(no_grad: None) -> None:
    """The first call after replan grows the arena, which closes the programs of the other resolutions."""
    model, twin = stack(6), stack(6)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=False, options={**EAGER, **SMALL})
    shapes = [(4, 8), (6, 8), (9, 8)]
    inputs = [torch.randn(*shape) for shape in shapes]
    for x in inputs:
        assert torch.equal(run(x), twin(x))
    arena = programs(model)[0].arena
    small = arena.nbytes
    replan(run, policy="layerwise")
    for x in (*inputs, *reversed(inputs)):
        assert torch.equal(run(x), twin(x))
    assert arena.nbytes > small
    assert [p.plan.policy for p in programs(model)] == ["layerwise"] * 3
    assert len({p.plan.placement for p in programs(model)}) == 1


def test_after_two_steps_the_plan_is_made_from_what_they_took(tmp_path: Path, no_grad: None) -> None:
    """With a profile on which a copy takes a hundred times as long as all compute: every weight stays resident."""
    machine = replace(load_profile(OPTIONS["hardware"]), launch_s=1e-5, h2d_bandwidth=1e6, name="wrong")
    (tmp_path / "wrong.json").write_text(machine.to_json())
    model, twin = stack(6), stack(6)
    told = {"slowdown": 50.0, "hardware": str(tmp_path / "wrong.json"), "replan_after": 2, "dump": tmp_path / "dump"}
    run = compiled(model, **told)
    for step in range(3):  # the first step pays for first touches and does not count
        check(run, twin, 1)
        assert programs(model)[-1].plan.hardware == "wrong", step
    check(run, twin, 6)
    (session,) = programs(model)
    assert session.plan.hardware == "wrong, as measured" and session.variant.replan_after == 0
    assert len(session.measurements) == 6, "without the steps of the plan before"
    folders = sorted((tmp_path / "dump").iterdir())
    assert [f.name for f in folders] == ["rank0_0", "rank0_1"], "one for each plan"
    assert "as measured" in (folders[1] / "plan.json").read_text() and (folders[1] / "04_verified.py").exists()


def test_a_plan_that_cannot_be_made_leaves_the_one_that_runs(no_grad: None, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = stack(6), stack(6)
    run = compiled(model, replan_after=1)
    run(torch.randn(4, 8))
    (session,) = programs(model)
    before = session.plan

    def refuse(**_: Any) -> None:
        raise ChunkflowError("the proof failed")

    object.__setattr__(session.variant, "make", refuse)
    logging.getLogger("chunkflow_compile").addHandler(caplog.handler)  # torch's logs do not reach the root
    try:
        check(run, twin, 4)
    finally:
        logging.getLogger("chunkflow_compile").removeHandler(caplog.handler)
    assert "the current plan is kept: the proof failed" in caplog.text
    assert programs(model)[-1].plan == before


def test_what_one_run_took_plans_the_next(tmp_path: Path, no_grad: None) -> None:
    """Timings of another model and of no model are refused."""
    model, twin = stack(6), stack(6)
    run = compiled(model, dump=tmp_path)
    check(run, twin, 4)
    restore(model)  # writes the last figures
    file = tmp_path / "rank0_0" / "measured.json"
    took = Measured.from_json(file.read_text())
    assert took.copy_rate is not None and took.timings().collective_s == (0.0,) * len(took.windows.compute_s)
    torch._dynamo.reset()
    again = compiled(model, timings=str(file), weight_memory=60000, slowdown=None)
    check(again, twin)
    (session,) = programs(model)
    assert session.plan.hardware.endswith("as measured")
    assert session.plan.predicted is not None
    assert session.plan.predicted.resident_step_s == pytest.approx(sum(took.timings().compute_s), rel=1e-6)
    other = compiled(Stack(3).eval(), timings=str(file))
    with pytest.raises(Exception, match=r"measured on problem [0-9a-f]{16}, this model is .*Measure this one"):
        other(torch.randn(4, 8))
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**json.loads(file.read_text()), "schema": 1}))
    for given, said in (
        ({"timings": str(old)}, f"old.json: The measurement has schema 1, this version reads {SCHEMA}"),
        ({"timings": "/nowhere.json"}, "The timings /nowhere.json cannot be read: No such file"),
        ({"replan_after": -1}, "replan_after must be a whole number of at least 0"),
        ({"replan_after": 2, "plan": "p.json", "slowdown": None}, "Give a plan or replan_after, not both"),
    ):
        with pytest.raises(Exception, match=said):
            compiled(stack(6), **given)(torch.randn(4, 8))


@pytest.mark.parametrize("known", [(4,), (4, 6)], ids=["compiled", "planned"])
def test_a_size_that_comes_after_a_replan_keeps_to_its_goal(known: tuple[int, ...], no_grad: None) -> None:
    """The second size is compiled, the third is only planned."""
    model, twin = stack(6), stack(6)
    run = compiled(model, weight_memory=10**9, slowdown=None)
    for rows in known:
        run(torch.randn(rows, 8))
    replan(model, weight_memory=50000)
    for rows in (*known, 8, 10):
        check_steps(run, twin, 1, (rows, 8))
        newest = programs(model)[-1]
        assert newest.plan.device_bytes <= 50000 and newest.measurements[-1].moved_bytes > 0
    replan(model, policy="layerwise")
    for rows in (8, 12):
        run(torch.randn(rows, 8))
        assert programs(model)[-1].plan.policy == "layerwise"


def test_another_model_of_the_class_keeps_its_own_goal(no_grad: None) -> None:
    """Both have one compiled graph, and so its variants."""
    torch._dynamo.reset()
    models = [offload(stack(6), min_bytes=OPTIONS["min_bytes"]) for _ in range(2)]
    options = {**EAGER, "weight_memory": 10**9, "slowdown": None}

    @torch.compile(backend="chunkflow", options=options, dynamic=True)
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for model in models:
        run(model, torch.randn(4, 8))
    replan(models[0], weight_memory=50000)
    for rows in (6, 8):
        for model in models:
            run(model, torch.randn(rows, 8))
        assert [programs(model)[-1].variant.settings.goal.memory for model in models] == [50000, 10**9]
    assert programs(models[0])[-1].variant.regions is programs(models[1])[-1].variant.regions
