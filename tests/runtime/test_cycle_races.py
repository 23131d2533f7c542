"""Cycles of random models: what verify accepts gives the models' numbers on every schedule, with and without jumps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, Mutation, caught, listed, weights_of
from random_cycles import CycleBench, Drawn, cycles, cycles_anywhere
from random_programs import Choices, Layer, Spec, examples
from schedules import goes_wrong, matches

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.ops import PREFETCH, WAIT
from chunkflow_compile.passes.program.cycle import Cycle, prefetches, rewritten
from chunkflow_compile.passes.program.verify import check, verify, verify_call
from chunkflow_compile.passes.step import Copy, Record, Step, Wait, copies, reads

# Calls in a run: two passes over the longest cycle, and a jump or two.
CALLS = 9


pytestmark = pytest.mark.usefixtures("one_rank", "small_stripes")


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2, 3))])
def test_random_cycles_give_the_models_numbers_on_every_schedule(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    """With and without jumps; weights are on the device, in host memory, in a file, or sharded over devices of ranks."""
    count: Counter[str] = Counter()
    wanted = 130 if part else 12

    @examples(100 + part, wanted)
    @given(cycles_anywhere, st.sampled_from([0.0, 0.2, 0.5]))
    def check_all(drawn: Drawn, jumps: float) -> None:
        found = CycleBench(drawn)
        verify(found.cycle)
        check_events(found)
        runs = matches(found, found.turns(jumps, CALLS), found.chosen.seed)
        read = sum(1 for call in found.cycle.ops for _ in reads(call))
        count.update(cycles=1, runs=runs, moved=found.cycle.plan.moved_bytes * runs, read=read)
        count.update(w.home for w in found.cycle.plan.weights)

    check_all()
    assert count["cycles"] >= wanted and count["moved"] > 0 and count["read"] > count["cycles"]
    assert min(count[home] for home in ("device", "host", "peers")) > wanted
    record_property(
        "counts", f"{count['cycles']} cycles, part {part}: {count['read']} reads, {count['runs']} runs, 0 mismatches"
    )


def check_events(found: CycleBench) -> None:
    """The events of the programs are those of the cycle's step, and of a program that comes into a call's place too."""
    cycle = found.cycle
    expected = [op for op in cycle.step if isinstance(op, Record | Wait | Copy)]
    assert [op for call in cycle.calls for op in call.ops if isinstance(op, Record | Wait | Copy)] == expected
    for number in range(len(cycle.calls)):
        assert cycle.at(number, rewritten(cycle, number, found.calls[number])).signals == cycle.signals


class Judge:
    """Asserts that mutated cycles which verify accepts are right on every schedule; counts the mutants."""

    def __init__(self) -> None:
        self.count = Counter[str]()

    def refuses(self, found: CycleBench, cycle: Cycle) -> bool:
        refused, wrong, broken = bool(list(check(cycle))), "", found.running(cycle)
        if not refused:
            wrong = goes_wrong(broken, broken.turns(0.4, CALLS), found.chosen.seed)
        self.count.update(caught(refused, wrong))
        return refused

    def summary(self, name: str) -> str:
        assert self.count["mutants"] >= 3 and self.count["caught by verify"] > 0
        return f"{name}: {listed(self.count)}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_what_verify_accepts_of_a_call_in_a_cycle_is_right(
    mutation: Mutation, record_property: Callable[[str, object], None]
) -> None:
    """And what it refuses of the cycle, verify_call refuses of the program alone, which would come into the call's place."""
    judge = Judge()

    @examples(7, 6)
    @given(cycles_anywhere, st.integers(0, 2**16))
    def check_all(drawn: Drawn, seed: int) -> None:
        found, rng = CycleBench(drawn), random.Random(seed)
        cycle = found.cycle
        number = rng.randrange(len(cycle.calls))
        whole = rewritten(cycle, number, found.calls[number])
        verify_call(cycle, number, whole)
        try:
            program = mutation(whole, rng)
        except (KeyError, StopIteration):  # it moves a weight that another call reads
            return
        if program is None:
            return
        mutated = cycle.at(number, program)
        if judge.refuses(found, mutated if program.plan is cycle.plan else _with_plan(mutated, program.plan)):
            with pytest.raises(FindingError):
                verify_call(cycle, number, program)

    check_all()
    record_property("counts", judge.summary(mutation.__name__))


def prefetch_in_another_call(cycle: Cycle, rng: random.Random) -> Cycle | None:
    """Lane a prefetch to the end of another call, with its window."""
    found = [(i, node) for i, call in enumerate(cycle.calls) for node, _ in prefetches(call)]
    if not found or len(cycle.calls) < 2:
        return None
    number, node = rng.choice(found)
    other = rng.choice([i for i in range(len(cycle.calls)) if i != number])
    graph = cycle.calls[other].module.graph
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        graph.call_function(PREFETCH, node.args, node.kwargs)
    cycle.calls[number].module.graph.erase_node(node)
    return replace(cycle)


@dataclass(frozen=True)
class JumpsOtherwise(Cycle):
    """A cycle in which jumps to ``call`` issue other ops first."""

    call: int
    ops_first: Step

    def prologue(
        self, call: int, lanes: Sequence[Lane] = LANES, stale: Collection[str] | None = None, *, jumps: bool = False
    ) -> Step:
        if jumps and call == self.call:
            return tuple(op for op in self.ops_first if op.stream in ("compute", *lanes))
        return super().prologue(call, lanes, stale, jumps=jumps)


def _jumps_otherwise(cycle: Cycle, call: int, ops: Step) -> Cycle:
    return JumpsOtherwise(cycle.problem, cycle.plan, cycle.calls, cycle.starts, call, ops)


def forget_a_copy(cycle: Cycle, rng: random.Random) -> Cycle | None:
    """A jump leaves out a copy of what is on its way or in use."""
    found = [(i, copy) for i in range(1, len(cycle.calls)) for copy in copies(cycle.prologue(i, LANES[:1], jumps=True))]
    if not found:
        return None
    call, left_out = rng.choice(found)
    ops = cycle.prologue(call, LANES[:1], jumps=True)
    return _jumps_otherwise(cycle, call, tuple(op for op in ops if op != left_out))


def take_a_border_for_another(cycle: Cycle, rng: random.Random) -> Cycle | None:
    """A jump to a call issues first what a jump to another call does."""
    call = rng.randrange(1, len(cycle.calls))
    other = rng.choice([i for i in range(len(cycle.calls)) if i != call])
    return _jumps_otherwise(cycle, call, cycle.prologue(other, LANES[:1], jumps=True))


def _with_plan(cycle: Cycle, plan: object) -> Cycle:
    return replace(cycle, plan=plan, calls=tuple(replace(c, plan=plan) for c in cycle.calls))


@pytest.mark.parametrize("mutation", [prefetch_in_another_call, forget_a_copy, take_a_border_for_another])
def test_what_verify_accepts_of_the_borders_of_a_cycle_is_right(
    mutation: Callable[[Cycle, random.Random], Cycle | None], record_property: Callable[[str, object], None]
) -> None:
    judge = Judge()

    @examples(7, 6)
    @given(cycles, st.integers(0, 2**16))
    def check_all(drawn: Drawn, seed: int) -> None:
        found = CycleBench(drawn)
        if (cycle := mutation(found.cycle, random.Random(seed))) is not None:
            judge.refuses(found, cycle)

    check_all()
    record_property("counts", judge.summary(mutation.__name__))


def test_a_wait_for_a_copy_that_a_jump_leaves_out_is_refused() -> None:
    """In a pass the copy of an evicted weight comes after that of the weight which is read; after a jump, only its old mark
    is there."""
    specs = [
        Spec(24, (Layer(20, False, True, True), Layer(8, True, True, True), Layer(20, True, True)), False, False, 17),
        Spec(24, (Layer(8, False, True),), False, True, 3),
    ]
    found = CycleBench((specs, [0, 1, 0, 1], False, Choices(stay=0.0, reach=0, hard=False, seed=49906)))
    verify(found.cycle)
    waits = [n for call in found.cycle.calls for n in call.module.graph.nodes if n.target is WAIT]
    (read,) = [n for n in waits if "3.down.0.weight" in weights_of(n)]
    read.args = next(n.args[0] for n in waits if "2.head.weight" in weights_of(n)), read.args[1]
    found = found.running(replace(found.cycle, calls=tuple(replace(call) for call in found.cycle.calls)))
    with pytest.raises(FindingError, match=r"3\.down\.0\.weight: after a jump to call 3, region_\d+ .* does not wait"):
        verify(found.cycle)
    calls = [found.cycle.calls[i] for i in (0, 1, 2, 3, 3, 0, 3)]
    assert goes_wrong(found, [(call, torch.randn(4, 24)) for call in calls], 0) == "number"
