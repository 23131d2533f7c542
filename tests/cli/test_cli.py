"""The command line: the demo's table and record, plans, simulations, and errors."""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import HERE, MODEL, SIZES
from helpers import Stack, run_python
from two_blocks import backwards

from chunkflow_compile import offload, programs
from chunkflow_compile.bench.bench_record import BenchRecord
from chunkflow_compile.bench.job import job_of
from chunkflow_compile.bench.link_load import LinkLoad
from chunkflow_compile.catalog.quiet import quiet_imports
from chunkflow_compile.cli import demo, planning_arguments
from chunkflow_compile.cli.arguments import add_model
from chunkflow_compile.cli.main import main
from chunkflow_compile.cli.parsers import COMMANDS
from chunkflow_compile.hardware import stopwatch
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError, FindingError
from chunkflow_compile.passes.names import HOST_YIELD, ONLY_PREDICTED, SHARDED
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.record import ArmRecord, ComparisonRecord
from chunkflow_compile.units import parse_bytes, size
from chunkflow_compile.weights.drive import for_the_drive
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.progress import Progress

OWN = "examples/ulysses_dit.py:planned"
ULYSSES, SPLIT = (f"{HERE / 'two_blocks.py'}:{name}" for name in ("ulysses", "split"))

pytestmark = pytest.mark.usefixtures("traced_once")


def chunkflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        "-m", "chunkflow_compile.cli.main", *arguments, PYTHONHASHSEED="1"
    )  # this process has a random one


def of_blocks(number: int, folder: Path) -> str:
    """The model of the example with fewer blocks."""
    (folder / "own.py").write_text(
        "import runpy\n"
        "planned = runpy.run_path('examples/ulysses_dit.py')['planned']\n"
        f"planned.__globals__['BLOCKS'] = {number}\n"
    )
    return f"{folder}/own.py:planned"


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_demo_streams_on_two_ranks_and_writes_the_record(
    lowering: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record, dump = tmp_path / "demo.json", tmp_path / "dump"
    command = ["demo", "--frames", "1", "--steps", "1", "--lowering", lowering, "--json", str(record)]
    command += ["--dump", str(dump)]
    if lowering == "inductor":  # as a user runs it
        done = chunkflow(*command, "--layers", "4")
        code, shown, said = done.returncode, done.stdout, done.stderr
        assert "compile" in said and all(re.match(r" *\d+ s  ", line) for line in said.splitlines()), said
    else:
        rich = demo.DEMO["compute-rich"]
        size = replace(rich.size, layers=2, height=16, width=16)
        monkeypatch.setattr(demo, "DEMO", {"compute-rich": replace(rich, size=size, most=0.6)})
        # which takes a third of the time that a model of diffusers takes to compile
        monkeypatch.setattr(demo, "job_of", partial(job_of, model=f"{HERE / 'two_blocks.py'}:wide"))
        request.getfixturevalue("forked")
        code, (shown, said) = main(command), capsys.readouterr()
    assert code == 0, said
    written = json.loads(record.read_text())
    assert written.keys() == {"schema", "model", "degree", "cfg_parallel", "arms", "regimes"}
    assert (written["schema"], written["degree"]) == (1, 2)
    assert list(written["arms"]) == ["resident", "layerwise", "chunkflow"]
    resident, layerwise, streamed = written["arms"].values()
    keys = {"step_s", "exposed_h2d_s", "collective_s", "weights_device_bytes", "weights_total_bytes"}
    assert resident.keys() == streamed.keys() == keys | {"moved_bytes_per_step", "equal_to_resident"}
    assert streamed["equal_to_resident"] is True
    assert streamed["moved_bytes_per_step"] > 0 == resident["moved_bytes_per_step"]
    assert streamed["weights_device_bytes"] <= layerwise["weights_device_bytes"] <= streamed["weights_total_bytes"]
    assert all(arm["step_s"] > arm["collective_s"] > 0 for arm in (resident, streamed))
    most = demo.DEMO["compute-rich"].most  # what compute-rich shows
    assert streamed["weights_device_bytes"] <= most * streamed["weights_total_bytes"]
    regimes = written["regimes"]
    assert list(regimes) == list(demo.DEMO) and regimes["compute-rich"]["arms"] == written["arms"]
    for regime in regimes.values():
        assert regime["arms"]["chunkflow"]["equal_to_resident"] is True
        assert regime["arms"]["chunkflow"]["moved_bytes_per_step"] > 0
    rows = dict.fromkeys(("outputs +identical +identical", r"copied per step +0 B( +[\d.]+ MiB){2}"), len(regimes))
    assert {row: len(re.findall(f"(?m)^{row}$", shown)) for row in rows} == rows
    links = [float(x) for x in re.findall(r"an emulated link of ([\d.]+) MB/s", " ".join(shown.split()))]
    assert len(links) == len(regimes) and links == sorted(links), "the link that is nearly full is the narrower one"
    assert "\r" not in shown, "the progress bar goes to stderr"
    assert (dump / "chunkflow-demo.png").stat().st_size > 1000 and f"picture: {dump}/chunkflow-demo.png\n" in shown
    program = Path(re.search(r"(?m)^program: (.*)$", shown)[1])
    assert program.is_relative_to(dump)
    assert "prefetch('blocks.1." in program.read_text() and "all_to_all_single" in program.read_text()


def _measured(compute_s: float) -> BenchRecord:
    """Three rounds of a regime whose compute is held to 0.6 s and took ``compute_s``."""
    steps_s = {"resident": (0.7, 0.7, 0.7), "layerwise": (0.84, 0.84, 0.84), "chunkflow": (0.7, 0.721, 0.714)}
    figures = {"exposed_h2d_s": 1234.5, "collective_s": 1234.5, "weights_total_bytes": 1023 << 20}
    record = ArmRecord(
        **figures, weights_device_bytes=1023 << 18, moved_bytes_per_step=1023 << 20, equal_to_resident=True
    )
    arms = {name: replace(record, step_s=sorted(seconds)[1]) for name, seconds in steps_s.items()}
    nothing = ("settings", "predicted", "inflation", "host_s", "copy_rate", "peak_bytes", "difference")
    return BenchRecord(
        record=ComparisonRecord(
            model="wan, 4 blocks, 512 wide, random weights, on an emulated link", degree=2, arms=arms
        ),
        **{key: {} for key in nothing},
        steps_s=steps_s,
        compute_s=dict.fromkeys(steps_s, (compute_s,)),
        host_bounds=(),
        link=None,
        load=LinkLoad(0.7, 0.4, 1.5),
        machine="",
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("busy", [(), ("contention",), ("contention", "compute-rich")])
def test_demo_explains_after_the_figures_and_prints_no_ratio_of_a_busy_machine(
    busy: tuple[str, ...], shared: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = iter(demo.DEMO)
    monkeypatch.setattr(demo, "run_job", lambda job: [])
    monkeypatch.setattr(
        demo, "summarise", lambda job, ranks: _measured(0.9 if next(names) in busy and not shared else 0.6)
    )
    owned = iter([0.5 if shared and name in busy else 0.99 for name in demo.DEMO])
    monkeypatch.setattr(stopwatch, "_owned_shares", lambda threads, seconds: [1.0, next(owned)])
    monkeypatch.setattr(demo, "called", lambda *words: "chunkflow " + " ".join(words))
    assert main(["demo"]) == 0, "also on a busy machine"
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    figures, _, meaning = shown.partition("Two processes, the ranks, ")
    flat = " ".join(meaning.split())
    quiet = len(demo.DEMO) - len(busy)
    assert len(re.findall(r"(?m)^  relative to resident +1\.00 +1\.20 +1\.02$", figures)) == quiet
    assert len(re.findall(r"(?m)^  its middle half +1\.20 to 1\.20 +1\.01 to 1\.02$", figures)) == quiet
    assert flat.count("A step of chunkflow took 1.02 times as long as a resident one, with 25 %") == quiet
    assert flat.count("a step of layerwise took 1.20 times as long.") == quiet
    assert len(re.findall(r"\b1\.\d\d\b", shown)) == 9 * quiet, "there are no others"
    assert ("The machine was busy with other work, so ratios are not shown" in flat) == bool(busy)
    for name in busy:
        cause = "a thread had a processor for 50 % of the time" if shared else "compute overran its fixed duration"
        assert f"{name}: {cause}" in flat


def test_plan_prints_tables_and_writes_the_same_plan_in_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own = tmp_path / "plan.json", of_blocks(2, tmp_path)
    goal = ("--ulysses", "2", "--hardware", "cpu", "--weight-memory", "16MiB", "--weights", "--json", str(out))
    assert main(["plan", own, *goal]) == 0
    shown = capsys.readouterr().out
    plan = Plan.from_json(out.read_text())
    assert plan.device_bytes <= 16 << 20 < plan.moved_bytes and plan.hardware == "cpu"
    assert plan.digest in shown and "Ulysses degree 2 on cpu" in " ".join(shown.split())
    assert re.search(r"(?m)^blocks\.0 .. 1 +12\.0 MiB +12\.0 MiB +30\.0 KiB", shown)
    assert re.search(r"(?m)^blocks\.1\.mlp\.0\.weight +4\.0 MiB +host +hidden: copied from window", shown)
    again = tmp_path / "again.json"
    done = chunkflow("plan", own, *goal[:-1], str(again))
    assert (done.returncode, done.stdout.replace(str(again), str(out))) == (0, shown), done.stderr
    assert again.read_bytes() == out.read_bytes()
    assert all(re.match(r" *\d+ s  ", line) for line in done.stderr.splitlines()), "nothing but progress"


def test_memory_counts_activations_and_weight_memory_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = f"{HERE / 'two_blocks.py'}:long_names", tmp_path / "plan.json"
    sizes = ("--hardware", "cpu", "--min-bytes", "0", "--chunk-bytes", "4096")

    def run(command: str, *arguments: str) -> str:
        assert main([command, model, *sizes, *arguments]) == 0
        return capsys.readouterr().out

    run("plan", "--json", str(out))
    weights = sum(weight.nbytes for weight in Plan.from_json(out.read_text()).weights)
    alone, both = (run("plan", option, f"{weights}B") for option in ("--weight-memory", "--memory"))
    assert f"within {size(weights)} of weights\n" in alone and f"{size(weights)} of weights and activations\n" in both
    found = dict(re.findall(r"(?m)^(weights on|activations|in total on).* ([\d.]+ [KM]?i?B)(?: of .*)?$", both))
    assert 0 < parse_bytes(found["activations"], "") < parse_bytes(found["in total on"], "") <= weights + 52  # rounded
    full = "all of them do not fit"
    assert full in run("simulate", "--memory", f"{weights}B").replace("\n", " ")
    assert full not in run("simulate", "--weight-memory", f"{weights}B").replace("\n", " ")


def test_a_plan_made_without_weights_runs_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_grad: None
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    own, out = tmp_path / "own.py", tmp_path / "plan.json"
    own.write_text(
        "import torch\nfrom helpers import Stack\ndef build():\n    return Stack(5), {'x': torch.randn(4, 8)}\n"
    )
    sizes = ("--min-bytes", "4096", "--chunk-bytes", "4096", "--weight-memory", "40000B")
    assert main(["plan", f"{own}:build", "--hardware", "cpu", *sizes, "--json", str(out)]) == 0
    model, x = Stack(5).eval(), torch.randn(4, 8)
    expected = model(x=x)
    offload(model, min_bytes=4096)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={"plan": str(out), "lowering": "eager"})
    for _ in range(3):
        torch.testing.assert_close(run(x=x), expected)
    (session,) = programs(model)
    assert session.plan == Plan.from_json(out.read_text())
    assert session.measurements[-1].moved_bytes == session.plan.moved_bytes > 0
    assert session.plan.digest in capsys.readouterr().out


def test_simulate_plays_every_policy_and_writes_the_same_record_as_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, own = tmp_path / "simulated.json", of_blocks(4, tmp_path)
    assert main(["simulate", own, "--ulysses", "2", "--hardware", "cpu", "--forwards", "2", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    written = json.loads(out.read_text())
    others = [policy for policy in ONLY_PREDICTED if policy != HOST_YIELD]
    assert list(written["arms"]) == ["resident", "layerwise", "layerwise-barrier", "chunkflow", *others]
    resident, layerwise, barrier, streamed, grouped, *sharded = written["arms"].values()
    split, gathered = sharded
    assert grouped["step_s"] > layerwise["step_s"]
    for arm in sharded:
        assert arm["step_s"] >= resident["step_s"]
        assert arm["moved_bytes_per_step"] == pytest.approx(layerwise["moved_bytes_per_step"], rel=0.01), "with norms"
    assert split["weights_device_bytes"] == pytest.approx(layerwise["weights_device_bytes"], rel=0.02)
    kept = gathered["weights_device_bytes"] - split["weights_device_bytes"]
    assert kept == pytest.approx(gathered["moved_bytes_per_step"] / 2 / 2, rel=1e-6), (
        "half of the blocks; two calls a step"
    )
    assert resident["step_s"] <= streamed["step_s"] <= 1.02 * resident["step_s"] + 1e-6
    assert resident["step_s"] <= layerwise["step_s"] <= barrier["step_s"]
    assert streamed["weights_device_bytes"] < layerwise["weights_device_bytes"] < resident["weights_device_bytes"]
    assert layerwise["moved_bytes_per_step"] == 2 * 48 << 20 and resident["moved_bytes_per_step"] == 0
    assert all(arm["equal_to_resident"] is None for arm in written["arms"].values())
    assert "to resident" in shown and "2 forwards per step" in shown and "chunkflow: " in shown.splitlines()[0]


def test_host_yield_is_predicted_as_layerwise(capsys: pytest.CaptureFixture[str]) -> None:
    """A host that runs ahead has cleared its flag before the collective starts."""
    steps = []
    for policy in (HOST_YIELD, "layerwise"):
        assert main(["simulate", SPLIT, *SIZES, "--policy", policy, "--json", "-"]) == 0
        ((name, arm),) = json.loads(capsys.readouterr().out)["arms"].items()
        assert name == policy and arm["moved_bytes_per_step"] > 0
        steps.append(arm)
    assert steps[0] == steps[1]


def test_a_sweep_of_degrees_says_which_to_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (tmp_path / name for name in ("slow.json", "fast.json"))
    for path, rate in ((slow, 2e6), (fast, 1e12)):
        machine = replace(load_profile("cpu"), name="a machine", collective_bandwidth=rate, node_bandwidth=2e6)
        path.write_text(machine.to_json())
    out, sentences, steps = tmp_path / "sweep.json", [], []
    for path, *nodes in ((slow,), (fast,), (fast, "--nodes", "2")):
        sweep = ("--hardware", str(path), "--sweep-ulysses", "1,2", *nodes, "--json", str(out))
        assert main(["simulate", SPLIT, *SIZES, *sweep]) == 0
        (shown, said), written = capsys.readouterr(), json.loads(out.read_text())
        assert written["recommended"] in shown and "in collectives" in shown and "note" not in said
        sentences.append(written["recommended"])
        steps.append({d["degree"]: d["step_s"] for d in written["degrees"]})
    first = "Take degree 1: it has the shortest step, and each rank does 100 % of what it does at degree 1."
    assert sentences[0] == first
    assert sentences[1].startswith("Take degree 2: it has the shortest step, and each rank does ")
    assert list(steps[0]) == [1, 2] and steps[0][1] == steps[1][1]
    assert steps[1][2] < steps[2][2] > steps[2][1] == steps[1][1]  # between nodes the link is the slow one
    assert main(["simulate", ULYSSES, *SIZES, "--sweep-ulysses", "1,2"]) == 0, "it does not split its tokens"
    note = "note: each rank computes as much at degree 2 as at degree 1, so these steps are not of one problem: let "
    assert note in capsys.readouterr().err


def test_cfg_parallelism_halves_the_calls_and_adds_an_exchange(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, records, plans = load_profile("cpu"), [], []
    for number in ("1", "2"):
        ranks = ("--cfg-parallel", number, "--forwards", "2")
        assert main(["simulate", MODEL, "--hardware", "cpu", "--policy", "resident", *ranks, "--json", "-"]) == 0
        records.append(json.loads(capsys.readouterr().out))
        assert main(["plan", MODEL, *SIZES, *ranks, "--json", str(tmp_path / "plan.json")]) == 0
        shown = capsys.readouterr().out
        plans.append((tmp_path / "plan.json").read_bytes())
    assert "; 2 ranks: CFG parallel 2 x Ulysses 1 on cpu, 1 forward per step" in " ".join(shown.split())
    assert plans[0] != plans[1]
    both, one = records
    assert (both["degree"], both["cfg_parallel"], one["degree"], one["cfg_parallel"]) == (1, 1, 1, 2)
    sent = 4 * 8 * 4  # the output of the stack, in float32
    took = machine.collective_latency_s + sent / machine.collective_bandwidth
    before, after = both["arms"]["resident"], one["arms"]["resident"]
    assert (before["collective_s"], after["collective_s"]) == (0, pytest.approx(took, abs=1e-8))
    assert after["step_s"] == pytest.approx(before["step_s"] / 2 + took, abs=1e-8)


@pytest.mark.long
def test_the_curve_is_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curve.png"
    slow = tmp_path / "slow.json"
    slow.write_text(replace(load_profile("cpu"), h2d_bandwidth=2e8).to_json())
    sizes = ("--ulysses", "2", "--hardware", str(slow), "--chunk-bytes", "1MiB")
    assert main(["plan", OWN, *sizes, "--curve", str(picture)]) == 0
    shown = capsys.readouterr().out
    ratios = [float(r) for r in re.findall(r"(?m)^[0-9.]+ MiB +[0-9.]+ ms +([0-9.]+) *$", shown)]
    assert 10 < len(ratios) < 40 and ratios == sorted(ratios, reverse=True) and ratios[0] > 1.5 and ratios[-1] == 1.0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_exchanges_in_groups_are_planned_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of groups, and why it is that one; each region of a group in the listing."""
    sizes = ("--ulysses", "2", "--hardware", "cpu", "--min-bytes", "0", "--chunk-bytes", "4096", "--slowdown", "1.5")

    def run(command: str, groups: str, *arguments: str) -> str:
        assert main([command, ULYSSES, *sizes, "--exchange-groups", groups, *arguments]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "exchanges" not in run("plan", "no")
    assert "exchanges 2 attentions in 2 groups of heads each regions" in run("plan", "2")
    assert "exchanges whole: 2 groups are predicted to take " in run("plan", "auto")
    assert "; exchanges: 2 attentions in 2 groups of heads each" in run("simulate", "2")
    assert run("dump", "2", "--stage", "regions", "--full").count(", one of 2 groups of heads") == 4
    assert "; exchanges: 2 attentions in 2 groups" in run("timeline", "2", "--out", str(tmp_path / "a.json"))


def test_hoisted_weights_are_planned_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their bytes, the table and its share of a forward; kept in the cache; other policies have the whole model."""
    model, file = f"{HERE / 'two_blocks.py'}:timed", tmp_path / "plan.json"
    sizes = ("--hardware", str(HERE / "slow_compute.json"), "--min-bytes", "64", "--chunk-bytes", "4096")

    def run(command: str, *arguments: str) -> str:
        assert main([command, model, *arguments, *sizes]) == 0
        return capsys.readouterr().out

    whole = run("plan", "--weight-memory", "24KB", "--json", str(file))
    assert "\nhoisted" not in whole
    before = Plan.from_json(file.read_text())
    shown = run("plan", "--weight-memory", "24KB", "--hoist", "--json", str(file))
    assert re.search(r"(?m)^hoisted +6 weights, 17.6 KiB, by 1 small input alone; 2 values, 512 B per row$", shown), (
        shown
    )
    assert re.search(r"(?m)^rows +2 at most, 1.0 KiB on the GPU$", shown), shown
    assert re.search(r"(?m)^computing rows +[\d.]+ ms, once$", shown), shown
    hoisted = Plan.from_json(file.read_text())
    assert 0 < hoisted.device_bytes <= 24_000 - 1024
    assert hoisted.moved_bytes < before.moved_bytes
    assert run("plan", "--weight-memory", "24KB", "--hoist", "auto") == run(
        "plan", "--weight-memory", "24KB", "--hoist"
    )
    compared = run("simulate", "--weight-memory", "24KB", "--hoist")
    assert "hoisted, but for policy resident, layerwise" in compared.replace("\n", " ")
    for command, argument, said in (
        ("plan", "--curve", "--hoist auto decides for one budget"),
        ("plan", "--regional", "leave one out"),
        ("simulate", "--policy=resident", "--hoist with policy resident"),
    ):
        hoist = ("--hoist", "auto") if argument == "--curve" else ("--hoist",)
        assert main([command, model, argument, *hoist, *sizes]) != 0
        assert said in capsys.readouterr().err.replace("\n", " ")
    assert main(["plan", MODEL, "--hoist", *SIZES]) != 0
    assert "no weight is read by products of small inputs alone" in capsys.readouterr().err.replace("\n", " ")


def test_the_curve_of_a_hoisted_model_counts_rows_and_the_preamble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its points can be planned, and takes about as long; below the first there is no plan."""
    model, file = f"{HERE / 'two_blocks.py'}:timed", tmp_path / "curve.json"
    sizes = ("--hardware", str(HERE / "fast_compute.json"), "--min-bytes", "64", "--chunk-bytes", "1024")
    assert main(["plan", model, "--curve", "--hoist", "--json", str(file), *sizes]) == 0
    assert re.search(r"(?m)^hoisted: 6 weights, 17.6 KiB, by 1 small input alone", capsys.readouterr().out)
    points = json.loads(file.read_text())["hoisted"]
    for point in points[::3]:
        within = ("--weight-memory", f"{point['memory']}B")
        assert main(["plan", model, "--hoist", *within, "--json", str(file), *sizes]) == 0
        predicted = Plan.from_json(file.read_text()).predicted
        assert predicted is not None and predicted.step_s <= 1.05 * point["step_s"]
    assert main(["plan", model, "--hoist", "--weight-memory", f"{points[0]['memory'] - 1}B", *sizes]) == 2
    assert "is too little" in capsys.readouterr().err


def test_both_halves_of_a_hoisted_model_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its step by default; the preamble on request, and as the story of a hoisted weight."""
    sizes = ("--hardware", str(HERE / "slow_compute.json"), "--min-bytes", "64", "--weight-memory", "24KB")

    def run(command: str, *arguments: str, code: int = 0) -> str:
        assert main([command, f"{HERE / 'two_blocks.py'}:timed", *arguments, *sizes]) == code
        found = capsys.readouterr()
        return (found.err if code else found.out).replace("\n", " ")

    listings = [run("dump", "--full", "--hoist", *half) for half in ((), ("--preamble",))]
    copied = [sorted(set(re.findall(r"prefetch\('([a-z]+)\.", listing))) for listing in listings]
    assert copied == [["projections"], ["embed", "modulations"]]
    assert "--preamble: nothing is hoisted" in run("dump", "--preamble", code=2)
    for weight, half, reader in (
        ("modulations.1.weight", "the preamble", "modulations.1"),
        ("projections.1.weight", "main", "projections.1"),
    ):
        said = run("why", weight, "--hoist")
        assert f"{half}, hoisted: 6 weights, 17.6 KiB" in said and f"({reader}: " in said, said
        assert ("what would change it" in said) == (half == "main")
    picture = tmp_path / "step.json"
    said = run("timeline", "--hoist", "--out", str(picture))
    assert "without 17.6 KiB of hoisted weights: " in said and "of 25.9 KiB of weights on the GPU" in said
    drawn = picture.read_text()
    assert "projections.1.weight" in drawn and "modulations.1.weight" not in drawn


def test_packed_weights_are_planned_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both curves; how many weights are packed, and which; what they take on the device."""
    file = tmp_path / "found.json"
    model, sizes = f"{HERE / 'two_blocks.py'}:packable", ("--min-bytes", "64KiB", "--chunk-bytes", "64KiB")

    def run(command: str, *arguments: str) -> str:
        assert main([command, model, *arguments, *sizes]) == 0
        return capsys.readouterr().out

    shown = run("plan", "--pack", "--weight-memory", "1280KiB", "--weights", "--json", str(file))
    packed = Plan.from_json(file.read_text())
    assert re.search(r"(?m)^packed +8 of 12 weights, 2.0 MiB in 1.5 MiB, 256.0 KiB of values at a time$", shown)
    assert shown.count("host, packed") + shown.count("device, packed") == 8
    assert packed.device_bytes <= (1280 - 256) << 10, "values count against the budget"
    run("plan", "--weight-memory", "1280KiB", "--json", str(file))
    raw = Plan.from_json(file.read_text())
    assert packed.predicted.step_s < 0.8 * raw.predicted.step_s and 0 < packed.moved_bytes < raw.moved_bytes
    run("plan", "--pack", "auto", "--weight-memory", "1280KiB", "--json", str(file))
    assert Plan.from_json(file.read_text()) == packed, "the link is the bound"
    shown = run("plan", "--curve", str(tmp_path / "curve.png"), "--pack", "--group-bytes", "1", "--json", str(file))
    curve = json.loads(file.read_text())
    assert shown.startswith("packed: 8 of 12", shown.index("\n\n") + 2)
    assert curve["packed"][-1]["step_s"] > curve["points"][-1]["step_s"], "unpacking takes time"
    assert min(p["step_s"] for p in curve["packed"] if p["memory"] < 1600 << 10) < min(
        p["step_s"] for p in curve["points"] if p["memory"] < 1600 << 10
    )
    assert "bfloat16[512, 256], 256.0 KiB" in run("why", "blocks.1.up.weight", "--pack", "--weight-memory", "1280KiB")
    shown = run("simulate", "--pack", "--json", str(file))
    assert "packed, but for policy resident, group-offload: 8 of 12 weights" in " ".join(shown.split())
    arms = json.loads(file.read_text())["arms"]
    assert not set(SHARDED) & set(arms), "one rank has no others to split its weights with"
    assert arms["resident"]["weights_total_bytes"] > 1.3 * arms["chunkflow"]["weights_total_bytes"]
    assert "unpack_2(" in run("dump", "--pack", "--stage", "regions")


@pytest.mark.long
def test_weights_on_the_devices_of_ranks_are_planned_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, slow = tmp_path / "found.json", tmp_path / "slow.json"
    machine = replace(load_profile("h100-nvlink"), h2d_bandwidth=2e6, peer_bandwidth=1e9, launch_s=1e-4, chunk_s=0.0)
    slow.write_text(machine.to_json())
    sizes = ("--min-bytes", "1KiB", "--chunk-bytes", "4KiB", "--hardware", str(slow), "--group-bytes", "1")

    def run(command: str, *arguments: str) -> str:
        assert main([command, ULYSSES, *arguments, *sizes]) == 0
        return capsys.readouterr().out

    two, within = ("--ulysses", "2"), ("--weight-memory", "30KiB")
    shown = run("plan", *two, *within, "--peers", "--weights", "--json", str(file))
    plan = Plan.from_json(file.read_text())
    assert {w.home for w in plan.streamed} == {"peers"} and plan.device_bytes <= 30 << 10
    assert re.search(r"in pieces on all GPUs +\d+ of \d+ weights, [\d.]+ KiB in pieces on 2 GPUs, [\d.]+ KiB", shown)
    assert shown.count("  peers   ") == len(plan.streamed) and "pulled from other ranks" in shown
    run("plan", *two, *within, "--json", str(file))
    host = Plan.from_json(file.read_text())
    assert '"peers"' not in file.read_text() and plan.predicted.step_s < host.predicted.step_s
    run("plan", *two, *within, "--peers", "auto", "--json", str(file))
    assert Plan.from_json(file.read_text()).predicted.step_s <= plan.predicted.step_s * 1.001
    assert main(["plan", ULYSSES, *within, "--peers", "auto", *sizes]) == 0
    assert "no weight is on the devices of other ranks: there is one rank only" in capsys.readouterr().err
    name = plan.streamed[0].name
    assert "peers" in run("why", name, *two, *within, "--peers")
    shown = " ".join(run("simulate", *two, "--peers").split())
    assert "in pieces, but for policy resident, group-offload, distributed-layerwise, fsdp: " in shown
    run("simulate", *within, "--peers", "--sweep-ulysses", "1,2", "--json", str(file))
    assert [d["degree"] for d in json.loads(file.read_text())["degrees"]] == [1, 2]
    shown = run("plan", *two, "--curve", "--peers", "--json", str(file))
    assert "in pieces: " in shown and json.loads(file.read_text())["in pieces"]
    assert f"{name}, in pieces" in run("dump", *two, "--peers", "--stage", "regions")
    assert "peers, " in run("dump", *two, *within, "--peers", "--annotate", "--stage", "rewritten")
    out = tmp_path / "trace.json"
    assert "copied per forward" in run("timeline", *two, *within, "--peers", "--out", str(out))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    page = capsys.readouterr().out
    assert "exit codes:" in page
    for command in COMMANDS:
        assert f"\n  {command}" in page or f"\n    {command}" in page
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert re.search(rf"examples?:\s+(chunkflow \w+ .*\s+)*chunkflow {command}", shown), command
        assert "--debug" in shown
    assert main([]) == 0 and capsys.readouterr().out == page


def test_only_the_imports_of_a_command_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao")
    with quiet_imports():
        logger.warning("of an import")
        logger.error("of a failure")
    logger.warning("of a user's call")
    assert [r.getMessage() for r in caplog.records] == ["of a failure", "of a user's call"]


AT_ONCE = """
import contextlib, sys
from chunkflow_compile.cli.main import main
from chunkflow_compile.cli.parsers import COMMANDS
for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
    with contextlib.suppress(SystemExit):
        main(arguments)
print("torch" in sys.modules, file=sys.stderr)
main(["doctor"])
print("torch" in sys.modules, file=sys.stderr)
"""


def test_help_and_doctor_import_no_torch() -> None:
    """They answer in a tenth of the time that its import takes.  A build for GPUs is asked for them."""
    done = run_python("-c", AT_ONCE)
    assert done.stderr.split() == ["False", str(bool(torch.version.cuda or torch.version.hip))]
    (found,) = re.findall(r"(?m)^torch +(\S+)", done.stdout)
    assert found == torch.__version__
    assert bool(re.search(r"(?m)^gloo +available +ok", done.stdout)) == dist.is_gloo_available()
    assert bool(re.search(r"(?m)^NCCL +available +ok", done.stdout)) == dist.is_nccl_available()


def test_a_model_that_does_not_trace_leaves_the_traceback_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE / 'two_blocks.py'}:untraceable"]) == 2
    error = capsys.readouterr().err
    path = Path(error.partition("full traceback: ")[2].rstrip().rstrip(")"))
    try:
        assert "Traceback" in path.read_text() and "two_blocks.py" in path.read_text()
    finally:
        path.unlink()
    with pytest.raises(ChunkflowError, match="cannot be traced"):
        main(["plan", f"{HERE / 'two_blocks.py'}:untraceable", "--debug"])


def test_the_stages_before_an_unsafe_program_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from chunkflow_compile.passes import pass_pipeline

    def refuse(*_: Any) -> None:
        raise FindingError("The program is not safe to run:\n  for the test")

    monkeypatch.setattr(pass_pipeline, "verify", refuse)
    assert main(["dump", MODEL, *SIZES, "--out", str(tmp_path)]) == 1, "a finding, not bad use"
    shown = capsys.readouterr()
    assert "not safe to run" in shown.err and "03_rewritten.py" in shown.out
    assert (tmp_path / "03_rewritten.py").exists() and not (tmp_path / "04_verified.py").exists()


def test_json_on_stdout_is_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", MODEL, *SIZES, "--json", "-"]) == 0
    text = capsys.readouterr().out
    plan.write_text(text)
    assert Plan.from_json(text).to_json() == text
    for arguments, code in (
        (["dump", MODEL, *SIZES, "--json", "-"], 0),
        (["why", MODEL, "head.weight", *SIZES, "--json", "-"], 0),
        (["doctor", "--json", "-"], None),
        (["simulate", MODEL, "--hardware", "cpu", "--json", "-"], 0),
    ):
        result = main(arguments)
        assert code is None or result == code
        assert json.loads(capsys.readouterr().out)


def test_a_plan_has_the_weights_on_the_drive_that_offload_puts_there() -> None:
    """The order of the model, in which they are chosen, is not that of the step."""
    model = backwards()[0]
    half, parser = sum(p.nbytes for p in model.parameters()) // 2, argparse.ArgumentParser()
    add_model(parser, or_blocks=True)
    sizes = ("--hardware", "cpu", "--min-bytes", "1024", "--chunk-bytes", "4096")
    arguments = parser.parse_args([f"{HERE / 'two_blocks.py'}:backwards", *sizes, "--host-memory", f"{half}B"])
    planned = planning_arguments.load_target(arguments, Progress(1)).problem.weights
    offload(model, "cpu", min_bytes=1024, host_memory=half)
    store = next(buffer.store for w in model.parameters() if (buffer := buffer_of(w)) is not None)
    buffers = {buffer.name: buffer for buffer in store.buffers}  # with buffers
    drive = {name for name, buffer in buffers.items() if buffer.source.file}
    assert {w.name for w in planned if w.source.file} == drive and 0.3 < len(drive) / len(buffers) < 0.7
    by_use = sorted((w for w in planned if w.name in buffers and w.uses), key=lambda w: (w.uses[0], w.name))
    assert for_the_drive([(w.name, w.nbytes) for w in by_use], half) != drive
