"""Races, found without a GPU: each stream is a thread, the host runs steps ahead, slots are poisoned, schedules adversarial.

A legal program computes the model's own numbers, bit for bit, on every schedule, whether its weights are on the device, in
host memory or sharded over the devices of ranks.  ``verify`` rejects mutated programs, and every program that it accepts is
right on all schedules tried.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import Coalesced
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, Mutation, caught, listed, released
from random_programs import Bench, Choices, Layer, Spec, Tenant, anywhere, choices, examples, in_turns, pooled, specs
from schedules import goes_wrong, matches
from torch import nn

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.program.collectives import check_collectives
from chunkflow_compile.passes.program.happens_before import HappensBefore
from chunkflow_compile.passes.program.memory import program_memory
from chunkflow_compile.passes.program.verify import check, check_turns, verify
from chunkflow_compile.runtime.executor import Executor

STEPS = 3
# Different programs of each part.  The first is the one of the quick tests.
PROGRAMS = (24, 255, 255, 255)
# Mutations that some schedule must turn into wrong numbers.  verify rejects the others before a schedule shows anything.
SHOWN = {
    "remove_a_wait",
    "wait_after_the_reader",
    "remove_a_prefetch",
    "forget_a_chunk",
    "prefetch_after_the_reader",
    "prefetch_before_its_window",
    "evict_before_the_reader",
    "another_slot",
    "slot_off_by_a_line",
    "swap_weights_of_regions",
    "wait_for_another_weight",
    "write_beside_a_collective",
    "drop_an_event",
    "swap_two_events",
    "wait_on_another_stream",
}


pytestmark = pytest.mark.usefixtures("one_rank", "small_stripes")


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2, 3))])
def test_random_programs_give_the_model_s_numbers_on_every_schedule(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    """Each part has models of its own width: no program counts twice."""
    count: Counter[str] = Counter()
    seen: set[object] = set()
    wanted = PROGRAMS[part]

    def enough() -> bool:
        return len(seen) >= wanted and min(count[home] for home in ("device", "host", "peers")) > wanted / 2

    @examples(part, 100)  # the draws also depend on the modules that are loaded
    @given(specs, st.lists(anywhere, min_size=8, max_size=8))
    def check_all(spec: Spec, plans: list[Choices]) -> None:
        for chosen in plans:
            if enough():
                return
            found = Bench(replace(spec, width=8 * (part + 1)), chosen)
            program = found.program(chosen)
            key = (spec.layers, spec.twice, spec.tied, program.plan.digest)
            if key in seen:
                continue
            seen.add(key)
            verify(program)
            runs = matches(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            count.update(runs=runs, copied=program.plan.moved_bytes * runs)
            count.update(w.home for w in program.plan.weights)

    check_all()
    assert enough() and count["copied"] > 0
    record_property("counts", f"{len(seen)} different programs, part {part}: {count['runs']} runs, 0 mismatches")


def test_programs_that_take_turns_in_one_arena_give_the_model_s_numbers_on_every_schedule(
    record_property: Callable[[str, object], None],
) -> None:
    """Two programs on the same weights, of which each may shard others, in every order of two steps."""
    count: Counter[str] = Counter()

    @examples(0, 6)
    @given(pooled, anywhere, anywhere)
    def check_all(spec: Spec, one: Choices, other: Choices) -> None:
        found, turns = in_turns(spec, one, other)
        sharded = any(program.plan.pulled for program, _ in turns)
        count.update(pairs=1, sharded=sharded, runs=matches(found, turns, one.seed))

    check_all()
    assert 0 < count["sharded"] < count["pairs"]
    record_property("counts", f"{count['pairs']} pairs of programs in one arena: {count['runs']} runs, 0 mismatches")


def test_rows_that_share_a_pass_give_the_model_s_numbers_on_every_schedule(
    record_property: Callable[[str, object], None],
) -> None:
    """Steps of three rows each, of two programs on the same weights."""
    count: Counter[str] = Counter()

    @examples(5, 3)
    @given(pooled, choices, choices)
    def check_all(spec: Spec, one: Choices, other: Choices) -> None:
        found = Bench(replace(spec, layers=tuple(replace(layer, exchange=False) for layer in spec.layers)))
        a, b = found.program(one), found.program(other)
        order = [program for program in (a, a, b, a) for _ in range(3)]
        turns = list(zip(order, found.inputs(len(order)), strict=True))
        count.update(pairs=1, runs=matches(found, turns, one.seed, rows=3))

    check_all()
    record_property("counts", f"{count['pairs']} pairs of programs, 3 rows a step: {count['runs']} runs, 0 mismatches")


# Models, the seed of what is drawn, and the number of plans of each model.
SAMPLED = [
    *(pytest.param(m, pooled, 6, 2, id=m.__name__) for m in MUTATIONS),
    *(pytest.param(m, specs, 1, 3, id=f"{m.__name__}, any model", marks=pytest.mark.long) for m in MUTATIONS),
]


@pytest.mark.parametrize(("mutation", "models", "sample", "each"), SAMPLED)
def test_what_verify_accepts_is_right_and_what_is_wrong_it_rejects(
    mutation: Mutation,
    models: st.SearchStrategy[Spec],
    sample: int,
    each: int,
    record_property: Callable[[str, object], None],
) -> None:
    """Schedules run what verify accepts, and what it rejects until one of them has shown a wrong number."""
    count: Counter[str] = Counter()

    @examples(sample, 6)
    @given(models, st.lists(anywhere, min_size=each, max_size=each), st.integers(0, 2**16))
    def check_all(spec: Spec, plans: list[Choices], seed: int) -> None:
        for chosen in plans:
            found = Bench(spec, chosen)
            program = mutation(found.program(chosen), random.Random(seed))
            if program is None:
                continue
            program.module.recompile()
            refused, wrong = bool(list(check(program))), ""
            if not refused or (mutation.__name__ in SHOWN and not count["caught by wrong numbers"]):
                wrong = goes_wrong(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            count.update(caught(refused, wrong))

    check_all()
    assert count["mutants"] >= 3 and count["caught by verify"] > 0
    assert count["caught by wrong numbers"] > 0 or mutation.__name__ not in SHOWN
    record_property("counts", f"{mutation.__name__}: {listed(count)}")


def named(executor: Executor) -> list[Any]:
    """The events that the program names."""
    return executor.state.events[: executor.cycle.events.handover]


# The stream that waits for each kind of event, and which event it is.
EVENTS: dict[str, tuple[str, Callable[[Executor, object], bool]]] = {
    "openings": ("copy", lambda executor, event: any(event is opening for opening in named(executor))),
    "arrivals": ("compute", lambda executor, event: any(event is arrival for arrival in named(executor))),
    "starts of collectives": ("collective", lambda executor, event: True),
    "collectives in flight": ("completion", lambda executor, event: True),
    "ends of collectives": ("compute", lambda executor, event: any(event is e for e in executor.target.ended)),
    "handovers": ("copy", lambda executor, event: event is executor.state.events[executor.cycle.events.handover]),
}


@pytest.mark.parametrize("kind", EVENTS)
def test_each_event_of_the_executor_is_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race tests can fail: without any one kind of event, a schedule shows a wrong number or an error."""
    make, (waits, is_left_out) = Executor.__init__, EVENTS[kind]

    def broken(self: Executor, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        stream: Any = getattr(self.device, waits)
        kept = stream.wait
        stream.wait = lambda event, *rest: None if is_left_out(self, event) else kept(event, *rest)

    monkeypatch.setattr(Executor, "__init__", broken)
    shown: list[str] = []

    @examples(2, 12)
    @given(pooled, choices, choices)
    def look(spec: Spec, one: Choices, other: Choices) -> None:
        if any(shown):
            return
        found = Bench(spec)
        a, b = found.program(one), found.program(other)
        order = [a, a, b, b, a, a]
        shown.append(goes_wrong(found, list(zip(order, found.inputs(len(order)), strict=True)), one.seed))

    look()
    assert any(shown)


def test_verify_names_the_conflict_of_two_programs_without_a_handover() -> None:
    """The verifier can fail: without the handover event, two programs in one arena conflict."""
    shown: list[str] = []
    conflict = r"\(turn 1, priming\) overwrites the slot of .* missing edge: (region|evict)"

    @examples(3, 6)
    @given(pooled, choices, choices)
    def look(spec: Spec, one: Choices, other: Choices) -> None:
        if any(re.search(conflict, v) for v in shown):
            return
        found = Bench(spec)
        order = HappensBefore((found.program(one), found.program(other)), 1)
        assert not list(check_turns(order))
        (begins,) = (i for i, each in enumerate(order.ops) if each.turn and each.label == "handover")
        waits = [i for i in order.graph.successors(begins) if order.ops[i].stream != "compute"]
        assert waits
        order.graph.remove_edges_from([(begins, i) for i in waits])
        order._clocks = order._count()
        shown.extend(check_turns(order))

    look()
    assert any(re.search(conflict, v) for v in shown)


@pytest.mark.parametrize(
    ("event", "conflict"),
    [
        (
            "start",
            r"(\w+) \(step 0\) may read it before (region_\d+) \(step 0\) has written it; missing edge: \2 -> \1$",
        ),
        (
            "end",
            r"(region_\d+) \(step 0\) may read it before (\w+) \(step 0\) has written it; missing edge: \2 -> wait_",
        ),
        (
            "end",
            r"(release of .*) \(step 0\) comes before (\w+) \(step 0\) is over; missing edge: \2 -> wait_\w+ -> \1$",
        ),
    ],
    ids=["start", "end before a region", "end before a release"],
)
def test_verify_names_the_conflict_of_a_collective_without_its_event(event: str, conflict: str) -> None:
    """The verifier can fail: without its start or its end, a collective conflicts with compute."""
    shown: list[str] = []

    @examples(4, 6)
    @given(pooled, choices)
    def look(spec: Spec, chosen: Choices) -> None:
        if any(re.search(conflict, v) for v in shown):
            return
        program = Bench(replace(spec, layers=(*spec.layers, Layer(20, False, True, True)))).program(chosen)
        order, memory = HappensBefore((program,), 1), program_memory(program)
        assert not list(check_collectives(program, memory, order))
        beside = [i for i, each in enumerate(order.ops) if each.stream == "collective"]
        edges = order.graph.in_edges(beside) if event == "start" else order.graph.out_edges(beside)
        order.graph.remove_edges_from([*edges])
        order._clocks = order._count()
        shown.extend(check_collectives(program, memory, order))

    look()
    assert any(re.search(conflict, v) for v in shown), shown[:5]


def test_the_results_of_a_coalesced_collective_stay_until_its_completion() -> None:
    """The collective stream takes the elements of the list, when compute may be far ahead."""
    found = OneModel(Coalesced(8, 20).eval(), torch.randn(4, 8))
    program = found.program(Choices(0.0, 0, False, 1))
    verify(program)
    assert matches(found, [(program, x) for x in found.inputs(STEPS)], 0)
    (collective,) = (n for n in program.module.graph.nodes if collective_kind(n) is not None)
    early = released(program, collective.name, list(collective.users)[-1].name)
    pattern = rf"{collective.name}: release .* comes before getitem\w* \(step 0\) is over"
    assert any(re.search(pattern, v) for v in check(early))
    turns = [(early, x) for x in found.inputs(STEPS)]
    assert any(goes_wrong(found, turns, seed) for seed in range(50)), "compute drops it between the two elements"


class OneModel(Bench):
    """A bench of a model that is not drawn."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        torch._dynamo.reset()
        self.model, self.x, self.cut = model, x, make_cut(trace(model, {"x": x}, 0), 1)
        self.tenants: list[Tenant] = []
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        self.pieces = {}
