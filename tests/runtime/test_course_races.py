"""Courses of random models: what verify accepts gives the models' numbers on every schedule, with and without jumps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, Mutation
from random_courses import CourseBench, Drawn, courses
from random_programs import Choices, Layer, Spec, examples
from schedules import goes_wrong, matches

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.ops import PREFETCH, WAIT
from chunkflow_compile.passes.program.course import Course
from chunkflow_compile.passes.program.verify import check, verify

# Calls in a run: two passes over the longest course, and a jump or two.
CALLS = 9


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2, 3))])
def test_random_courses_give_the_models_numbers_on_every_schedule(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    count: Counter[str] = Counter()

    wanted = 95 if part else 25

    @examples(100 + part, wanted)
    @given(courses, st.sampled_from([0.0, 0.2, 0.5]))
    def check_all(drawn: Drawn, jumps: float) -> None:
        found = CourseBench(drawn)
        verify(found.course)
        runs = matches(found, found.turns(jumps, CALLS), found.chosen.seed)
        count.update(courses=1, runs=runs, moved=found.course.plan.moved_bytes * runs)

    check_all()
    assert count["courses"] >= wanted and count["moved"] > 0
    record_property("counts", f"{count['courses']} courses, part {part}: {count['runs']} runs, 0 mismatches")


def _in_a_call(mutation: Mutation) -> Callable[[Course, random.Random], Course | None]:
    """A mutation of a program, in a call of a course."""

    def mutate(course: Course, rng: random.Random) -> Course | None:
        number = rng.randrange(len(course.calls))
        try:
            program = mutation(course.calls[number], rng)
        except (KeyError, StopIteration):  # it moves a weight that another call reads
            return None
        if program is None:
            return None
        mutated = course.at(number, program)
        return mutated if program.plan is course.plan else _with_plan(mutated, program.plan)

    mutate.__name__ = mutation.__name__
    return mutate


def prefetch_in_another_call(course: Course, rng: random.Random) -> Course | None:
    """Moves a prefetch to the end of another call, with its window."""
    found = [(i, node) for i, node, _ in course.prefetches]
    if not found or len(course.calls) < 2:
        return None
    number, node = rng.choice(found)
    other = rng.choice([i for i in range(len(course.calls)) if i != number])
    graph = course.calls[other].module.graph
    with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
        graph.call_function(PREFETCH, node.args)
    course.calls[number].module.graph.erase_node(node)
    return replace(course)


def forget_a_later_call(course: Course, rng: random.Random) -> Course | None:
    """A jump takes the last reader of a weight for its first."""
    found = [w for w in course.plan.streamed if w.first_use < w.last_use]
    if not found:
        return None
    chosen = rng.choice(found)
    weights = tuple(replace(w, last_use=w.first_use) if w is chosen else w for w in course.plan.weights)
    return _with_plan(course, replace(course.plan, weights=weights))


def take_a_border_for_another(course: Course, rng: random.Random) -> Course | None:
    """A jump takes the window at which a call begins for another."""
    number = rng.randrange(1, len(course.calls))
    starts = list(course.starts)
    starts[number] += rng.choice([-1, 1])
    return replace(course, starts=tuple(starts))


def _with_plan(course: Course, plan: object) -> Course:
    return replace(course, plan=plan, calls=tuple(replace(c, plan=plan) for c in course.calls))


OF_BORDERS = (prefetch_in_another_call, forget_a_later_call, take_a_border_for_another)


@pytest.mark.parametrize("mutation", [*map(_in_a_call, MUTATIONS), *OF_BORDERS], ids=lambda m: m.__name__)
def test_what_verify_accepts_of_a_course_is_right(
    mutation: Callable[[Course, random.Random], Course | None], record_property: Callable[[str, object], None]
) -> None:
    count: Counter[str] = Counter()

    @examples(7, 14)
    @given(courses, st.integers(0, 2**16))
    def check_all(drawn: Drawn, seed: int) -> None:
        found = CourseBench(drawn)
        course = mutation(found.course, random.Random(seed))
        if course is None:
            return
        refused = bool(list(check(course)))
        broken = found.running(course)
        wrong = goes_wrong(broken, broken.turns(0.4, CALLS), found.chosen.seed)
        assert refused or not wrong
        count.update(tried=1, rejected=refused, shown=wrong == "number", failed=wrong == "error")

    check_all()
    assert count["tried"] >= 3 and count["rejected"] > 0
    record_property(
        "counts",
        f"{mutation.__name__}: {count['tried']} courses, {count['rejected']} rejected, on a schedule {count['shown']} with "
        f"wrong numbers, {count['failed']} with an error",
    )


def test_a_wait_for_a_copy_that_a_jump_leaves_out_is_refused() -> None:
    """In a pass the copy of an evicted weight comes after that of the weight which is read; after a jump, only its old mark
    is there."""
    specs = [
        Spec(24, (Layer(20, False, True, True), Layer(8, True, True, True), Layer(20, True, True)), False, False, 17),
        Spec(24, (Layer(8, False, True),), False, True, 3),
    ]
    found = CourseBench((specs, [0, 1, 0, 1], False, Choices(stay=0.0, reach=0, hard=False, seed=49906)))
    verify(found.course)
    (read,) = [n for n in found.course.calls[3].module.graph.nodes if n.target is WAIT and "down" in str(n.args[0])]
    with read.graph.inserting_before(read):
        read.graph.call_function(WAIT, ("0.head.weight",))
    with pytest.raises(FindingError, match=r"3\.down\.0\.weight: after a jump to call 3, region_\d+ .* does not wait"):
        verify(found.course)
    calls = [found.course.calls[i] for i in (0, 1, 2, 3, 3, 0, 3)]
    assert goes_wrong(found, [(call, torch.randn(4, 24)) for call in calls], 0) == "number"
