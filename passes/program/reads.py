"""Reads: the copies of a cycle that read the drive, and the proof that none finds other bytes in the ring than its own.

The reader takes the order from here, and so does the proof; the slots in the ring are those of ``passes/ring.py``.  It is
proved for a cold start and for a jump to each call, over what is fetched first and two passes, that

* the drive is read in the order in which the copies are issued,
* a read stays within the ring, and has room there for all blocks of the file that it touches,
* a read waits for copies of earlier reads only, so that reads and copies never wait for each other, and
* a read goes into no bytes that a copy may still use: it waits for every earlier copy of them.

Captured calls copy in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from chunkflow_compile.passes.ring import BLOCK, Ring, RingSlot, ring_bytes, room
from chunkflow_compile.passes.step import Copy, Op, copies

from .cycle import Cycle
from .happens_before import HappensBefore


@dataclass(frozen=True)
class Reads:
    """The copies that read the drive from a call on: ``first``, then ``repeated`` from ``begin`` on, again and again."""

    first: tuple[Copy, ...]
    repeated: tuple[Copy, ...]
    begin: int

    def passes(self, count: int) -> Iterator[Copy]:
        """The reads of a start at the call and of ``count`` passes."""
        around = (*self.repeated[self.begin :], *self.repeated[: self.begin])
        return chain(self.first, *(around for _ in range(count)))


def reads_from(cycle: Cycle, call: int, drive: Collection[str]) -> Reads:
    """The reads from a cold start at a call, or a jump to it, on.  ``drive``: names of the weights on the drive."""
    if not drive:
        return Reads((), (), 0)
    calls = [_reads(ops, drive) for ops in cycle.ops]
    return Reads(
        first=_reads(cycle.prologue(call, jumps=True), drive),
        repeated=tuple(chain.from_iterable(calls)),
        begin=sum(map(len, calls[:call])),
    )


def _reads(ops: Iterable[Op], drive: Collection[str]) -> tuple[Copy, ...]:
    return tuple(copy for copy in copies(ops) if copy.weight in drive)


def check_reads(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """The violations of a cycle in the ring, as sentences.  ``order``: its own, over a cold start and its steps."""
    plan = cycle.plan
    weights = {w.name: w for w in plan.streamed}
    drive = {w.name for w in cycle.problem.weights if w.source.file and w.name in weights} - plan.pulled
    if not drive:
        return

    def nbytes(op: Copy) -> int:
        return plan.nbytes(weights[op.weight], op.first, op.end)

    for call in range(len(cycle.calls)):
        reads = reads_from(cycle, call, drive)
        if call == 0:
            yield from _check_order(reads, order, drive)
        capacity = ring_bytes([nbytes(op) for op in reads.repeated])
        unrolled = list(reads.passes(order.steps))
        yield from _check_ring(call, unrolled, [nbytes(op) for op in unrolled], capacity)


def _check_order(reads: Reads, order: HappensBefore, drive: Collection[str]) -> Iterator[str]:
    copied = [each.op for each in order.ops if each.serves is not None]
    expected = [(op.weight, chunk) for op in _reads(copied, drive) for chunk in range(op.first, op.end)]
    read = [(op.weight, chunk) for op in reads.passes(order.steps) for chunk in range(op.first, op.end)]
    for number, (ours, theirs) in enumerate(zip(read, expected, strict=False)):
        if ours != theirs:
            mine, wanted = (f"chunk {chunk} of {weight}" for weight, chunk in (ours, theirs))
            yield f"read {number} of the drive brings {mine}, but the copy that takes it is of {wanted}"
            return
    if len(read) != len(expected):
        yield f"{len(read)} chunks are read from the drive, but {len(expected)} are copied"


def _check_ring(call: int, reads: Sequence[Copy], sizes: Sequence[int], capacity: int) -> Iterator[str]:
    """Reads into a ring of ``capacity`` bytes, each of so many bytes, after a start at a call."""
    ring, slots = Ring(capacity), list[RingSlot]()
    for number, (op, nbytes) in enumerate(zip(reads, sizes, strict=True)):
        slots.append(slot := ring.slot(nbytes))
        if slot.begin < 0 or slot.end > capacity or slot.end - slot.begin < room(nbytes) or slot.begin % BLOCK:
            yield f"{op.weight}: {_read_text(op)} goes to bytes {slot.begin} to {slot.end} of a ring of {capacity}"
        if slot.after > number:
            yield f"{op.weight}: {_read_text(op)} waits for a copy that comes after its own (from call {call} on)"
        for earlier in range(slot.after, number):
            if slots[earlier].begin < slot.end and slot.begin < slots[earlier].end:
                yield (
                    f"{op.weight}: {_read_text(op)} goes to bytes of the ring that the copy of {_read_text(reads[earlier])} "
                    f"may still use (from call {call} on); "
                    f"missing edge: copy of {reads[earlier].weight} -> read of {op.weight}"
                )
                return


def _read_text(op: Copy) -> str:
    return f"read({op.weight!r}, chunks {op.first} to {op.end - 1})"
