"""Reads: the proof that no copy finds other bytes in the ring than those of its own read.

It is proved for a cold start and the passes after it, and where programs take turns, that

* a read goes to a block of the ring, with room for all blocks of the file that it touches,
* a read comes after every copy out of its bytes that was issued before it, and
* a copy out of the ring comes after its read, which is the newest one that was issued into these bytes.

A copy that waits for no read reads its file itself.  A jump to a call reads again what a pass has read there for later
copies, in the same order, and so does a cold start.  All copies that were issued before it come before these reads.  Captured
calls have no reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chunkflow_compile.passes.ring import BLOCK, room
from chunkflow_compile.passes.step import Copy, Read, reads

from .cycle import Cycle
from .happens_before import HappensBefore, newest


@dataclass
class _Held:
    """Bytes of the ring up to ``end``, after a read at an index.  ``copied``: the indices of the copies out of them."""

    read: Read
    index: int
    end: int
    copied: list[int] = field(default_factory=list)


def check_reads(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """The violations of a cycle in the ring, as sentences.  ``order``: its own, over a cold start and its steps."""
    yield from check_ring(order)
    if any(each.read for each in order.ops):
        yield from _check_prologues(cycle, order)


def check_ring(order: HappensBefore) -> Iterator[str]:
    """The violations of unrolled programs in the ring, as sentences."""
    if all(each.ring is None for each in order.ops):
        return
    weights = [{w.name: w for w in turn.plan.streamed} for turn in order.turns]
    newest_read, newest_copy = newest(order.ops, "read"), newest(order.ops, "copy")
    held = list[_Held]()
    for i, each in enumerate(order.ops):
        if (read := each.read) is not None:
            nbytes = order.turns[each.turn].plan.nbytes(weights[each.turn][read.weight], read.first, read.end)
            end = read.ring + room(nbytes)
            if read.ring < 0 or read.ring % BLOCK:
                yield f"{read.weight}: {each} begins at byte {read.ring} of the ring, where no block does"
            over = [other for other in held if other.read.ring < end and read.ring < other.end]
            for other in over:
                if any(copy > newest_copy[i] for copy in other.copied):
                    name = other.read.weight
                    yield (
                        f"{read.weight}: {each} overwrites bytes of the ring that the copy of {name} may still use; "
                        f"missing edge: prefetch({name!r}) -> {each.label}"
                    )
            held = [*(other for other in held if other not in over), _Held(read, i, end)]
        elif (copy := each.copy) is not None and copy.ring is not None:
            mine = next((other for other in held if _serves(other.read, copy)), None)
            if mine is None:
                yield f"{copy.weight}: {each} takes bytes of the ring that hold no read of them"
                continue
            mine.copied.append(i)
            if mine.index > newest_read[i]:
                yield (
                    f"{copy.weight}: {each} may copy before its bytes are read; missing edge: "
                    f"{order.ops[mine.index].label} -> {each.label}"
                )


def _serves(read: Read, copy: Copy) -> bool:
    return (read.weight, read.first, read.end, read.ring) == (copy.weight, copy.first, copy.end, copy.ring)


def _check_prologues(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Check that a start at each call reads again what is read ahead of its copies there in the second of two passes, after
    all copies that were issued before."""
    ahead, expected = list[Read](), dict[int, list[Read]]()
    for each in order.ops:
        if each.step == 1:
            expected.setdefault(each.call, [*ahead])
        if each.read is not None:
            ahead.append(each.read)
        elif (copy := each.copy) is not None:
            ahead = [read for read in ahead if not _serves(read, copy)]
    earlier = next(each for each in order.ops if each.copy and each.ring is not None)
    for call in range(len(cycle.calls)):
        first = cycle.prologue(call, jumps=call > 0)
        ops = [earlier, *(earlier._replace(op=op) for op in first)]
        if [*reads(first)] != expected[call]:
            yield f"a start at call {call} does not read what is read ahead there in a pass"
        if any(each.read and copied < 0 for each, copied in zip(ops, newest(ops, "copy"), strict=True)):
            yield f"a start at call {call} reads into the ring before all earlier copies out of it have ended"
