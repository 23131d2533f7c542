"""The ring of the drive: no read goes into bytes that a copy may still use; the verifier refuses a ring where one does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from helpers import Stack, cut_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.problem import Source
from chunkflow_compile.passes.program import reads
from chunkflow_compile.passes.program.cycle import Call, Cycle, problem_of, write
from chunkflow_compile.passes.program.happens_before import HappensBefore
from chunkflow_compile.passes.program.reads import Reads, check_reads
from chunkflow_compile.passes.program.verify import CHECKED_STEPS, check, verify
from chunkflow_compile.passes.ring import BLOCK, Ring, RingSlot, room
from chunkflow_compile.passes.step import Copy, copies
from chunkflow_compile.weights.drive import for_the_drive

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(max_examples=60)
@given(sizes, st.integers(0, 100), st.integers(1, 60))
def test_a_byte_has_one_read_at_a_time(step: list[int], spare: int, count: int) -> None:
    """Against a map of the ring, byte by byte, in which only the reads that must be over are forgotten."""
    capacity = room(max(step)) + spare
    ring, held = Ring(capacity), dict[int, int]()
    for number, nbytes in enumerate(islice(itertools.cycle(step), count)):
        slot = ring.slot(nbytes)
        assert slot.after <= number and slot.end - slot.begin == room(nbytes)
        assert slot.begin >= 0 and slot.end <= capacity
        held = {byte: read for byte, read in held.items() if read >= slot.after}
        assert not held.keys() & set(range(slot.begin, slot.end))
        held |= dict.fromkeys(range(slot.begin, slot.end), number)


def cycle() -> Cycle:
    """Two calls of a small model, half of whose weights are on the drive, with a ring that is used several times a step."""
    cut = cut_of(Stack(4), torch.randn(4, 8))
    weights = [(w.name, w.nbytes) for w in cut.problem.weights]
    drive = for_the_drive(weights, sum(nbytes for _, nbytes in weights) // 2)
    calls = []
    for number in range(2):
        names = {w.name: f"{number}.{w.name}" for w in cut.problem.weights}
        calls.append(Call(cut, names, {}, frozenset(names[name] for name in drive)))
    found = write(calls, plan_of(problem_of(calls)))
    assert [w.source.file for w in found.problem.weights].count(True) >= 4
    return found


def test_a_cycle_that_reads_the_drive_is_proved() -> None:
    found = cycle()
    assert not list(check(found))
    assert verify(found).version >= 5


Change = Callable[[RingSlot, int], RingSlot]

# How a ring is broken: bytes that it gives beyond those asked for, what it does to the slot of a numbered read, and what is
# said of it.
RINGS: dict[str, tuple[int, Change, str]] = {
    "waits for one copy less": (0, lambda s, _: replace(s, after=max(0, s.after - 1)), "missing edge: copy of"),
    "waits for nothing": (0, lambda s, _: replace(s, after=0), "missing edge: copy of"),
    "begins in the read before": (0, lambda s, _: replace(s, begin=max(0, s.begin - BLOCK)), "missing edge: copy of"),
    "leaves the ring": (10_000_000, lambda s, _: s, "of a ring of"),
    "lacks the block that the bytes end in": (0, lambda s, _: replace(s, end=s.end - BLOCK), "of a ring of"),
    "begins within a block": (1, lambda s, _: replace(s, begin=s.begin + 1), "of a ring of"),
    "waits for its own copy": (
        0,
        lambda s, number: replace(s, after=number),
        "waits for a copy that comes after its own",
    ),
}


@pytest.mark.parametrize("name", RINGS)
def test_rejects_another_ring(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, change, named = RINGS[name]

    class Broken(Ring):
        _number = 0

        def slot(self, nbytes: int) -> RingSlot:
            self._number += 1
            return change(super().slot(nbytes + more), self._number)

    monkeypatch.setattr(reads, "Ring", Broken)
    with pytest.raises(FindingError, match=named):
        verify(cycle())


def _without_the_first(found: Reads) -> Reads:
    return replace(found, first=found.first[1:]) if found.first else replace(found, repeated=found.repeated[1:])


def _swapped(found: Reads) -> Reads:
    return replace(found, repeated=(found.repeated[1], found.repeated[0], *found.repeated[2:]))


@pytest.mark.parametrize(("change", "named"), [(_without_the_first, "read"), (_swapped, "brings chunk")])
def test_rejects_another_order_than_that_of_the_copies(
    change: Callable[[Reads], Reads], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reads.reads_from
    monkeypatch.setattr(reads, "reads_from", lambda *args: change(plain(*args)))
    of = cycle()
    assert any(named in said for said in check_reads(of, HappensBefore((of,), CHECKED_STEPS)))


def test_what_is_pulled_takes_no_room_in_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader brings no weight that lies in pieces, also if its values are on the drive."""
    of, read, plain = cycle(), set[str](), reads.reads_from

    def seen(*args: Any) -> Reads:
        found = plain(*args)
        read.update(op.weight for op in found.repeated)
        return found

    monkeypatch.setattr(reads, "reads_from", seen)
    assert not list(check_reads(of, HappensBefore((of,), CHECKED_STEPS)))
    pulled, *others = sorted(read)
    read.clear()
    weights = [replace(w, home="peers", source=Source(ranks=2)) if w.name == pulled else w for w in of.plan.weights]
    of = replace(of, plan=replace(of.plan, weights=tuple(weights)))
    assert not list(check_reads(of, HappensBefore((of,), CHECKED_STEPS)))
    assert sorted(read) == others


def test_reads_begin_again_at_every_call() -> None:
    """From each call on, the ring has what is fetched first there, and then the passes in their order."""
    found = cycle()
    drive = frozenset(w.name for w in found.problem.weights if w.source.file)

    def loop() -> Iterator[Copy]:
        return itertools.cycle(op for ops in found.ops for op in copies(ops) if op.weight in drive)

    for call in range(2):
        of = reads.reads_from(found, call, drive)
        assert of.begin == call * len(of.repeated) // 2 and len(of.repeated) >= 4
        expected = islice(loop(), of.begin, of.begin + 2 * len(of.repeated))
        assert list(of.passes(2)) == [*of.first, *expected]
