"""The step: its operations and events are those of the schedule and of its arrivals, for random problems and windows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import CHUNK, MACHINE, small_problems
from torch import nn
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes import step as ops
from chunkflow_compile.passes.names import MOVES
from chunkflow_compile.passes.ops import EVICT, PREFETCH, WAIT, Prefetch, prefetch_of
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.policies import next_block_barriers
from chunkflow_compile.passes.placement.schedule import (
    Await,
    Collect,
    Compute,
    Evict,
    Join,
    ScheduleItem,
    Wait,
    schedule,
    transfers_of,
)
from chunkflow_compile.passes.placement.search import barriers
from chunkflow_compile.passes.plan import Barrier, Plan, Windows
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.arrivals import arrivals
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.step import Copy, Finish, Order, Record, Run, Start, Step, order_of


def planned(problem: Problem, windows: dict[str, Windows], chosen: tuple[Barrier, ...], joins: tuple[int, ...]) -> Plan:
    """A plan of these windows, however it came to them."""
    machine = replace(MACHINE, peer_bandwidth=4 * CHUNK * 1e6)
    plan = place(problem, machine, policy="resident", chunk_bytes=CHUNK)
    where = {w.name: "peers" if w.peers else "host" for w in problem.weights}
    weights = (
        replace(w, home=where[w.name], windows=windows[w.name]) if w.name in windows else w for w in plan.weights
    )
    return replace(plan, weights=tuple(weights), barriers=chosen, joins=joins)  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A random problem whose weights are in two lanes, and random legal windows, with barriers and joins."""
    found = draw(small_problems(9))
    rng = random.Random(draw(st.integers(0, 2**16)))
    found = replace(found, weights=tuple(replace(w, peers=rng.choice([0, 0, 2])) for w in found.weights))
    count, windows = len(found.regions), dict[str, Windows]()
    for weight in found.weights:
        first, last = weight.uses[0], weight.uses[-1]
        around = [w % count for w in range(last + 1 - count, first + 1)]
        if rng.random() < 0.9:
            windows[weight.name] = tuple(
                rng.choice([None, *around, *around]) for _ in range(-(-weight.nbytes // CHUNK))
            )
    moved = [w for w in found.weights if any(k is not None for k in windows.get(w.name, ()))]
    lanes = [[w.name for w in moved if bool(w.peers) == pulls] for pulls in (False, True)]
    kind = draw(st.sampled_from(["", "newest", "next block"]))
    chosen: tuple[Barrier, ...] = ()
    if kind == "newest":
        chosen = barriers(found, Order(found).step(windows), lanes)
    elif kind:  # those of one lane, because the marks of barriers whose weights alternate are others
        chosen = next_block_barriers(found, [w for w in moved if not w.peers])
    joins = draw(st.sampled_from([(), (), (count,), (1, count)]))
    return found, planned(found, windows, chosen, joins)


# An op, or what compute awaits together in a lane: the newest copy of these weights, or that of their resident chunks.
Projected = ScheduleItem | tuple[Copy | str, frozenset[str]]


def expected(program: Program, items: list[ScheduleItem]) -> Iterator[Projected]:
    """The schedule, with the arrivals in place of the waits that stand together."""
    marks, plan = arrivals(program), program.plan
    marked = {number: what for what, number in marks.marked.items()}
    nodes = dict(enumerate(program.module.graph.nodes))
    found: set[str] = {w.name for w in plan.streamed if None in w.windows}
    found |= {item.weight for item in items if isinstance(item, Prefetch) and item.next_step}
    at = 0
    for waits, group in groupby(items, key=lambda item: isinstance(item, Wait)):
        together = list(group)
        if not waits:
            for item in together:
                if isinstance(item, Join) and not plan.moved_bytes:
                    continue  # it would wait for nothing
                found |= {item.weight} if isinstance(item, Prefetch) else set()
                yield item
                at += not isinstance(item, Join)
            continue
        for moves in MOVES:
            mine = [(at + n, i.weight) for n, i in enumerate(together) if plan.lane(i.weight) == moves]
            number = next((marks.awaited[nodes[n]] for n, _ in mine if nodes[n] in marks.awaited), None)
            if number is not None:
                what = marked[number]
                yield as_copy(plan, what), frozenset(name for _, name in mine if name in found)
        at += len(together)


def as_copy(plan: Plan, what: Node | str) -> Copy | str:
    op = None if isinstance(what, str) else prefetch_of(what)
    return str(what) if op is None else Copy(plan.lane(op.weight), *astuple(op))


def projected(step: Step, plan: Plan) -> Iterator[Projected]:
    """The step without its openings, with its arrivals as above."""
    marked = {op.event: step[at - 1] for at, op in enumerate(step) if isinstance(op, Record)}
    kept = [w.name for w in plan.streamed if None in w.windows]
    joined = False
    for op in step:
        if isinstance(op, ops.Wait) and op.stream == "compute":
            copy = marked.get(op.event)
            if op.weights:
                newest = max((w for w in op.weights if w in kept), key=kept.index, default="")
                yield copy if isinstance(copy, Copy) else newest, frozenset(op.weights)
            elif not joined:
                yield Join()
            joined = not op.weights
        elif not isinstance(op, Record | ops.Wait):
            joined = False
            yield AS_ITEM[type(op)](*(value for name, value in vars(op).items() if name != "stream"))


AS_ITEM: dict[type, type] = {Copy: Prefetch, Run: Compute, Start: Collect, Finish: Await, ops.Evict: Evict}


def written(problem: Problem, plan: Plan, items: list[ScheduleItem]) -> Program:
    """A program of these items, whose regions compute nothing."""
    graph = Graph()
    for item in items:
        if isinstance(item, Prefetch):
            graph.call_function(PREFETCH, astuple(item))
        elif isinstance(item, Wait | Evict):
            graph.call_function(WAIT if isinstance(item, Wait) else EVICT, (item.weight,))
        elif not isinstance(item, Join):
            graph.create_node("call_module", "region", ())
    graph.output(())
    return Program(GraphModule({"region": nn.Module()}, graph), problem, plan, {}, {}, {}, {})


@settings(max_examples=300, deadline=None)
@given(plans())
def test_a_step_is_the_schedule_with_the_arrivals(drawn: tuple[Problem, Plan]) -> None:
    problem, plan = drawn
    items = list(schedule(problem, transfers_of(problem, plan), plan.joins))
    windows = {w.name: w.windows for w in plan.streamed}
    step = Order(problem).step(windows, plan.barriers, plan.joins, kept=True)
    assert list(projected(step, plan)) == list(expected(written(problem, plan, items), items))
    assert order_of(problem, plan) == Order(problem).step(windows, plan.barriers, kept=True)
    named = list(dict.fromkeys(op.event for op in step if isinstance(op, Record | ops.Wait)))
    assert named == list(range(len(named))), "numbered in the order in which they are named"


@settings(max_examples=60, deadline=None)
@given(plans())
def test_each_window_is_opened_once_and_each_lane_waits_for_that(drawn: tuple[Problem, Plan]) -> None:
    step = order_of(*drawn)
    marks = [(at, op.event) for at, op in enumerate(step) if isinstance(op, Record) and op.stream == "compute"]
    windows = {op.window for op in step if isinstance(op, Copy)}
    assert len(marks) == len(windows)
    for at, event in marks:
        window = next(op.window for op in step[at:] if isinstance(op, Copy))
        copies = [op for op in step if isinstance(op, Copy) and op.window == window]
        waits = [op.stream for op in step if isinstance(op, ops.Wait) and op.event == event]
        assert waits == list(dict.fromkeys(op.stream for op in copies))
        for lane in waits:
            first = next(op for op in copies if op.stream == lane)
            assert step[step.index(first) - 1] == ops.Wait(lane, event)
