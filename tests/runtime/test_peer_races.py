"""Races of programs whose weights are sharded over the devices of ranks: only the pieces as they were sharded give the
model's numbers.  ``test_races.py`` draws legal and mutated programs of such weights."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import without_joins
from hypothesis import given
from mutations import listed
from random_programs import Bench, Choices, Layer, Spec, choices, examples, in_turns, pooled
from schedules import goes_wrong, matches

from chunkflow_compile.passes.ops import WAIT
from chunkflow_compile.passes.plan import Plan, runs
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.runtime import executor
from chunkflow_compile.weights.peer_pieces import Pieces

STEPS = 3

pytestmark = pytest.mark.usefixtures("one_rank", "small_stripes")

# The choices of plans whose weights are sharded.
sharded = choices.map(lambda chosen: replace(chosen, peers=True))


def test_without_the_wait_for_both_lanes_they_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one program has in flight in a lane arrives over what the next has copied in the other."""
    without_joins(monkeypatch, executor)
    shown: Counter[str] = Counter()

    @examples(220, 6)
    @given(pooled, sharded, sharded)
    def check_all(spec: Spec, one: Choices, other: Choices) -> None:
        shown[goes_wrong(*in_turns(spec, one, other), one.seed)] += 1

    check_all()
    assert shown["number"]


def test_a_window_in_two_parts_opens_in_the_lane_of_each() -> None:
    """Compute waits for the first part, which is pulled.  The second is copied over a weight that is read until then."""
    chosen = Choices(stay=0.0, reach=1, hard=False, seed=65535, peers=True)
    found = Bench(Spec(24, (Layer(20, False, False),), twice=False, tied=False, seed=4696), chosen)
    program = found.program(chosen)
    (pulled, first), (copied, second) = list(prefetches(program))[-2:]
    assert (first.weight, second.weight) == ("head.weight", "up.0.weight") and first.window == second.window
    assert program.plan.pulled == {first.weight}
    with program.module.graph.inserting_before(copied):
        program.module.graph.call_function(WAIT, (pulled.kwargs["then"], (first.weight,)))
    verify(program)
    matches(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)


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


def pulled_from(plan: Plan, found: Bench) -> list[tuple[str, int]]:
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

    @examples(210, 6)
    @given(pooled, sharded)
    def check_all(spec: Spec, chosen: Choices) -> None:
        found = Bench(spec, chosen)
        program: Program = found.program(chosen)
        if pulled := pulled_from(program.plan, found):
            name, owner = random.Random(chosen.seed).choice(pulled)
            found.pieces[name] = mutant(found.pieces[name], owner)
            shown = goes_wrong(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            assert shown, (name, owner)
            count.update(mutants=1, **{shown: 1})

    check_all()
    assert count["mutants"] >= 3
    record_property("counts", f"{mutant.__name__}: {listed(count)}")
