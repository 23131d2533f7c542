"""The bench: arms by name, policies side by side on an emulated link, and policies that only the bench has."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import OwnClock
from helpers import WIDE, UlyssesStack, check_steps, run_python, twins
from problems import CHUNK, MACHINE, blocks_problem
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, programs
from chunkflow_compile.bench import ranks as bench_ranks
from chunkflow_compile.bench.alternatives import (
    ALTERNATIVES,
    GROUP_OFFLOAD,
    GROUP_OFFLOAD_COMPILED,
    RECOMPILE_LIMIT,
    alternative_calls,
    describe_calls,
    make_alternative,
)
from chunkflow_compile.bench.arms import block_bytes, parse_arms
from chunkflow_compile.bench.bench_record import BenchRecord, bench_table, conditions, summarise, why_busy
from chunkflow_compile.bench.host import EVERY, HostTime, host_time
from chunkflow_compile.bench.job import Job, job_of
from chunkflow_compile.bench.link_load import LinkLoad, link_error
from chunkflow_compile.bench.pace import paced
from chunkflow_compile.bench.ranks import JobProgress, run_job
from chunkflow_compile.bench.regimes import REGIMES, Regime
from chunkflow_compile.bench.resident_steps import in_groups
from chunkflow_compile.bench.running_arm import Share, seen_slowdown
from chunkflow_compile.catalog.small import Size
from chunkflow_compile.hardware.emulated import EXCHANGE_S, on_emulated_link
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.policies import block_regions
from chunkflow_compile.report.record import ComparisonRecord
from chunkflow_compile.runtime.device import CpuDevice

OWN = """
import torch
from helpers import UlyssesStack
def build():
    torch.manual_seed(0)
    return UlyssesStack(5, width=512, heads=4).eval(), {"x": torch.randn(64, 512)}
"""
ARMS = ["resident", "layerwise", "layerwise-barrier", "chunkflow", "layerwise-prefix@20%", "replanned"]


def test_the_slowdown_by_copies_is_measured_on_all_arms() -> None:
    arms = {"resident": Share(2.0, 0.0), "layerwise": Share(2.3, 1.0), "chunkflow": Share(2.1, 0.5)}
    slow = {name: Share(2 * compute_s, copying) for name, (compute_s, copying) in arms.items()}
    assert seen_slowdown([arms, slow]) == pytest.approx(1 + 0.4 / 3)
    assert seen_slowdown([{**arms, "layerwise": Share(1.7, 1.0)}]) == 1, "noise"
    assert seen_slowdown([{"resident": Share(2.0, 0.0)}]) == 1
    assert seen_slowdown([{"resident": Share(2.0, 0.0), "chunkflow": Share(2.2, 0.01)}]) == 1, "too few copies"


@pytest.mark.long
def test_arms_of_a_model_of_ones_own(tmp_path: Path) -> None:
    own, record, picture = tmp_path / "own.py", tmp_path / "bench.json", tmp_path / "bench.png"
    own.write_text(OWN)
    command = ["-m", "chunkflow_compile.cli.main", "bench", f"{own}:build", "--bandwidth", "100MB/s"]
    command += ["--arms", ",".join(ARMS), "--steps", "4", "--lowering", "eager"]
    done = run_python(*command, "--json", str(record), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert "a link of 100.0 MB/s is emulated: " in done.stdout and "\r" not in done.stdout
    written = json.loads(record.read_text())
    assert list(written["arms"]) == list(written["predicted"]) == ARMS
    for name in ARMS:
        arm, predicted = written["arms"][name], written["predicted"][name]
        assert arm.keys() == predicted.keys()
        assert arm["equal_to_resident"] is True and arm["step_s"] > 0 < predicted["step_s"]
        low, high = written["quartiles_s"][name]
        assert low <= high
    arms = written["arms"]
    assert arms["resident"]["moved_bytes_per_step"] == 0 < arms["chunkflow"]["moved_bytes_per_step"]
    assert arms["layerwise"]["moved_bytes_per_step"] == arms["layerwise-barrier"]["moved_bytes_per_step"] == 20 << 20
    assert arms["layerwise-prefix@20%"]["moved_bytes_per_step"] == 16 << 20, "one block of five stays"
    assert arms["chunkflow"]["weights_device_bytes"] <= arms["layerwise"]["weights_device_bytes"]
    assert written["collective_inflation"]["resident"] == 0 and written["link"]["requested"] == 1e8
    assert picture.read_bytes().startswith(b"\x89PNG")
    # the copies alone take a fifth of a second on this link, and compute nearly nothing
    assert all(arms[n]["step_s"] > 0.2 for n in ("layerwise", "layerwise-barrier"))


def test_shares_of_blocks() -> None:
    parsed = parse_arms(["resident", "chunkflow@40%", "chunkflow@40%+pack", "chunkflow+auto", "chunkflow@40%+hoist"])
    arms = [(arm.policy, arm.residency, arm.pack, arm.hoist) for arm in parsed]
    shares = [("chunkflow", 0.4, False, False), ("chunkflow", 0.4, True, False), ("chunkflow", None, "auto", False)]
    assert arms == [("resident", None, False, False), *shares, ("chunkflow", 0.4, False, True)]
    grouped = parse_arms(["resident", "resident+groups2", "chunkflow@40%+groups4", "chunkflow"])
    assert [(arm.policy, arm.residency, arm.groups) for arm in grouped] == [
        ("resident", None, 1),
        ("resident", None, 2),
        ("chunkflow", 0.4, 4),
        ("chunkflow", None, 1),
    ]
    for other in ("layerwise+pack", "layerwise+groups2", "resident+hoist", "chunkflow+groups1", "chunkflow+groups"):
        with pytest.raises(ChunkflowError, match=f"there is no arm '{re.escape(other)}'"):
            parse_arms([other])
    found = blocks_problem(4)
    inside = [w for w in found.weights if w.uses]
    assert block_bytes(found) * len(block_regions(found)) >= sum(w.nbytes for w in inside) - block_bytes(found)


def test_a_prefix_keeps_the_first_blocks_that_the_budget_holds() -> None:
    found = blocks_problem(8)
    layerwise = place(found, MACHINE, Goal(policy="layerwise"), chunk_bytes=CHUNK)
    moved, per_block = [], block_bytes(found)
    for kept in range(4):
        memory = layerwise.device_bytes + kept * per_block
        plan = place(found, MACHINE, Goal(policy="layerwise-prefix", memory=memory), chunk_bytes=CHUNK)
        assert plan.device_bytes <= memory
        moved.append(plan.moved_bytes)
        ours = place(found, MACHINE, Goal(memory=memory), chunk_bytes=CHUNK)
        assert ours.predicted is not None and plan.predicted is not None
        assert ours.predicted.step_s <= plan.predicted.step_s * 1.001
    assert moved[0] == layerwise.moved_bytes and moved == sorted(moved, reverse=True) and moved[3] < moved[0]


def test_the_load_of_a_link_sets_its_bandwidth() -> None:
    """On that link, streaming all weights takes the share asked for of the resident step."""
    problem, compute_s = blocks_problem(4), 2.0
    weights = sum(w.nbytes for w in problem.weights if w.keep is None)
    exchanged = sum(c.nbytes for c in problem.collectives)
    assert weights > 0 < exchanged
    for share in (0.2, 0.7, 1.6):
        rate = LinkLoad(share, compute_s).bandwidth(problem)
        resident = compute_s + len(problem.collectives) * EXCHANGE_S + exchanged / rate
        assert (weights + exchanged) / rate == pytest.approx(share * resident)
        slower = LinkLoad(share, 2 * compute_s).bandwidth(problem)
        assert slower < 0.6 * rate, "half as fast a machine, about half the link"
    assert LinkLoad(0.7, 1.0, 1.5).bandwidth(problem) == LinkLoad(0.7, 1.5).bandwidth(problem), "a pace adds compute"
    assert "from 1000 ms of measured compute, held to 1.5 times that" in str(LinkLoad(0.7, 1.0, 1.5))
    share = 2 + sum(w.nbytes for w in problem.weights) / exchanged
    said = r"A load of [\d.]+ cannot be reached: on any link, that of this model is below [\d.]+\."
    with pytest.raises(ChunkflowError, match=said):
        LinkLoad(share, 1.0).bandwidth(problem)


def test_a_paced_region_has_its_duration(one_rank: None) -> None:
    """Whatever else slows it; one that ends late is made up for by the next."""
    model, twin = twins(lambda: UlyssesStack(2, width=64))
    options: dict[str, Any] = {"chunk_bytes": 4096, "min_bytes": 4096, "lowering": "eager"}
    clock = OwnClock()
    options["arena"] = Arena(make=lambda *_: CpuDevice(clock=clock.host))
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    run(torch.randn(16, 64))
    (session,) = programs(model)
    regions = len(session.program.problem.regions)
    assert regions > 3
    slow, delays = session.variant.regions, iter([0.015] + [0.0] * 10 * regions)
    late = {name: lambda *args, r=region: (clock.sleep(next(delays)), r(*args))[1] for name, region in slow.items()}
    session.call.active.variant = paced(replace(session.variant, regions=late), [0.005] * regions, 2, clock.host)
    check_steps(run, twin, 3, (16, 64))
    for step in programs(model)[0].measurements[-3:]:
        assert sum(step.windows.compute_s) == pytest.approx(0.01 * regions)
    assert programs(model)[0].measurements[-3].windows.compute_s[:2].tolist() == pytest.approx([0.015, 0.005])


def test_the_link_keeps_to_its_figures() -> None:
    """Exactly, by a clock that a test owns (tests/runtime/test_link.py); a busy machine may be late, and never early.  Ranks
    behind one port have their share of it."""
    found = link_error(LinkEmulation(bandwidth=5e7))
    assert 0 < found.alone <= 5e7 * (1 + 1e-9) and found.shared > 0
    assert "a link of 50.0 MB/s is emulated" in str(found)
    link = LinkEmulation(bandwidth=1e8, shared="port")
    job = job_of(REGIMES["shared-port"], 1)
    assert (
        job.ranks == 4 and job.link is not None and job.link.shared and not job_of(REGIMES["contention"], 1).link.shared
    )
    shared = on_emulated_link(load_profile("cpu"), link, 2)
    assert [shared.shared_by(ranks).copy_rate for ranks in (1, 2, 4)] == [1e8, 5e7, 2.5e7]
    assert shared.collective_bandwidth == 5e7
    assert on_emulated_link(load_profile("cpu"), LinkEmulation(bandwidth=1e8), 2).copy_rate == 1e8


def job(family: str = "wan", size: Size = WIDE, most: float = 1.0, **told: Any) -> Job:
    """A job on the CPU's own link, without emulation, as on a GPU."""
    regime = Regime(family=family, size=size, load=0.0, chunk_bytes=1 << 20, arms=(), shows="", most=most)
    arms = parse_arms(told.pop("arms"))
    return Job(regime=regime, link=None, arms=arms, steps=4, device="cpu", lowering="eager", **told)


@pytest.mark.parametrize(("device", "streams"), [("cuda", True), ("cpu", False)])
def test_an_alternative_is_called_as_it_is_described(device: str, streams: bool) -> None:
    """And Dynamo's limit is raised for its calls only."""
    usual, made = torch._dynamo.config.recompile_limit, dict[str, Any]()

    class Model(nn.Module):
        def enable_group_offload(self, **given: Any) -> None:
            made["enable_group_offload"] = given

        def compile_repeated_blocks(self, **given: Any) -> None:
            made["compile_repeated_blocks"] = given

        def forward(self, x: int) -> tuple[int, int]:
            return x, torch._dynamo.config.recompile_limit

    alternative = make_alternative(GROUP_OFFLOAD_COMPILED, Model(), torch.device(device))
    assert made["enable_group_offload"]["use_stream"] is made["enable_group_offload"]["record_stream"] is streams
    assert alternative(x=1) == (1, RECOMPILE_LIMIT) and torch._dynamo.config.recompile_limit == usual < RECOMPILE_LIMIT
    told = describe_calls(alternative_calls(GROUP_OFFLOAD_COMPILED, device))
    assert told.startswith(describe_calls(made)) and told.endswith(f"patch(recompile_limit={RECOMPILE_LIMIT})")
    eager = make_alternative(GROUP_OFFLOAD, Model(), torch.device(device))
    assert eager(x=1) == (1, usual) and "compile" not in describe_calls(alternative_calls(GROUP_OFFLOAD, device))
    with pytest.raises(ChunkflowError, match="Linear is not a model of diffusers"):
        make_alternative(GROUP_OFFLOAD, nn.Linear(2, 2), torch.device(device))


@pytest.mark.long
@pytest.mark.parametrize("alternatives", [(GROUP_OFFLOAD,), ALTERNATIVES], ids=len)
def test_alternatives_run_on_the_same_weights(alternatives: tuple[str, ...], forked: None) -> None:
    told = job(ranks=1, arms=["resident", "layerwise", "chunkflow", *alternatives])
    found = summarise(told, run_job(told))
    assert list(found.record.arms) == [a.name for a in told.arms]
    assert all(a.step_s and a.step_s > 0 for a in found.record.arms.values())
    assert found.record.arms["layerwise"].equal_to_resident and found.record.arms["chunkflow"].equal_to_resident
    assert found.record.arms["layerwise"].moved_bytes_per_step and found.copy_rate["layerwise"]
    for name in alternatives:  # another compilation may round differently; other weights would change the output
        assert found.difference[name] is not None and found.difference[name] < 1e-4
        assert name not in found.predicted and found.record.arms[name].weights_device_bytes is None
    assert list(found.settings) == list(found.record.arms) and "'policy': 'chunkflow'" in found.settings["chunkflow"]
    assert found.difference.get("inductor") == found.difference.get("inductor-again"), "one compiled model"
    assert found.link is None and "emulated" not in conditions(told, found)
    assert all(0 < s <= (found.record.arms[n].step_s or 0) for n, s in found.host_s.items())
    assert all(name in bench_table(found) for name in alternatives)


@pytest.mark.long
def test_one_process_stands_for_all_ranks(forked: None) -> None:
    told = job(ranks=2, arms=["resident", "layerwise", "chunkflow"], transport="loopback")
    found = summarise(told, run_job(told))
    assert found.record.degree == 2 and "one process stands for all" in conditions(told, found)
    assert all(a.equal_to_resident and a.collective_s for a in found.record.arms.values())
    assert found.inflation["resident"] == 0 and found.copy_rate["layerwise"]


@pytest.mark.long
def test_an_arm_with_hoisted_weights(forked: None) -> None:
    """Within the same budget and on the same weights, of which a third, the modulations, is not in its plan."""
    size = replace(WIDE, height=8, width=8, text=64)  # more bytes of text than of results, so it is not slow
    told = job("qwen-image", size, most=0.6, ranks=1, arms=["resident", "chunkflow", "chunkflow+hoist"])
    (rank,) = ran = run_job(told)
    found = summarise(told, ran)
    assert all(arm.equal_to_resident for arm in found.record.arms.values())
    whole, hoisted = (rank.arms[name].program for name in ("chunkflow", "chunkflow+hoist"))
    assert whole is not None and hoisted is not None
    planned = {w.name for w in hoisted.plan.weights}
    gone = {w.name: w.nbytes for w in whole.plan.weights if w.name not in planned}
    assert sum(gone.values()) > rank.total_bytes / 3
    assert [n for n in gone if not ("_mod." in n or n.startswith(("time_text_embed", "norm_out")))] == []
    assert hoisted.plan.device_bytes <= 0.6 * rank.total_bytes and hoisted.plan.moved_bytes < whole.plan.moved_bytes
    assert not any(step.primed_bytes for step in hoisted.measurements), "the table has its row"
    assert "'hoist': True" in found.settings["chunkflow+hoist"] and "hoist" not in found.settings["chunkflow"]


def test_groups_share_the_duration_of_an_attention() -> None:
    found = blocks_problem(2)
    groups = [r for r in found.regions for _ in range(3 if r.index % 4 == 1 else 1)]
    divided = replace(found, regions=tuple(replace(r, groups=3 if r.index % 4 == 1 else 1) for r in groups))
    seconds = in_groups([1.0, 6.0, 3.0, 4.0, 5.0, 9.0, 7.0, 8.0], divided)
    assert seconds == [1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 5.0, 3.0, 3.0, 3.0, 7.0, 8.0]


@pytest.mark.long
def test_arms_with_exchanges_in_groups(forked: None) -> None:
    """Of the same bits as whole exchanges, resident and streamed.  The outputs are gathered once, in any case."""
    size = replace(WIDE, heads=8, head_dim=WIDE.heads * WIDE.head_dim // 8)
    arms = ["resident", "resident+groups2", "chunkflow", "chunkflow+groups2", "chunkflow+groups4"]
    told = job(size=size, most=0.7, ranks=2, arms=arms, transport="loopback")
    (rank,) = ran = run_job(told)
    found = summarise(told, ran)
    assert all(arm.equal_to_resident for arm in found.record.arms.values()) and "to chunkflow" in bench_table(found)
    for name, arm in rank.arms.items():
        assert arm.program is not None
        groups = int(name.partition("+groups")[2] or 1)
        assert arm.program.predicted.step_s > 0
        assert [m.collectives for m in arm.program.measurements] == [groups * 4 * size.layers + 1] * told.steps
        assert ("exchange_groups" in arm.settings) == (groups > 1)
        assert (arm.program.plan.moved_bytes > 0) == name.startswith("chunkflow")


def _readings(steps_s: tuple[float, ...], compute_s: tuple[float, ...], pace: float | None = 1.5) -> BenchRecord:
    """Of a resident arm whose compute is held to 0.6 s."""
    return BenchRecord(
        record=ComparisonRecord(model="m", degree=2, arms={}),
        settings={},
        predicted={},
        steps_s={"resident": steps_s},
        compute_s={"resident": compute_s},
        inflation={},
        host_s={},
        host_bounds=(),
        copy_rate={},
        peak_bytes={},
        difference={},
        link=None,
        load=LinkLoad(0.7, 0.4, pace),
        machine="",
    )


def test_a_busy_machine_is_told_from_a_quiet_one() -> None:
    assert why_busy(_readings((0.70, 0.73, 0.71), (0.6, 0.605, 0.59))) == ""
    late = "compute overran its fixed duration in 2 of 3 steps, by up to 50 %"
    assert why_busy(_readings((0.70, 0.73, 0.71), (0.6, 0.66, 0.9))) == late
    spread = "resident steps took from 700 to 900 ms"
    assert why_busy(_readings((0.70, 0.90, 0.71), (0.6, 0.6, 0.6))) == spread
    assert why_busy(_readings((0.70, 0.90, 0.71), (0.6, 0.66, 0.9))) == f"{late}, and {spread}"
    assert why_busy(_readings((0.70, 0.71), (0.9, 0.9), pace=None)) == "", "nothing is held"


def test_a_log_has_a_line_of_progress_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 100.0, 103.0, 106.0])
    progress = JobProgress(4, show=True, lines=True, now=lambda: next(times))
    for what in ("compile", "measure compute", "resident: step 1 of 3"):
        progress.set_description(what)
    assert capsys.readouterr().err.splitlines() == ["   0 s  compile", "   6 s  resident: step 1 of 3"]
    for show, lines in ((False, True), (True, False)):
        JobProgress(4, show=show, lines=lines).set_description("compile")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, ChunkflowError])
def test_no_folder_and_no_rank_outlives_a_job_that_ends_early(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class Process:
        def terminate(self) -> None:
            ended.append("terminate")

        def join(self) -> None:
            ended.append("join" if list(tmp_path.iterdir()) else "join without the folder")

    class Started:
        processes = (Process(),)

        def join(self) -> bool:
            raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(bench_ranks, "spawn", lambda *_, **__: Started())
    with pytest.raises(error):
        run_job(job(ranks=2, arms=["resident"]))
    assert ended == ["terminate", "join"] and not list(tmp_path.iterdir())


def test_the_clock_of_the_host_stands_still_while_it_waits() -> None:
    """After each EVERY instructions, however many of them an executor has; it runs the same ones afterwards."""

    class Counted:
        def __init__(self, count: int) -> None:
            self.instructions = [lambda step: clock.sleep(1.0)] * count

    clock, waits = OwnClock(), list[float]()
    executors: Any = [Counted(3 * EVERY), Counted(5), Counted(EVERY - 5)]
    before = [executor.instructions for executor in executors]

    def call() -> None:
        for executor in executors:
            for issue in executor.instructions:
                issue(None)

    def wait() -> None:
        waits.append(clock.now())
        clock.sleep(100.0)

    assert host_time(call, executors, wait, clock.now) == HostTime(4 * EVERY, 4)
    assert len(waits) == 1 + 4, "once before it"
    assert [executor.instructions for executor in executors] == before
