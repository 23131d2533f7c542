"""A step as lanes, picture and trace: each shows what the plan says, for any plan."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE
from helpers import with_goal
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CHUNK, MACHINE, blocks_problem, machines, problem, small_problems, weight

from chunkflow_compile.cli.main import main
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.names import POLICIES
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.lanes import Lanes, around, lanes_of
from chunkflow_compile.report.perfetto import TRACE_STEPS, trace_events
from chunkflow_compile.report.timeline_picture import draw_timeline

INSTANT = 1e-7


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Plans of small problems: every policy, roomy and tight, with and without joins."""
    found, machine = draw(small_problems()), draw(machines())
    policy = draw(st.sampled_from(POLICIES))
    joins = draw(st.sampled_from([(), (len(found.regions),), (1, len(found.regions))]))
    goal: dict[str, Any] = {"policy": policy, "joins": joins}
    if policy == "chunkflow":
        goal["memory"] = least_memory(found, machine, CHUNK) + draw(st.integers(0, 4)) * CHUNK
    elif policy == "layerwise-prefix":
        goal["memory"] = 2 * found.total_bytes
    return found, place(found, machine, **with_goal(chunk_bytes=CHUNK, **goal))


@settings(max_examples=150)
@given(plans())
def test_lanes_show_what_the_plan_predicts(made: tuple[Problem, Plan]) -> None:
    found, plan = made
    lanes, predicted = lanes_of(plan), plan.predicted
    assert predicted is not None
    assert [b.name for b in lanes.lane("compute")] == [r.name for r in found.regions]
    assert sum(b.end - b.start for b in lanes.lane("compute")) == pytest.approx(predicted.compute_s, abs=INSTANT)
    assert sum(b.end - b.start for b in lanes.lane("copy")) == pytest.approx(predicted.copy_s, abs=INSTANT)
    assert sum(b.end - b.start for b in lanes.lane("collective")) == pytest.approx(predicted.collective_s, abs=INSTANT)
    assert sum(s.end - s.start for s in lanes.stalls) == pytest.approx(predicted.exposed_s, abs=INSTANT)
    assert set(lanes.blocks) == {r.block for r in found.regions}
    check_slots(lanes, plan)
    check_trace(json.loads(trace_events(lanes, "title")), lanes)


def check_slots(lanes: Lanes, plan: Plan) -> None:
    """No two weights share bytes of the arena at a time."""
    boxes = [(s, a, b) for s in lanes.slots for a, b in around(s.start, s.end, lanes.step_s)]
    for i, (one, a, b) in enumerate(boxes):
        for other, c, d in boxes[i + 1 :]:
            bytes_shared = min(one.stop, other.stop) > max(one.begin, other.begin)
            if one.weight != other.weight and bytes_shared:
                assert min(b, d) - max(a, c) <= INSTANT, (one, other)
    levels = [level for _, level in lanes.occupancy()]
    assert min(levels) >= 0
    held = [sum(s.stop - s.begin for s, a, b in boxes if a <= t < b - INSTANT) for t, _ in lanes.occupancy()]
    assert max(held, default=0) <= plan.arena_bytes


def check_trace(trace: dict[str, Any], lanes: Lanes) -> None:
    """Slices of a thread do not overlap, lie within the steps shown, and add up to all work of a step."""
    whole = TRACE_STEPS * lanes.step_s * 1e6
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for thread in {e["tid"] for e in slices}:
        mine = sorted((e for e in slices if e["tid"] == thread), key=lambda e: e["ts"])
        assert all(e["dur"] >= 0 and e["ts"] >= -0.01 and e["ts"] + e["dur"] <= whole + 0.01 for e in mine)
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002, (before, after)
    for lane in ("compute", "collective", "copy"):
        total = sum(e["dur"] for e in slices if e["cat"] == lane)
        expected = TRACE_STEPS * 1e6 * sum(b.end - b.start for b in lanes.lane(lane))  # type: ignore[arg-type]
        # Work of the step before that reaches into the first step is cut off.
        assert expected - 1e6 * sum(-b.start for b in lanes.bars if b.lane == lane and b.start < 0) <= total + 0.1
        assert total <= expected + 0.1
    assert [e["ts"] for e in slices] == sorted(e["ts"] for e in slices)
    counters = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert counters and min(counters) >= 0


def test_the_svg_shows_every_region_collective_and_weight_of_a_block(tmp_path: Path) -> None:
    """Of four, planned with a stall, a partly resident weight, and copies that wrap around the step."""
    found = blocks_problem(4)
    plan = place(found, MACHINE, Goal(memory=12 * CHUNK), chunk_bytes=CHUNK)
    lanes = lanes_of(plan)
    picture = tmp_path / "step.svg"
    draw_timeline(lanes, "four blocks", picture, block="blocks.2")
    text = texts(picture)
    drawn = set(re.findall(r'id="((?:compute|collective|copy|slot|stall):[^"]*)"', picture.read_text()))
    regions = [r for r in found.regions if r.block == "blocks.2"]
    assert {f"compute:{r.name}" for r in regions} <= drawn
    assert all(any(r.name in t for t in text) for r in regions)
    assert sum(d.startswith("collective:") for d in drawn) >= 4 and text.count("c") >= 4
    streamed = {w.name for w in plan.streamed}
    for name in (name for r in regions for name in r.weights):
        assert (name in text and f"slot:{name}" in drawn) == (name in streamed), name
    assert "blocks.2" in text
    again = tmp_path / "again.svg"
    draw_timeline(lanes, "four blocks", again, block="blocks.2")
    assert again.read_bytes() == picture.read_bytes()
    with pytest.raises(ChunkflowError, match=r"no block 'blocks.7'; did you mean 'blocks\.\d'"):
        draw_timeline(lanes, "title", again, block="blocks.7")


def texts(picture: Path) -> list[str]:
    """The texts of an SVG; each line of a label is one text."""
    root = ElementTree.fromstring(picture.read_text())
    return ["".join(e.itertext()).strip() for e in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_stall_is_drawn_where_the_region_waits() -> None:
    found = problem([2, 1, 2], [weight(0, 8 * CHUNK, (1,)), weight(1, CHUNK, (2,))])
    plan = place(found, MACHINE, Goal(policy="layerwise"), chunk_bytes=CHUNK)
    lanes = lanes_of(plan)
    waits = {s.before: s for s in lanes.stalls}
    slow = next(w for w in plan.weights if (w.slack_s or 0.0) < 0)
    stall = waits[f"region_{slow.first_use}"]
    assert stall.end - stall.start == pytest.approx(-(slow.slack_s or 0.0))
    assert stall.weights == (slow.name,) and stall.why == slow.why
    region = next(b for b in lanes.lane("compute") if b.name == stall.before)
    assert region.start == pytest.approx(stall.end)


MODEL = f"{HERE / 'two_blocks.py'}:ulysses"
SIZES = ("--hardware", "cpu", "--chunk-bytes", "4096", "--slowdown", "2")


def test_the_command_draws_models_and_plans_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (*SIZES, "--ulysses", "2", "--min-bytes", "0")
    plan = tmp_path / "plan.json"
    assert main(["plan", MODEL, *sizes, "--json", str(plan)]) == 0
    picture, drawing, of_plan, of_model = (tmp_path / name for name in ("a.png", "a.svg", "a.json", "b.json"))
    for out in (picture, drawing, of_plan):
        assert main(["timeline", str(plan), "--out", str(out)]) == 0
    assert main(["timeline", MODEL, *sizes, "--out", str(of_model)]) == 0
    assert " per forward; compute waits" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    first, second = (json.loads(path.read_text()) for path in (of_plan, of_model))
    assert first["traceEvents"][1:] == second["traceEvents"][1:]
    check_trace(first, lanes_of(Plan.from_json(plan.read_text())))
    assert {"qkv", "out", "all-to-all", "collectives"} <= set(texts(drawing))
    (title,) = (text for text in texts(drawing) if "weights on the GPU" in text)
    assert title.startswith(f"{MODEL}; policy chunkflow on "), "of the plan's file, too"


def test_one_gpu_has_no_lane_of_collectives(tmp_path: Path) -> None:
    drawing = tmp_path / "one.svg"
    assert main(["timeline", f"{HERE / 'two_blocks.py'}:stack", *SIZES, "--min-bytes", "0", "--out", str(drawing)]) == 0
    shown = texts(drawing)
    assert {"compute", "copies"} <= set(shown) and not any("collective" in text for text in shown)


def test_a_cycle_is_drawn_and_a_weight_of_it_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks are its calls; what lies outside them is left out."""
    sizes = (*SIZES, "--min-bytes", "4096", "--regional")
    out = tmp_path / "cycle.json"
    assert main(["timeline", MODEL, *sizes, "--out", str(out)]) == 0
    names = {e.get("name") for e in json.loads(out.read_text())["traceEvents"]}
    assert any("blocks.1" in str(name) for name in names) and not any("embed" in str(name) for name in names)
    capsys.readouterr()
    assert main(["why", MODEL, "blocks.1.qkv", *sizes]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines are filled, and MODEL is a path of any length
    for said in ("its blocks compiled one by one", "blocks.1.qkv.weight", "what would change it"):
        assert said in shown


def test_regions_are_called_by_their_weights_or_by_what_they_compute() -> None:
    plan = place(blocks_problem(1), MACHINE, chunk_bytes=CHUNK)
    assert [r.block for r in plan.regions] == ["blocks.0"] * 4
    assert [r.what for r in plan.regions] == ["w0,w1,w2", "elementwise", "w3,w4", "w5,w6"]
