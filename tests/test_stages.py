"""Stages of compilation: passes that can be left out, contracts, files, torch's trace and logs, measurements."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import HERE, MODEL, OPTIONS, SIZES, fork
from helpers import Block, Stack, UlyssesStack, aimed, fake_ranks, run_python
from problems import CHUNK, blocks_problem
from problems import MACHINE as NUMBERS
from schedules import ranked
from torch import nn

import chunkflow_compile
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError, FindingError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import OPTIONAL_PASSES, STAGES, Yield
from chunkflow_compile.passes.ops import PREFETCH
from chunkflow_compile.passes.pass_pipeline import Stage, stages
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Source
from chunkflow_compile.passes.program.contracts import check_cut, check_plan, check_traced
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.report.lines import op_counts, stage_lines
from chunkflow_compile.report.listings import render
from chunkflow_compile.report.stages import annotator
from chunkflow_compile.runtime.device import ThreadsDevice
from chunkflow_compile.runtime.measurement import Measured

MACHINE = replace(load_profile(HERE / "slow_compute.json"), launch_s=1e-3, h2d_bandwidth=2e7)
YIELDS: tuple[Yield, ...] = ("auto", "hard", "soft")
EAGER = {**OPTIONS, "group_bytes": 1, "lowering": "eager"}
SETTINGS = Settings(hardware=MACHINE, chunk_bytes=4096, goal=Goal(slowdown=1.0))


@pytest.fixture(scope="module")
def exchanging() -> Traced:
    """A model with collectives."""
    with fake_ranks():
        return trace(UlyssesStack(2), {"x": torch.randn(4, 32)}, 0)


def all_stages(traced: Traced, **settings: Any) -> list[Stage]:
    return [*stages(traced, replace(SETTINGS, **settings), verify_each=True)]


@pytest.mark.parametrize("disabled", [(), *((name,) for name in OPTIONAL_PASSES), tuple(OPTIONAL_PASSES)])
def test_every_pass_can_be_left_out(disabled: tuple[str, ...], exchanging: Traced) -> None:
    made = all_stages(exchanging, disabled=frozenset(disabled))
    assert [s.name for s in made] == list(STAGES)[: 4 if "verify" in disabled else 5]
    last = made[-1]
    assert last.program is not None and last.cut is not None
    assert verify(last.program).ops > 0
    whole = len(last.cut.regions)
    assert (len(last.program.regions) == whole) == ("sharing" in disabled)
    if "views" not in disabled:
        assert len(make_cut(exchanging, disabled=("views",)).regions) >= whole


def test_a_pass_left_out_changes_no_bit_of_the_output(no_grad: None) -> None:
    model = Stack(3).eval()
    inputs = [torch.randn(4, 8) for _ in range(2)]
    expected = None
    for disable in ((), *((name,) for name in OPTIONAL_PASSES)):
        torch._dynamo.reset()
        options = {**EAGER, "disable": disable, "slowdown": 1.5}
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
        outputs = [run(x) for x in inputs]
        (program,) = chunkflow_compile.programs(model)
        assert program.measurements[-1].moved_bytes == program.plan.moved_bytes > 0, disable
        chunkflow_compile.restore(model)
        expected = expected or outputs
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)), disable


def test_a_plan_yields_hard_where_that_is_faster_or_wanted() -> None:
    slow = replace(NUMBERS, copy_slowdown=3.0, collective_slowdown=3.0, h2d_bandwidth=CHUNK * 0.5e6)
    found = blocks_problem(2, compute=16.0, exchange=8.0)
    told = Settings(hardware=slow, chunk_bytes=CHUNK, goal=Goal(memory=16 * CHUNK))
    chosen, hard, soft = (make_plan(found, aimed(told, yields=y)) for y in YIELDS)
    assert chosen.barriers and hard.barriers and not soft.barriers
    assert chosen.predicted is not None and hard.predicted is not None and soft.predicted is not None
    assert hard.predicted.inflation_s == 0.0
    assert chosen.predicted.step_s <= min(hard.predicted.step_s, soft.predicted.step_s) < soft.predicted.step_s
    free = replace(told, hardware=replace(slow, copy_slowdown=1.0, collective_slowdown=1.0))
    assert not make_plan(found, free).barriers, "copies slow no collective"


@pytest.mark.parametrize(
    "family", ["wan", *(pytest.param(f, marks=pytest.mark.long) for f in ("flux", "hunyuanvideo", "qwen-image"))]
)
def test_every_stage_of_a_real_model_parses_as_python(family: str, no_grad: None) -> None:
    size = Size(layers=2, heads=4, head_dim=32, frames=1, height=16, width=16, text=16)
    traced = trace(small_model(family, size), small_inputs(family, size, 0), 4096)
    for stage in all_stages(traced):
        lines = stage_lines(stage)
        for note in (None, annotator(stage, MACHINE)):
            ast.parse(render(lines, note))
        counts = op_counts(lines)
        nodes = [n for n in traced.graph.graph.nodes if n.op == "call_function"]
        if stage.name == "traced":
            assert counts.total() == len(nodes)
        if stage.program is not None and stage.cut is not None:
            assert counts["region"] == len(stage.cut.regions)
            assert counts["prefetch"] == len(stage.program.module.graph.find_nodes(op="call_function", target=PREFETCH))


def folded(model: nn.Module) -> list[list[str]]:
    """The parts that the listing of each stage of ``model`` folds."""
    made = all_stages(trace(model, {"x": torch.randn(4, 8)}, 0), group_bytes=1)
    texts = [render(stage_lines(stage), full=False) for stage in made]
    return [[line.partition(",")[0] for line in text.splitlines() if ": as " in line] for text in texts]


def test_folding_hides_blocks_of_equal_structure(no_grad: None) -> None:
    assert "# blocks.2 .. blocks.5: as blocks.1" in folded(Stack(6))[-1], "the first block reads something else"
    model = Stack(6)
    model.blocks[2] = Block(32, hidden=48)
    assert folded(model)[-1] == [
        "# inputs of blocks.1: as inputs of blocks.0",
        "# inputs of blocks.4 .. inputs of blocks.5: as inputs of blocks.3",
        "# blocks.4 .. blocks.5: as blocks.3",
    ]


class Numbered(Stack):
    """Each block gets its number, and what the first one gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = block(x, first, number)
        return self.head(x)


class ScaledBlock(Block):
    """Each has a constant of its own."""

    def forward(self, x: torch.Tensor, first: torch.Tensor, number: int) -> torch.Tensor:
        return super().forward(x) * (1.5 + number)


class WiredBlock(Block):
    """They have the same ops on swapped operands."""

    def forward(self, x: torch.Tensor, first: torch.Tensor, number: int) -> torch.Tensor:
        return super().forward(first - x if number % 2 else x - first)


@pytest.mark.parametrize("block", [ScaledBlock, WiredBlock])
def test_folding_shows_blocks_that_differ_in_constants_or_wiring(block: type[Block], no_grad: None) -> None:
    model = Numbered(4)
    model.blocks = nn.ModuleList([block(32) for _ in range(4)])
    assert not [line for stage in folded(model) for line in stage if line.startswith("# blocks")]


def test_the_contracts_find_what_is_broken(exchanging: Traced) -> None:
    traced, cut = exchanging, make_cut(exchanging)
    plan = make_plan(cut.problem, SETTINGS)
    check_traced(traced)
    check_cut(cut)
    check_plan(plan, cut.problem, Goal())
    with pytest.raises(FindingError, match=r"stage traced is broken: the group '0' of all_to_all_single has no size"):
        check_traced(replace(traced, ranks={}))
    sequence = list(cut.sequence)
    first = next(i for i, item in enumerate(sequence) if not hasattr(item, "info"))
    swapped = [*sequence[:first], sequence[first + 2], sequence[first + 1], sequence[first], *sequence[first + 3 :]]
    with pytest.raises(FindingError, match=r"stage regions is broken: .* comes only after it"):
        check_cut(replace(cut, sequence=tuple(swapped)))
    region = cut.regions[0]
    for wrong in (sequence[:first], [*sequence, region]):
        with pytest.raises(FindingError, match=r"stage regions is broken: .* is computed \d+ times, \d+ in the traced"):
            check_cut(replace(cut, sequence=tuple(wrong)))
    check_plan(replace(plan, weights=plan.weights[::-1]), cut.problem, Goal())
    weights = plan.weights
    for broken, sentence in (
        (replace(plan, arena_bytes=plan.arena_bytes - 256), "is not aligned or leaves the arena"),
        (replace(plan, regions=plan.regions[1:]), "9 windows for 10 regions"),
        (replace(plan, weights=(replace(weights[0], windows=(99,) * 3), *weights[1:])), "starts in window 99"),
        (replace(plan, weights=(replace(weights[0], windows=(1,)), *weights[1:])), "has 1 chunks"),
        (
            replace(plan, weights=(replace(weights[0], home="peers"), *weights[1:])),
            "in no pieces with home peers, in the",
        ),
        (
            replace(plan, weights=(replace(weights[0], source=Source(ranks=2)), *weights[1:])),
            "in pieces on 2 devices with home host, in",
        ),
    ):
        with pytest.raises(FindingError, match=f"stage planned is broken: .*{sentence}"):
            check_plan(broken, cut.problem, Goal())
    with pytest.raises(FindingError, match="above the budget of 1"):
        check_plan(plan, cut.problem, Goal(memory=1))


@pytest.mark.long
def test_stage_files_are_the_same_every_time_and_in_every_process(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "2")):
        command = (
            "-m",
            "chunkflow_compile.cli.main",
            "dump",
            MODEL,
            *SIZES,
            "--annotate",
            "--out",
            str(tmp_path / name),
        )
        done = run_python(*command, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        # on a slow machine, lines of progress; a bar is for terminals
        assert all(re.match(r" *\d+ s  ", line) for line in done.stderr.splitlines()) and "\r" not in done.stderr
    files = {p.name for p in (tmp_path / "a").iterdir()}
    numbered = [f"{i:02}_{name}" for i, name in enumerate(STAGES)]
    assert files == {"plan.json", "report.txt", *(f"{n}.py" for n in numbered), *(f"{n}.diff" for n in numbered[1:])}
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_run_leaves_its_stages_and_what_it_measured(tmp_path: Path, no_grad: None) -> None:
    model = Stack(3).eval()
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, "dump": str(tmp_path)})
    for _ in range(5):
        run(torch.randn(4, 8))
    (program,) = chunkflow_compile.programs(model)
    folder = tmp_path / "rank0_0"
    assert Plan.from_json((folder / "plan.json").read_text()) == program.plan
    proof, *lines = (folder / "04_verified.py").read_text().splitlines()
    assert proof.startswith("# proved")
    assert [line for line in lines if not line.startswith("# ")] == str(program.program).splitlines()
    early = Measured.from_json((folder / "measured.json").read_text())
    assert early.steps == 4, "written after steps 1, 2 and 4"
    explained = chunkflow_compile.explain(run)
    chunkflow_compile.restore(model)
    late = Measured.from_json((folder / "measured.json").read_text())
    assert late.steps == 5 and late.plan == program.plan.digest
    figures = {f.name: f for f in explained.figures}
    assert figures["copied"].measured == figures["copied"].predicted == program.plan.moved_bytes > 0
    assert figures["a call of the model"].measured == late.step_s > late.compute_s > 0 and late.copy_s > 0
    assert sum(w.compute_s[0] for w in explained.windows) == pytest.approx(figures["compute"].predicted)
    waited_s = sum(w.exposed_s[0] for w in explained.windows)
    assert waited_s == pytest.approx(figures["waiting for weights"].predicted, abs=1e-7)
    assert len(explained.windows) == len(program.plan.regions) == len(late.windows.compute_s)
    assert json.loads(explained.to_json())["plan"] == program.plan.digest
    said = explained.report(details=True)
    assert ("limited by" in said and "worst stalls" in said) or "waited for no" in said
    with pytest.raises(ChunkflowError, match="has run yet: compile it with ChunkFlow and call it first"):
        chunkflow_compile.explain(model)


def test_a_wait_is_measured_in_the_window_that_waits(no_grad: None) -> None:
    """Compute comes first and takes no time; a copy of one weight takes 0.2 s."""
    clock = OwnClock()
    device = ThreadsDevice(ranked("compute", "collective", "copy"), clock=clock.host)
    options = {**EAGER, "arena": chunkflow_compile.Arena(make=lambda *_: device)}
    model = Stack(3).eval()
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    run(torch.randn(4, 8))
    device.copy.synchronize()
    (program,) = chunkflow_compile.programs(model)
    executor = program.executor
    target = next(w for w in program.plan.streamed if w.name == "blocks.1.down.weight")
    copy = executor.device.copy_bytes

    def slow(to: torch.Tensor, source: torch.Tensor, lane: str) -> None:
        if to.untyped_storage().data_ptr() and source.data_ptr() == executor.binding.hosts[target.name].data_ptr():
            clock.sleep(0.2)
        copy(to, source, lane)

    device.copy_bytes = slow
    device.engine.pause()  # until the host has enqueued the step
    run(torch.randn(4, 8))
    device.copy.synchronize()
    step = program.measurements[-1]
    waited = [0.0] * len(program.plan.regions)
    waited[target.first_use] = 0.2
    assert step.windows.exposed_s.tolist() == pytest.approx(waited)  # type: ignore[attr-defined]
    assert step.exposed_h2d_s == step.copy_s == pytest.approx(0.2)
    stall = chunkflow_compile.explain(run).stalls[0]
    assert stall.window == target.first_use and target.name in stall.weights


def compile_with_logs(rank: int, folder: str) -> None:
    """In a forked process: reads the environment as the import of torch does, and compiles a model three times.  The log by
    the name of the package, then by none, then by that of the artefact."""
    with open(f"{folder}/stderr", "w") as stderr:
        os.dup2(stderr.fileno(), 2)
    os.environ |= {"TORCH_TRACE": folder, "TORCH_LOGS": "chunkflow_compile"}
    logs = torch._logging._internal
    logs.LOG_TRACE_HANDLER = None
    logs._init_logs()
    given: tuple[Any, ...] = (None, {}, {"modules": {"chunkflow": True}})
    for settings in given:
        if settings is not None:
            os.environ.pop("TORCH_LOGS", None)
            print("next", file=sys.stderr, flush=True)
            torch._logging.set_logs(**settings)
            torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(Stack(3).eval(), backend="chunkflow", options=EAGER)(torch.randn(4, 8))


def test_stages_are_artefacts_of_torch_s_trace_and_log(tmp_path: Path) -> None:
    fork(compile_with_logs, (str(tmp_path),), 1)
    logs = (tmp_path / "stderr").read_text().split("next\n")
    assert ["[__chunkflow] rewritten, 0." in log for log in logs] == [True, False, True]
    assert "prefetch('blocks.0.up.weight'" in logs[0]
    trace_log = "".join(p.read_text() for p in tmp_path.glob("*.log"))
    for i, name in enumerate(STAGES):
        assert f'"name": "chunkflow_{i:02}_{name}"' in trace_log
    assert '"name": "chunkflow_plan"' in trace_log and "prefetch('blocks.1.up.weight'" in trace_log


def test_a_server_that_logs_everything_gets_no_listings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), torch.no_grad():
        torch.compile(Stack(3).eval(), backend="chunkflow", options=EAGER)(torch.randn(4, 8))
        assert not [record for record in caplog.records if "__chunkflow" in record.name]
    with caplog.at_level(logging.INFO, logger="chunkflow_compile"), torch.no_grad():
        torch.compile(Stack(2).eval(), backend="chunkflow", options=EAGER)(torch.randn(4, 8))
    assert [record for record in caplog.records if "__chunkflow" in record.name]
