"""Programs for other sizes in the places of a cycle: what is refused there, and how much work a new size is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, Mutation
from random_cycles import CycleBench, Drawn, cycles
from random_programs import examples

import chunkflow_compile
from chunkflow_compile import programs
from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.program import happens_before
from chunkflow_compile.passes.program.arrivals import arrivals, arrivals_at
from chunkflow_compile.passes.program.cycle import rewritten
from chunkflow_compile.passes.program.verify import check, verify_call


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_place_takes_no_program_that_breaks_its_cycle(
    mutation: Mutation, record_property: Callable[[str, object], None]
) -> None:
    """Whatever verify refuses of the cycle with the program in its place, verify_call refuses of the program alone."""
    count: Counter[str] = Counter()

    @examples(8, 14)
    @given(cycles, st.integers(0, 2**16))
    def check_all(drawn: Drawn, seed: int) -> None:
        found, rng = CycleBench(drawn), random.Random(seed)
        cycle, marks = found.cycle, arrivals(found.cycle)
        number = rng.randrange(len(cycle.calls))
        program = rewritten(cycle, number, found.calls[number])
        verify_call(cycle, number, program, marks, arrivals_at(cycle, marks, number, program))
        try:
            mutated = mutation(program, rng)
        except (KeyError, StopIteration):  # it moves a weight that another call reads
            return
        if mutated is None:
            return
        broken = bool(list(check(cycle.at(number, mutated))))
        try:
            verify_call(cycle, number, mutated, marks, arrivals_at(cycle, marks, number, mutated))
            refused = False
        except FindingError:
            refused = True
        assert refused or not broken
        count.update(tried=1, refused=refused)

    check_all()
    assert count["tried"] >= 3 and count["refused"] > 0
    record_property("counts", f"{mutation.__name__}: {count['tried']} programs in a place, {count['refused']} refused")


@pytest.mark.usefixtures("one_rank")
def test_the_marks_of_a_program_in_a_place_are_those_of_the_whole_cycle() -> None:
    @examples(9, 20)
    @given(cycles)
    def check_all(drawn: Drawn) -> None:
        found = CycleBench(drawn)
        cycle, marks = found.cycle, arrivals(found.cycle)
        for number in range(len(cycle.calls)):
            program = rewritten(cycle, number, found.calls[number])
            quick, whole = arrivals_at(cycle, marks, number, program), arrivals(cycle.at(number, program))
            assert whole.marked.items() <= dict(quick.marked).items()
            nodes = set(program.module.graph.nodes)
            assert quick.awaited == {node: mark for node, mark in whole.awaited.items() if node in nodes}

    check_all()


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The labels of the ops that were unrolled."""
    found: list[str] = []
    made = happens_before.Op

    def counted(*args: Any, **kwargs: Any) -> happens_before.Op:
        found.append(args[5])
        return made(*args, **kwargs)

    monkeypatch.setattr(happens_before, "Op", counted)
    yield found


def work(layers: int, unrolled: list[str]) -> list[int]:
    """Ops unrolled at each of three new sizes of a model that is compiled by kind and streams."""
    torch._dynamo.reset()
    options = {**OPTIONS, "lowering": "eager", "slowdown": None, "policy": "chunkflow", "memory": 60_000}
    model = Stack(layers).eval()
    compiled = chunkflow_compile.compile(model, **options)
    found = []
    for rows in (4, 6, 8, 10):
        unrolled.clear()
        compiled(torch.randn(rows, 8))
        # the plans of the first pass are another thing: the cycle's own proof
        found.append(len(unrolled))
        for _ in range(3):
            compiled(torch.randn(rows, 8))
            programs(model)[0].arena.cycles.wait_planned()
    assert any(m.moved_bytes for p in programs(model) for m in p.measurements)
    return found[1:]


def test_the_work_of_a_new_size_grows_with_the_number_of_blocks(unrolled: list[str], no_grad: None) -> None:
    few, many = work(8, unrolled), work(24, unrolled)
    assert 0 < many[0] <= 3.5 * few[0], "not with its square"
    assert many[1:] == [0, 0], "the programs of one graph are proved once for all sizes"
