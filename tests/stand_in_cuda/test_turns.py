"""The turns of a benchmark on a card: what is inside the clock, and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu import MIB
from torch._inductor.codecache import PyCodeCache
from tqdm import tqdm

from chunkflow_compile.bench import host as bench_host
from chunkflow_compile.bench import turns as bench_turns
from chunkflow_compile.bench.arms import RAW, parse_arms
from chunkflow_compile.bench.job import Job
from chunkflow_compile.bench.regimes import Regime
from chunkflow_compile.bench.running_arm import RunningArm
from chunkflow_compile.bench.turns import Turns
from chunkflow_compile.catalog.small import Size
from chunkflow_compile.hardware.stopwatch import Stopwatch
from chunkflow_compile.passes.plan import runs

from . import control

SIZE = Size(layers=4, heads=8, head_dim=64, frames=2, height=16, width=16, text=16)


def turns(folder: Path, arms: Sequence[str], steps: int, family: str = "wan", size: Size = SIZE) -> Turns:
    regime = Regime(family=family, size=size, load=0.0, chunk_bytes=1 << 20, arms=tuple(arms), shows=family)
    job = Job(
        regime=regime, link=None, ranks=1, arms=parse_arms(arms), steps=steps, lowering="eager", device="cuda",
        hardware="h100-pcie-x2", folder=str(folder),
    )  # fmt: skip
    return Turns(job, 0, tqdm(disable=True))


def test_the_timed_steps_of_a_benchmark_are_in_steady_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    """No mark is recorded or read in them, and the copies that they issue for the next step are inside the clock."""
    inside: dict[str, list[dict[str, int]]] = {}

    class Counting(Stopwatch):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.counts = control.counts()

        def stop(self) -> float:
            now = control.counts()
            inside.setdefault(arm[0], []).append({n: c - self.counts.get(n, 0) for n, c in now.items()})
            return super().stop()

    arm = [""]
    monkeypatch.setattr(bench_turns, "Stopwatch", Counting)
    arms = ("resident", "layerwise", "inductor", "inductor-again")
    run = turns(tmp_path, arms, 6)
    turn = run._turn

    def named(running: RunningArm, steps: Any) -> None:
        arm[0] = running.name
        turn(running, steps)

    monkeypatch.setattr(run, "_turn", named)
    found = run.run()
    ran = {name: arm.program for name, arm in found.arms.items() if arm.program is not None}
    plan = ran["layerwise"].plan
    assert [len(inside[name]) for name in arms] == [2] * 4 and plan.moved_bytes > 0
    copies = len([w for w in plan.streamed for _ in runs(w.windows)])
    for made in inside["layerwise"]:
        assert made["copies to the device, pinned"] == run.job.turn * copies > 0
        assert not made.get("cudaEventElapsedTime") and not made.get("cudaEventQuery")
    for ours in ("resident", "layerwise"):
        assert len(found.arms[ours].steps_s) == len(ran[ours].measurements) == 2
        assert found.arms[ours].difference == 0.0
    assert len(found.arms["inductor-again"].steps_s) == 2
    assert sum(ran["layerwise"].measurements[0].windows.compute_s) > 0, "the step before them is marked"


def test_copies_for_the_next_step_take_their_time_inside_the_clock(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long inputs take to make: a step takes no less than the copies of its bytes, on a slow link."""
    run, rate = turns(tmp_path, ["layerwise"], 6), 100 * MIB
    compiled = run.resident.compile

    def compiles() -> None:
        compiled()
        plain = run.resident.inputs
        run.resident.inputs = lambda step: (torch.cuda.synchronize(), plain(step))[1]
        control.settings(rate=rate)

    monkeypatch.setattr(run.resident, "compile", compiles)
    found = run.run().arms["layerwise"]
    assert found.program is not None and found.program.plan.moved_bytes > 10 * MIB
    for seconds in found.steps_s:
        assert seconds > 0.98 * found.program.plan.moved_bytes / rate


def test_the_host_is_timed_while_nothing_is_queued(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is steps ahead of a card waits for room in its queue, and that is no work of the host: neither between
    instructions nor between kernels of plain torch.compile, whose modules are as they were afterwards."""
    arms = ("resident", "layerwise", "by-kind", "inductor", "apply")
    run, waits = turns(tmp_path, arms, 3), dict[str, list[int]]()
    timed, wait, waited = run._host_times, torch.cuda.synchronize, [0]

    def waiting(*device: Any) -> None:
        waited[0] += 1
        wait(*device)

    def watched(arm: RunningArm, call: Any) -> list[bench_host.HostTime]:
        def counted() -> None:
            assert torch.cuda.current_stream().query()
            before = waited[0]
            with control.counted() as made:
                call()
            waits.setdefault(arm.name, []).append(waited[0] - before)
            if arm.name == "inductor":
                assert waited[0] - before == made["launches of Triton"] // 4 > 1

        return timed(arm, counted)

    monkeypatch.setattr(torch.cuda, "synchronize", waiting)
    monkeypatch.setattr(bench_host, "EVERY", 4)
    monkeypatch.setattr(run, "_host_times", watched)
    found = run.run().arms
    assert all(len(arm.host_s) == bench_host.SAMPLES and min(arm.host_s) > 0 for arm in found.values())
    assert {name: arm.host_waits for name, arm in found.items()} == {name: min(waits[name]) for name in arms}
    assert all(arm.host_waits for arm in found.values())
    assert not any(isinstance(k, bench_host._Paused) for m in PyCodeCache.modules for k in vars(m).values())


def test_each_turn_has_its_own_marked_step(tmp_path: Path, one_rank: None) -> None:
    """Also where an arm follows itself, and goes on with its program."""
    found = turns(tmp_path, ["layerwise"], 9).run().arms["layerwise"]
    assert found.program is not None
    assert len({id(step) for step in found.program.measurements}) == len(found.steps_s) == 3
    assert all(step.copy_s > 0 and not step.primed_bytes for step in found.program.measurements)


def test_an_arm_that_plans_again_has_measured_its_steps_by_then(tmp_path: Path, one_rank: None) -> None:
    """However far the card lags.  FLUX: on the stand-in a convolution waits for the device."""
    size = Size(layers=2, singles=2, heads=4, head_dim=64, height=8, width=8, text=8)
    run = turns(tmp_path, ["resident", "replanned"], 3, "flux", size)
    run.resident.compile()
    run._make_programs({RAW: run.resident.raw()})
    control.settings(lag=1 << 20)
    run._rehearse(run.arms["replanned"])
    assert run.resident.compiled.program.replan_after == 0
