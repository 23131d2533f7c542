"""Reads of the drive: no read goes into bytes that a copy may still use, and no copy comes before its read."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from helpers import Stack, cut_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.ops import PREFETCH, READ, WAIT
from chunkflow_compile.passes.program.cycle import Call, Cycle, problem_of, write
from chunkflow_compile.passes.program.happens_before import HappensBefore
from chunkflow_compile.passes.program.reads import check_reads
from chunkflow_compile.passes.program.verify import CHECKED_STEPS, check, verify
from chunkflow_compile.passes.ring import BLOCK, MOST_READ_AHEAD, lap_bytes, ring_slots, slot_bytes
from chunkflow_compile.passes.step import Record, Wait, copies, reads
from chunkflow_compile.weights.drive import for_the_drive

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(max_examples=60)
@given(sizes)
def test_a_byte_has_one_read_at_a_time(step: list[int]) -> None:
    """Against a map of the ring, block by block, in which only the reads that must be over are forgotten."""
    count, held = len(step), dict[int, int]()
    before = -count
    slots = ring_slots([nbytes * BLOCK for nbytes in step])
    for number, nbytes in enumerate(islice(itertools.cycle(step), 3 * count)):
        slot = slots[number % count]
        after = number - number % count + slot.after
        assert number - count <= after < number, "a copy that comes before its own"
        assert after >= before, "reads are in order"
        before = after
        assert slot.begin >= 0 and slot.begin % BLOCK == 0 and slot.end - slot.begin == slot_bytes(nbytes * BLOCK)
        blocks = range(slot.begin // BLOCK, slot.end // BLOCK)
        held = {block: read for block, read in held.items() if read > after}
        assert not held.keys() & set(blocks)
        held |= dict.fromkeys(blocks, number)


def test_the_size_of_the_ring() -> None:
    eight = slot_bytes(8)
    assert eight == 2 * BLOCK and slot_bytes(BLOCK) == 2 * BLOCK and slot_bytes(BLOCK + 1) == 3 * BLOCK
    assert lap_bytes([8, 8, 8, 8]) == 2 * eight and lap_bytes([8] * 100) == 26 * eight
    assert lap_bytes([MOST_READ_AHEAD] * 100) == 2 * slot_bytes(MOST_READ_AHEAD)
    assert lap_bytes([2 * MOST_READ_AHEAD, 1]) == 2 * slot_bytes(2 * MOST_READ_AHEAD), (
        "one is copied while the next is read"
    )
    assert ring_slots([]) == []


@given(sizes)
def test_laps_are_about_as_large(step: list[int]) -> None:
    nbytes = [each * BLOCK for each in step]
    largest, capacity = slot_bytes(max(nbytes)), max(slot.end for slot in ring_slots(nbytes))
    assert capacity <= 2 * lap_bytes(nbytes) + largest
    many = 40 * nbytes
    assert capacity <= max(slot.end for slot in ring_slots(many)) <= 1.4 * lap_bytes(many) + largest


@given(st.integers(2, 200))
def test_each_read_is_ahead_of_the_copy_before_its_own(count: int) -> None:
    """With equal sizes the drive never waits for the copy that it could read beside."""
    assert all(slot.after < number - 1 for number, slot in enumerate(ring_slots([8] * count)))


@cache  # tests change copies of it
def proved_cycle() -> Cycle:
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


def cycle() -> Cycle:
    found = proved_cycle()
    return replace(found, calls=tuple(replace(call, module=copy.deepcopy(call.module)) for call in found.calls))


def test_a_copy_of_a_cycle_that_reads_the_drive_is_proved() -> None:
    """So what the other tests find is due to their changes."""
    found = cycle()
    assert not list(check(found))
    assert verify(found).version >= 5


Mutant = Callable[[Cycle, Node, Node], object]


def _without(node: Node, name: str) -> None:
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}


def _with(node: Node, **named: Any) -> None:
    node.kwargs = {**node.kwargs, **named}


def _moved(read: Node, ring: int) -> None:
    read.args = (*read.args[:3], ring)


def _of(weight: str, read: Node) -> None:
    read.args = (weight, *read.args[1:])


def _targets(of: Cycle, call: int, target: object) -> list[Node]:
    return [n for n in of.calls[call].module.graph.nodes if n.target is target]


def _swap_waits(of: Cycle) -> None:
    """The last copy of a call waits for the read of the first copy of the next call too, which is issued before it."""
    copy, then = _targets(of, 0, PREFETCH)[-1], next(n for n in _targets(of, 1, PREFETCH) if "read" in n.kwargs)
    _with(copy, read=then.kwargs["read"])
    _without(then, "read")


def _share_event(of: Cycle) -> None:
    """A read records the event that compute awaits after the copy of its bytes."""
    awaited = {op.event for op in of.step if isinstance(op, Wait) and op.stream == "compute"}
    copy = next(n for n in _targets(of, 1, PREFETCH) if "read" in n.kwargs and n.kwargs.get("then") in awaited)
    read = next(n for call in range(2) for n in _targets(of, call, READ) if n.args[:3] == copy.args[:3])
    _with(read, then=copy.kwargs["then"])
    _with(copy, read=copy.kwargs["then"])


def _delay(of: Cycle) -> None:
    """The last read of a call is issued by the next one."""
    read, first = _targets(of, 0, READ)[-1], _targets(of, 1, PREFETCH)[0]
    with first.graph.inserting_before(first):
        first.graph.call_function(READ, read.args, dict(read.kwargs))
    read.graph.erase_node(read)


def _wait_on_compute(read: Node) -> None:
    with read.graph.inserting_after(read):
        read.graph.call_function(WAIT, (read.kwargs["then"], ()))


# How a cycle is broken, such as at a copy out of the ring and at a read in the middle of a call, and what is said of it.
MUTANTS: dict[str, tuple[Mutant, str]] = {
    "a copy waits for no read": (lambda _, copy, read: _without(copy, "read"), "missing edge: read"),
    "a read marks nothing": (lambda _, copy, read: _without(read, "then"), "missing edge: read"),
    "a read is lost": (lambda _, copy, read: read.graph.erase_node(read), "hold no read of them"),
    "a copy takes other bytes": (
        lambda _, copy, read: _with(copy, ring=copy.kwargs["ring"] + BLOCK),
        "hold no read of them",
    ),
    "a read goes elsewhere": (lambda _, copy, read: _moved(read, 1 << 20), "hold no read of them"),
    "a read begins within a block": (lambda _, copy, read: _moved(read, read.args[3] + 1), "where no block does"),
    "a read waits for no copy": (lambda _, copy, read: _without(read, "after"), "missing edge: prefetch"),
    "a read comes too early": (
        lambda _, copy, read: next(n for n in read.graph.nodes if n.target is PREFETCH).prepend(read),
        "hold no read of them",
    ),
    "a read is of another weight": (
        lambda _, copy, read: _of("no such weight", read),
        "no such weight: .* it is not streamed",
    ),
    "a copy waits for the read of the next one": (
        lambda of, copy, read: _swap_waits(of),
        "awaited elsewhere than directly before the copy out of its bytes",
    ),
    "a read records the event of its copy": (
        lambda of, copy, read: _share_event(of),
        "followed by an event of its own",
    ),
    "a read is issued by the next call": (
        lambda of, copy, read: _delay(of),
        "which copies do not record directly before",
    ),
    "compute waits for a read": (
        lambda _, copy, read: _wait_on_compute(read),
        "awaited elsewhere than directly before the copy out of its bytes",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_rejects(name: str) -> None:
    """Without the check of reads each of them is accepted, but for those that other checks see too."""
    change, named = MUTANTS[name]
    of = cycle()
    nodes = [*of.calls[1].module.graph.nodes]
    read = next(n for n in nodes[len(nodes) // 2 :] if n.target is READ and "after" in n.kwargs)
    copy = next(n for n in nodes[len(nodes) // 2 :] if n.target is PREFETCH and "read" in n.kwargs)
    change(of, copy, read)
    with pytest.raises(FindingError, match=named):
        verify(of)


def test_a_jump_reads_what_is_read_ahead_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    of, plain = cycle(), Cycle.prologue
    order = HappensBefore((of,), CHECKED_STEPS)
    for call in range(2):
        again = [*reads(plain(of, call, jumps=True))]
        assert again and again == [*reads(plain(of, call))], "as a cold start there"
        of_ring = [
            op for op in copies(op for ops in (*of.ops[call:], *of.ops[:call]) for op in ops) if op.ring is not None
        ]
        assert [(op.weight, op.first) for op in again] == [(op.weight, op.first) for op in of_ring[: len(again)]]

    def without_the_first(self: Cycle, call: int, *rest: Any, **named: Any) -> Any:
        ops = plain(self, call, *rest, **named)
        first = next(reads(ops))
        return tuple(op for op in ops if op != first or not named.get("jumps"))

    monkeypatch.setattr(Cycle, "prologue", without_the_first)
    assert "a start at call 1 does not read what is read ahead there in a pass" in list(check_reads(of, order))


def test_a_start_waits_for_the_copies_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any two programs or calls, so also where the copies that run into it are of other bytes."""
    of, plain = cycle(), Cycle.prologue
    one = LANES[:1]  # all that a device has where nothing is pulled
    begin = plain(of, 0, one)[:5]  # a join, and the handover to the lane and to the reads
    assert [type(op) for op in begin] == [Record, Wait, Record, Wait, Wait]

    def without_a_join(self: Cycle, call: int, lanes: Sequence[Lane] = LANES, **named: Any) -> Any:
        return plain(self, call, lanes, **named)[2 if lanes == one else 0 :]

    monkeypatch.setattr(Cycle, "prologue", without_a_join)
    said = "".join(check_reads(of, HappensBefore((of,), CHECKED_STEPS)))
    assert "a start at call 0 reads into the ring before all earlier copies out of it have ended" in said


def test_what_is_pulled_takes_no_room_in_the_ring() -> None:
    """No weight that lies in pieces is read, also if its values are on the drive."""
    of = cycle()
    name = next(reads(of.ops[0])).weight
    weights = [replace(w, source=replace(w.source, ranks=2)) if w.name == name else w for w in of.problem.weights]
    pulled = replace(of, problem=replace(of.problem, weights=tuple(weights)))
    read = {op.weight for op in reads(pulled.step)}
    assert name not in read and read == {op.weight for op in reads(of.step)} - {name}
