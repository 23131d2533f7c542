"""Races of programs whose weights come from three homes: the device, the host, and pieces on the devices of ranks.

A legal program computes the model's own numbers, bit for bit, on every schedule, and nothing but the pieces as they were
dealt gives them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, Mutation, listed
from random_cycles import CycleBench, Drawn, cycles
from random_programs import Choices, Layer, PeersBench, Spec, choices, examples, specs
from schedules import goes_wrong, matches

from chunkflow_compile.passes import pieces as geometry
from chunkflow_compile.passes.forms import CallEvents
from chunkflow_compile.passes.ops import WAIT
from chunkflow_compile.passes.plan import Plan, runs
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import check, verify, verify_together
from chunkflow_compile.weights.pieces import Pieces

STEPS = 3

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.usefixtures("small_stripes")]


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have several stripes, and chunks begin and end within parts."""
    monkeypatch.setattr(geometry, "STRIPE", 1536)


@pytest.mark.parametrize("programs", [20, pytest.param(300, marks=pytest.mark.long)])
def test_random_programs_with_three_homes(programs: int, record_property: Callable[[str, object], None]) -> None:
    count: Counter[str] = Counter()
    seen: set[str] = set()

    def enough() -> bool:
        return min(count[home] for home in ("device", "host", "peers")) > programs / 2

    @examples(200, 120)  # what it draws depends on the modules that are loaded, too
    @given(specs, st.lists(choices, min_size=10, max_size=10))
    def check_all(spec: Spec, plans: list[Choices]) -> None:
        for chosen in plans:
            if len(seen) >= programs and enough():
                return
            found = PeersBench(spec, chosen)
            program = found.program(chosen)
            if program.plan.digest in seen:
                continue
            seen.add(program.plan.digest)
            verify(program)
            count["runs"] += matches(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            count.update(w.home for w in program.plan.weights)

    check_all()
    assert len(seen) >= programs and enough()
    record_property("counts", f"{len(seen)} different programs of three homes: {count['runs']} runs, 0 mismatches")


@pytest.mark.long
def test_random_cycles_with_three_homes_and_jumps(record_property: Callable[[str, object], None]) -> None:
    count: Counter[str] = Counter()

    @examples(240, 100)
    @given(cycles, st.sampled_from([0.0, 0.2, 0.5]))
    def check_all(drawn: Drawn, jumps: float) -> None:
        found = CycleBench(drawn, peers=True)
        verify(found.cycle)
        count.update(cycles=1, runs=matches(found, found.turns(jumps, 9), found.chosen.seed))
        count.update(w.home for w in found.cycle.plan.weights)

    check_all()
    assert min(count[home] for home in ("device", "host", "peers")) > 0
    record_property("counts", f"{count['cycles']} cycles of three homes: {count['runs']} runs, 0 mismatches")


def in_turns(spec: Spec, one: Choices, other: Choices) -> tuple[PeersBench, list[tuple[Program, torch.Tensor]]]:
    """Steps of two programs in one arena, with other weights in pieces in each."""
    found = PeersBench(spec, one)
    a = found.program(one)
    found.deal(other)
    b = found.program(other)
    verify_together(a, b)
    order = [a, b, b, a, a, b]
    return found, list(zip(order, found.inputs(len(order)), strict=True))


def test_programs_that_take_turns_in_one_arena(record_property: Callable[[str, object], None]) -> None:
    count: Counter[str] = Counter()

    @examples(220, 6)
    @given(specs, choices, choices)
    def check_all(spec: Spec, one: Choices, other: Choices) -> None:
        found, turns = in_turns(spec, one, other)
        count.update(pairs=1, runs=matches(found, turns, one.seed))

    check_all()
    record_property("counts", f"{count['pairs']} pairs of programs in one arena: {count['runs']} runs, 0 mismatches")


def test_without_the_wait_for_both_lanes_they_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one program has in flight in a lane arrives over what the next has copied in the other."""
    monkeypatch.setattr(CallEvents, "join", lambda self, lanes: ())
    shown: Counter[str] = Counter()

    @examples(220, 6)
    @given(specs, choices, choices)
    def check_all(spec: Spec, one: Choices, other: Choices) -> None:
        shown[goes_wrong(*in_turns(spec, one, other), one.seed)] += 1

    check_all()
    assert shown["number"]


def test_a_window_in_two_parts_opens_in_the_lane_of_each() -> None:
    """Compute waits for the first part, which is pulled.  The second is copied over a weight that is read until then."""
    chosen = Choices(stay=0.0, reach=1, hard=False, seed=65535)
    found = PeersBench(Spec(24, (Layer(20, False, False),), twice=False, tied=False, seed=4696), chosen)
    program = found.program(chosen)
    (pulled, first), (copied, second) = list(prefetches(program))[-2:]
    assert (first.weight, second.weight) == ("head.weight", "up.0.weight") and first.window == second.window
    assert program.plan.pulled == {first.weight}
    with program.module.graph.inserting_before(copied):
        program.module.graph.call_function(WAIT, (pulled.kwargs["then"], (first.weight,)))
    verify(program)
    matches(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_what_verify_accepts_is_right_and_what_is_wrong_it_rejects(mutation: Mutation) -> None:
    count: Counter[str] = Counter()

    @examples(230, 3)
    @given(specs, st.lists(choices, min_size=3, max_size=3), st.integers(0, 2**16))
    def check_all(spec: Spec, plans: list[Choices], seed: int) -> None:
        for chosen in plans:
            found = PeersBench(spec, chosen)
            program = mutation(found.program(chosen), random.Random(seed))
            if program is None:
                continue
            program.module.recompile()
            refused = bool(list(check(program)))
            wrong = goes_wrong(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            assert refused or not wrong, mutation.__name__
            count.update(made=1, refused=refused)

    check_all()
    assert count["made"] and count["refused"]


@dataclass(frozen=True, eq=False)
class WithoutOne(Pieces):
    """Brings nothing from the piece of ``gone``."""

    gone: int = 0

    def copies(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part, copy in zip(self.parts, super().copies(target), strict=True):
            if part.owner != self.gone:
                yield copy


@dataclass(frozen=True, eq=False)
class FreedEarly(Pieces):
    """The piece of ``gone`` is another's memory after the first copy from it."""

    gone: int = 0

    def copies(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from super().copies(target)
        if any(part.owner == self.gone for part in self.parts):
            self.held[self.gone].fill_(255)


def left_out(pieces: Pieces, owner: int) -> Pieces:
    return WithoutOne(**vars(pieces), gone=owner)


def freed_early(pieces: Pieces, owner: int) -> Pieces:
    return FreedEarly(**vars(pieces), gone=owner)


def in_another_order(pieces: Pieces, owner: int) -> Pieces:
    held = [*pieces.held]
    other = (owner + 1) % len(held)
    held[owner], held[other] = held[other], held[owner]
    return replace(pieces, held=held)


def written_after_it_was_dealt(pieces: Pieces, owner: int) -> Pieces:
    held = [piece.clone() for piece in pieces.held]
    held[owner].view(torch.float32).mul_(2)
    return replace(pieces, held=held)


def pulled_from(plan: Plan, found: PeersBench) -> list[tuple[str, int]]:
    """The weights that come from pieces in every step, and owners of the bytes."""
    pulled = set[tuple[str, int]]()
    for weight in plan.streamed:
        for run in runs(weight.windows) if weight.home == "peers" else ():
            if run.window is not None:
                source = found.pieces[weight.name][slice(*plan.span(weight, run.first, run.end))]
                pulled |= {(weight.name, part.owner) for part in source.parts}
    return sorted(pulled)


@pytest.mark.parametrize("mutant", [left_out, freed_early, in_another_order, written_after_it_was_dealt])
def test_nothing_else_than_the_pieces_is_right(
    mutant: Callable[[Pieces, int], Pieces], record_property: Callable[[str, object], None]
) -> None:
    """One piece of one weight is another than the one that was dealt: every time, a schedule shows a wrong number."""
    count: Counter[str] = Counter()

    @examples(210, 8)
    @given(specs, choices)
    def check_all(spec: Spec, chosen: Choices) -> None:
        found = PeersBench(spec, chosen)
        program: Program = found.program(chosen)
        if pulled := pulled_from(program.plan, found):
            name, owner = random.Random(chosen.seed).choice(pulled)
            found.pieces[name] = mutant(found.pieces[name], owner)
            shown = goes_wrong(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            assert shown, (name, owner)
            count.update(mutants=1, **{shown: 1})

    check_all()
    assert count["mutants"] >= 4
    record_property("counts", f"{mutant.__name__}: {listed(count)}")
