"""Plans with joins: their programs are proved as eager and as captured calls, in any order, and each event is needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import mutations
import pytest
import torch
from helpers import Stack, cut_of, plan_of
from hypothesis import given
from mutations import Mutation
from random_cycles import CycleBench, Drawn, cycles
from random_programs import Bench, Choices, Spec, choices, examples, pooled
from test_verify import copied

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError, FindingError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.pass_pipeline import make_cycle, stages
from chunkflow_compile.passes.planning import Settings, join_loss
from chunkflow_compile.passes.program.cycle import Call, Cycle, ends_of, problem_of, write
from chunkflow_compile.passes.program.happens_before import FORMS, Form, HappensBefore, Issued
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import CHECKED_STEPS, check, check_turns, verify, verify_together
from chunkflow_compile.passes.step import Copy, Record, Wait


def joined(program: Program) -> Program:
    """The same program, under the plan with joins."""
    return replace(program, plan=replace(program.plan, joins=(len(program.problem.regions),)))


@cache  # tests change copies of it
def stack_program() -> Program:
    cut = cut_of(Stack(4), torch.randn(4, 8))
    return joined(rewrite(cut, plan_of(cut.problem)))


def joined_cycle(found: CycleBench) -> Cycle:
    return write(found.calls, replace(found.cycle.plan, joins=ends_of(found.calls)))


def test_a_plan_without_joins_is_proved_as_before() -> None:
    program = stack_program()
    plain = replace(program, plan=replace(program.plan, joins=()))
    proof, order = verify(plain), HappensBefore((plain,), CHECKED_STEPS)
    assert (proof.ops, proof.edges) == (len(order.ops), order.graph.number_of_edges())
    assert HappensBefore((plain,), CHECKED_STEPS, (True,)).ops == order.ops
    assert verify(program).ops > 4 * proof.ops


@pytest.mark.usefixtures("one_rank")
def test_random_programs_and_pairs_of_them_are_proved_in_every_form() -> None:
    @examples(4, 3)
    @given(pooled, choices, choices)
    def check_all(spec: Spec, one: Choices, other: Choices) -> None:
        found = Bench(spec)
        a, b = found.program(one), found.program(other)
        verify(joined(a))
        verify_together(joined(a), joined(b))
        verify_together(joined(a), b)

    check_all()


@pytest.mark.usefixtures("one_rank")
def test_random_cycles_are_proved_in_every_sequence_of_forms() -> None:
    """Those that verify unrolls stand for all others: random ones show nothing new."""

    @examples(5, 4)
    @given(cycles)
    def check_all(drawn: Drawn) -> None:
        cycle = joined_cycle(CycleBench(drawn))
        verify(cycle)
        rng = random.Random(drawn[3].seed)
        for _ in range(4):
            form = tuple(rng.random() < 0.5 for _ in range(3 * len(cycle.calls)))
            assert not list(check_turns(HappensBefore((cycle,), 3, form)))

    check_all()


# What is dropped: the label of a mark or of the wait for it, of which calls, and the sequences of forms that show it.
Dropped = Callable[[Issued, Issued], bool]
DROPPED: dict[str, tuple[str, Form, Dropped]] = {
    "the join": ("join", (True,), lambda record, join: join.step == 0),
    "the join before an eager step": ("join", (True, False), lambda record, join: True),
    "an opening": ("opening", (True,), lambda opening, wait: opening.step == 1),
    "an opening after an eager step": ("opening", (False, True), lambda opening, wait: opening.captured),
    "an arrival": ("wait", (True,), lambda record, wait: wait.step == 1),
    "an arrival after an eager step": ("wait", (False, True), lambda record, wait: wait.captured),
    "the tail after priming": ("tail", (True,), lambda record, tail: tail.step == 0),
    "the tail after an eager step": ("tail", (False, True), lambda record, tail: True),
}


def marks_awaited(order: HappensBefore, label: str) -> list[tuple[int, int]]:
    """The edges from a mark to a wait for it, of which one has a label that begins so."""
    pairs = [(order.ops[u], order.ops[v]) for u, v in order.graph.edges]
    return [
        edge
        for edge, (u, v) in zip(order.graph.edges, pairs, strict=True)
        if isinstance(u.op, Record) and isinstance(v.op, Wait) and u.op.event == v.op.event
        if u.label.startswith(label) or v.label.startswith(label)
    ]


@pytest.mark.parametrize("name", DROPPED)
def test_each_event_of_captured_calls_is_needed(name: str) -> None:
    event, form, chosen = DROPPED[name]
    assert form in FORMS
    order = HappensBefore((stack_program(),), CHECKED_STEPS, form)
    assert not list(check_turns(order))
    edges = [(u, v) for u, v in marks_awaited(order, event) if chosen(order.ops[u], order.ops[v])]
    whole, shown = order.graph.copy(), list[bool]()
    for begin in {u for u, _ in edges}:
        order.graph = whole.copy()
        order.graph.remove_edges_from([(u, v) for u, v in edges if u == begin])
        order._clocks = order._count()
        shown.append(any("missing edge" in said and "captured" in said for said in check_turns(order)))
    # some openings are of bytes that have been free for longer
    assert any(shown) and (event == "opening" or all(shown)), shown


def test_chunks_of_two_captured_calls_have_no_order_of_their_own() -> None:
    """Only the join orders them: a later number in the order of issue says nothing."""
    order = HappensBefore((stack_program(),), CHECKED_STEPS, (True,))
    chunks = [i for i, each in enumerate(order.ops) if isinstance(each.op, Copy) and each.captured]
    first, last = chunks[0], chunks[-1]
    assert order.ops[first].step == 0 and order.ops[last].step == 1 and order.ordered(first, last)
    order.graph.remove_edges_from(marks_awaited(order, "wait") + marks_awaited(order, "join"))
    order._clocks = order._count()
    assert not order.ordered(first, last)
    assert order.ordered(first, chunks[1])


def test_an_eager_call_of_another_program_is_awaited_too() -> None:
    """A program that copies nothing before its first step still waits for the copies that the other has in flight."""
    program = stack_program()
    problem = program.problem
    part = rewrite(cut_of(Stack(4), torch.randn(4, 8)), plan_of(problem, part=True, joins=(len(problem.regions),)))
    order = HappensBefore((program, part), 1, (False, True))
    (tail,) = (
        i
        for i, each in enumerate(order.ops)
        if each.turn == 1 and each.label.startswith("tail") and each.stream == "compute"
    )
    eager = [
        i for i, each in enumerate(order.ops) if each.turn == 0 and isinstance(each.op, Copy) and not each.captured
    ]
    assert eager and all(order.ordered(copy, tail) for copy in eager)
    assert not any(each.turn == 1 and isinstance(each.op, Copy) and each.step < 0 for each in order.ops)
    verify_together(program, part)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.__name__)
def test_what_is_wrong_in_eager_calls_is_refused_with_joins_too(mutation: Mutation) -> None:
    for seed in range(2):
        broken = mutation(copied(stack_program()), random.Random(seed))
        if broken is None:
            continue
        plain = replace(broken, plan=replace(broken.plan, joins=()))
        if list(check(plain)):
            with pytest.raises(FindingError):
                verify(broken)


def test_joins_are_at_the_ends_of_calls() -> None:
    cut = cut_of(Stack(4), torch.randn(4, 8))
    count = len(cut.problem.regions)
    plan = plan_of(cut.problem)
    for wrong in ((1,), (1, count), (count, count), (0, count)):
        with pytest.raises(ChunkflowError, match=rf"joins copies after regions .*, but the calls end after {count}\."):
            rewrite(cut, replace(plan, joins=wrong))
    calls = [Call(cut, {w.name: f"{n}.{w.name}" for w in cut.problem.weights}, {}) for n in range(2)]
    assert ends_of(calls) == (count, 2 * count)
    both = plan_of(problem_of(calls))
    verify(write(calls, replace(both, joins=ends_of(calls))))
    for wrong in ((2 * count,), (2 * count, count), (count,)):
        with pytest.raises(ChunkflowError, match=f"but the calls end after {count}, {2 * count}"):
            write(calls, replace(both, joins=wrong))


def test_a_program_and_a_cycle_get_the_joins_that_the_settings_ask_for() -> None:
    machine = replace(load_profile("h100-pcie-x2"), launch_s=1e-3, h2d_bandwidth=2e7)
    goal = Settings(hardware=machine, chunk_bytes=4096, goal=Goal(memory=1 << 16), joined=True)
    traced = trace(Stack(4), {"x": torch.randn(4, 8)}, 0)
    *_, stage = stages(traced, goal, verify_each=True)
    assert stage.program is not None and stage.proof is not None
    assert stage.program.plan.joins == (len(stage.program.problem.regions),)
    assert stage.program.plan.moved_bytes > 0
    cut = cut_of(Stack(4), torch.randn(4, 8))
    calls = [Call(cut, {w.name: f"{n}.{w.name}" for w in cut.problem.weights}, {}) for n in range(3)]
    cycle = make_cycle(calls, goal)
    assert cycle.plan.joins == ends_of(calls) and cycle.plan.moved_bytes > 0
    plain = replace(goal, joined=False)
    assert make_cycle(calls, plain).plan.joins == ()
    assert str(cycle.calls[0]) == str(write(calls, replace(cycle.plan, joins=())).calls[0]), "the text is the same"
    assert join_loss(problem_of(calls), plain, residents_in_arena=True, ends=ends_of(calls)) < 1


def test_a_plan_without_joins_is_stored_as_before() -> None:
    plan = stack_program().plan
    plain = replace(plan, joins=())
    assert '"joins"' not in plain.to_json() and '"joins"' in plan.to_json()
    assert plan.digest != plain.digest and plan.placement != plain.placement
    for each in (plan, plain):
        assert type(plan).from_json(each.to_json()) == each
