"""The step: compute awaits the copies that it needs and no others, and the nodes of a program carry all events."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CHUNK, problem, small_problems, weight
from torch.fx import Graph

from chunkflow_compile.passes.forms import CallEvents, joined, reads_ahead, without_reads
from chunkflow_compile.passes.ops import folded, transfer_of, unfolded, write
from chunkflow_compile.passes.placement.barriers import barriers
from chunkflow_compile.passes.placement.policies import next_block_barriers
from chunkflow_compile.passes.plan import Barrier, Windows
from chunkflow_compile.passes.problem import Problem, Source
from chunkflow_compile.passes.step import (
    Copy,
    Evict,
    Finish,
    Op,
    Record,
    Run,
    Scheduler,
    Start,
    Step,
    Wait,
    reads,
    transfers,
)

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Drawn:
    """A problem whose weights are in two lanes, legal windows, barriers and joins."""

    problem: Problem
    windows: dict[str, Windows]
    barriers: tuple[Barrier, ...]
    joins: tuple[int, ...]

    def step(self, joins: tuple[int, ...] = ()) -> Step:
        return Scheduler(self.problem, CHUNK).step(self.windows, self.barriers, joins, kept=True)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    found = draw(small_problems(9))
    rng = random.Random(draw(st.integers(0, 2**16)))
    found = replace(found, weights=tuple(replace(w, source=Source(ranks=rng.choice([0, 0, 2]))) for w in found.weights))
    count, windows = len(found.regions), dict[str, Windows]()
    for each in found.weights:
        first, last = each.uses[0], each.uses[-1]
        around = [w % count for w in range(last + 1 - count, first + 1)]
        if rng.random() < 0.9:
            windows[each.name] = tuple(rng.choice([None, *around, *around]) for _ in range(-(-each.nbytes // CHUNK)))
    moved = [w for w in found.weights if any(k is not None for k in windows.get(w.name, ()))]
    lanes = [[w.name for w in moved if w.source.sharded == pulls] for pulls in (False, True)]
    kind = draw(st.sampled_from(["", "newest", "next block"]))
    chosen: tuple[Barrier, ...] = ()
    if kind == "newest":
        chosen = barriers(found, Scheduler(found, CHUNK).step(windows), lanes)
    elif kind:
        chosen = next_block_barriers(found, moved)
    return Drawn(found, windows, chosen, draw(st.sampled_from([(count,), (1, count)])))


@dataclass
class Lanes:
    """Steps that are played op by op: the number of copies issued in each lane, and how many of them compute has awaited.

    ``arrives``: weight and step that a copy serves -> its lane and number, of the newest one.  ``moved``: the weights of the
    copies.  ``marks``: event -> the copy that it marks.
    """

    issued: dict[str, int]
    awaited: dict[str, int]
    arrives: dict[tuple[str, int], tuple[str, int]]
    moved: dict[tuple[str, int], str]
    marks: dict[int, tuple[str, int]]

    def play(self, step: Step, number: int) -> Iterator[tuple[Op, int]]:
        """Each op with the number of the step, when it has been issued."""
        for op in step:
            if isinstance(op, Copy):
                self.issued[op.stream] += 1
                copy = op.stream, self.issued[op.stream]
                self.arrives[op.weight, number + op.next_step], self.moved[copy] = copy, op.weight
            elif isinstance(op, Record) and op.stream != "compute":
                self.marks[op.event] = op.stream, self.issued[op.stream]
            elif isinstance(op, Wait) and op.stream == "compute" and op.event in self.marks:
                lane, newest = self.marks[op.event]
                self.awaited[lane] = max(self.awaited[lane], newest)
            yield op, number


def played(step: Step, steps: int) -> Iterator[tuple[Op, int, Lanes]]:
    lanes = Lanes({"copy": 0, "pull": 0}, {"copy": 0, "pull": 0}, {}, {}, {})
    for number in range(steps):
        yield from ((op, at, lanes) for op, at in lanes.play(step, number))


@settings(max_examples=150, deadline=None)
@given(drawn())
def test_a_region_has_awaited_every_copy_of_its_weights_and_no_other(found: Drawn) -> None:
    uses = {w.name: w.uses[0] for w in found.problem.weights}
    seen = 0
    for op, number, lanes in played(found.step(), 3):
        if isinstance(op, Run):
            for name in (name for name, first in uses.items() if first == op.region):
                lane, newest = lanes.arrives.get((name, number), ("copy", 0))
                assert lanes.awaited[lane] >= newest
                seen += newest > 0
        elif isinstance(op, Wait) and op.weights and op.event in lanes.marks:
            assert lanes.moved[lanes.marks[op.event]] in op.weights
    assert seen or not any(isinstance(op, Copy) for op in found.step())


@settings(max_examples=100, deadline=None)
@given(drawn())
def test_a_join_awaits_every_copy_issued_so_far(found: Drawn) -> None:
    plain = found.step()
    count = len(found.problem.regions)
    assert found.step((count,)) == joined(plain) and transfers(joined(plain)) == transfers(plain)
    copies = 0
    for op, number, lanes in played(found.step(found.joins), 2):
        if isinstance(op, Run) and op.region in found.joins and number:
            opened = sum(isinstance(o, Copy) and o.window == op.region for o in plain)
            assert sum(lanes.issued.values()) - sum(lanes.awaited.values()) <= opened
        copies += isinstance(op, Copy)
    assert lanes.awaited == lanes.issued and sum(lanes.issued.values()) == copies


@settings(max_examples=100, deadline=None)
@given(drawn())
def test_each_window_is_opened_once_and_each_lane_waits_for_that(found: Drawn) -> None:
    step = found.step()
    marks = [(at, op.event) for at, op in enumerate(step) if isinstance(op, Record) and op.stream == "compute"]
    windows = {op.window for op in step if isinstance(op, Copy)}
    assert len(marks) == len(windows)
    for at, event in marks:
        window = next(op.window for op in step[at:] if isinstance(op, Copy))
        copies = [op for op in step if isinstance(op, Copy) and op.window == window]
        waits = [op.stream for op in step if isinstance(op, Wait) and op.event == event]
        assert waits == list(dict.fromkeys(op.stream for op in copies))
        for lane in waits:
            first = next(op for op in copies if op.stream == lane)
            assert step[step.index(first) - 1] == Wait(lane, event)


@settings(max_examples=100, deadline=None)
@given(drawn())
def test_nodes_carry_all_transfer_ops_with_their_events(found: Drawn) -> None:
    step = found.step()
    named = list(dict.fromkeys(op.event for op in step if isinstance(op, Record | Wait)))
    assert named == list(range(len(named))), "numbered in the order in which they are named"
    check_nodes(step)
    check_nodes(in_files(found).step())


def check_nodes(step: Step) -> None:
    before, after = transfers(step)
    opened, again = set[int](), list[Op]()
    for ops in (*before.values(), *after.values()):
        write(graph := Graph(), ops)
        found_ops = [op for node in graph.nodes if (op := transfer_of(node)) is not None]
        assert found_ops == list(folded(ops)) and len(found_ops) == len(graph.nodes)
        mine = [op for transfer in found_ops for op in unfolded(transfer, opened)]
        assert mine == list(ops)
        again += mine
    assert len(again) == sum(not isinstance(op, Run | Start | Finish) for op in step)


def in_files(found: Drawn) -> Drawn:
    """The same with all weights in files that are not pulled."""
    weights = tuple(replace(w, source=replace(w.source, file=True)) for w in found.problem.weights)
    return replace(found, problem=replace(found.problem, weights=weights))


@settings(max_examples=100, deadline=None)
@given(drawn())
def test_reads_add_to_a_step_and_change_nothing_of_it(found: Drawn) -> None:
    """One for each copy that is not a pull, in the order of the copies; each waits for the copy before it in the list."""
    plain, step = found.step(), in_files(found).step()
    bare = [replace(op, ring=None) if isinstance(op, Copy) else op for op in without_reads(step, CallEvents.of(step))]
    marks = {op.event for op in plain if isinstance(op, Record | Wait)}
    assert [op for op in bare if not isinstance(op, Record) or op.event in marks] == list(plain)
    copied = [op for op in step if isinstance(op, Copy) and op.stream == "copy"]
    again = [*reads(reads_ahead(step, 0)), *reads(step)][: len(copied)]
    assert [(op.weight, op.first, op.end, op.ring) for op in again] == [
        (op.weight, op.first, op.end, op.ring) for op in copied
    ]
    for at, op in enumerate(step):
        if isinstance(op, Copy) and op.stream == "copy":
            wait = step[at - 1]
            assert isinstance(wait, Wait) and wait.event in CallEvents.of(step).reads
        elif isinstance(op, Wait) and op.stream == "read":
            assert step[at - 1] == Record("copy", op.event) and isinstance(step[at - 2], Copy)


def test_a_small_step() -> None:
    """Two lanes, a barrier at which one weight has no copy that compute has not awaited, and a resident chunk."""
    weights = [
        weight(0, 2 * CHUNK, (0,)),
        weight(1, CHUNK, (1,)),
        replace(weight(2, CHUNK, (1,)), source=Source(ranks=2)),
    ]
    found = problem([1, 1], [*weights, weight(3, CHUNK, (0,))], [(1, 1)])
    windows: dict[str, Windows] = {"w0": (1, 1), "w1": (0,), "w2": (1,), "w3": (None,)}
    step = Scheduler(found, CHUNK).step(
        windows, [Barrier(collective="c0", weights=("w1", "w2", "w0"))], (2,), kept=True
    )
    assert step == (
        Record("compute", 0),
        Wait("copy", 0),
        Copy("copy", "w1", 0, 1, 0),
        Record("copy", 1),
        Wait("compute", 2, ("w0", "w3")),
        Run(0),
        Evict("w0"),
        Evict("w3"),
        Wait("compute", 1, ("w1", "w0")),
        Start(0),
        Finish(0),
        Record("compute", 3),
        Wait("pull", 3),
        Copy("pull", "w2", 0, 1, 1),
        Record("pull", 4),
        Wait("copy", 3),
        Copy("copy", "w0", 0, 2, 1, next_step=True),
        Record("copy", 2),
        Wait("compute", 1, ("w1",)),
        Wait("compute", 4, ("w2",)),
        Run(1),
        Evict("w1"),
        Evict("w2"),
        Record("copy", 5),
        Record("pull", 6),
        Wait("compute", 5),
        Wait("compute", 6),
    )


def test_few_files_look_at_the_class_of_an_op() -> None:
    """So a new op is known in few places: where it is listed as a node, played, proved, issued and printed."""
    classes = {op.__name__ for op in get_args(Op)}

    def looks(node: ast.AST) -> bool:
        if isinstance(node, ast.MatchClass):
            return getattr(node.cls, "id", "") in classes
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("isinstance", "issubclass", "type"):
            return False
        return any(getattr(name, "id", "") in classes for name in ast.walk(node))

    found = set[str]()
    for folder in (ROOT / "passes", ROOT / "chunkflow_compile"):
        for file in (f for f in folder.rglob("*.py") if "passes" not in f.relative_to(ROOT).parts[1:]):
            text = file.read_text()
            if "step import" in text and any(map(looks, ast.walk(ast.parse(text)))):
                found.add(file.relative_to(ROOT).as_posix())
    assert found | {"passes/step.py"} == {
        "passes/step.py",
        "passes/forms.py",
        "passes/ops.py",
        "passes/placement/timeline.py",
        "passes/program/happens_before.py",
        "passes/program/reads.py",
        "chunkflow_compile/report/lines.py",
        "chunkflow_compile/runtime/instructions.py",
        "chunkflow_compile/simulate/group_offload.py",
        "chunkflow_compile/simulate/sharded.py",
    }
