"""Reads: proves that a copy out of the ring always finds the bytes that its read has stored there.

The checks cover a cold start and the following passes over a cycle, and programs that use the arena one after the other.  It
is proved that:

* A read uses bytes of the ring that begin at a block boundary and have space for all blocks of the file that the read
  touches.
* A read starts after all earlier copies out of the same bytes of the ring have ended.
* A copy out of the ring starts after its read has ended, and this read is the newest read into these bytes.

Reads and copies wait for each other in a fixed pattern.  Directly after a read, its event is recorded.  Directly before a
copy out of the ring, the copy stream waits for the event of the copy's read.  Directly before the stream of reads waits for
an event, the copy stream records this event.  Because of this pattern, prologues can find the event of each read, and a
stream on a host thread (runtime/streams.py) can find the place where the event that it waits for was recorded.  The pattern
also permits leaving reads out of captured calls, and out of programs whose weights are in host memory.

If the weight of a copy is in a file and the copy does not use the ring, the copy itself reads the file.  The prologue of a
call, at a jump or a cold start, repeats reads: in a pass without jumps, these reads are issued before the call, for copies of
this call or of later calls.  Their order is the same as in the pass.  These reads start after all copies that were issued
before the prologue have ended.  Captured calls contain no reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from chunkflow_compile.passes.names import LANES
from chunkflow_compile.passes.ring import BLOCK, slot_bytes
from chunkflow_compile.passes.step import Copy, Op, Read, Record, Wait

from .cycle import Cycle
from .happens_before import HappensBefore, newest


@dataclass
class _Held:
    """Bytes of the ring that a read has filled.  ``index``: index of the read among the ops.  ``end``: end of these bytes
    in the ring.  ``copied``: indices of the copies that take these bytes."""

    read: Read
    index: int
    end: int
    copied: list[int] = field(default_factory=list)


def check_reads(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Yield a sentence for each violation in a cycle's use of the ring.  ``order``: order of this cycle, unrolled with a cold
    start."""
    yield from _check_neighbours(cycle)
    yield from check_ring(order)
    if any(each.read for each in order.ops):
        yield from _check_prologues(cycle, order)


def check_ring(order: HappensBefore) -> Iterator[str]:
    """Yield a sentence for each violation in the use of the ring by unrolled programs."""
    if all(each.ring is None for each in order.ops):
        return
    weights = [{w.name: w for w in turn.plan.streamed} for turn in order.turns]
    newest_read, newest_copy = newest(order.ops, "read"), newest(order.ops, "copy")
    held = list[_Held]()
    for i, each in enumerate(order.ops):
        if (read := each.read) is not None:
            if (weight := weights[each.turn].get(read.weight)) is None:
                continue  # check_readers reports it
            nbytes = order.turns[each.turn].plan.nbytes(weight, read.first, read.end)
            end = read.ring + slot_bytes(nbytes)
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


def _check_neighbours(cycle: Cycle) -> Iterator[str]:
    """Check the pattern of reads and copies that the module docstring describes.  In each call, it determines which ops are
    directly before and after reads, copies out of the ring, and their events."""
    neighbours = list(_neighbours(cycle))
    recorded = Counter(op.event for _, op, _ in neighbours if isinstance(op, Record))
    awaited = Counter(op.event for _, op, _ in neighbours if isinstance(op, Wait))
    marked = dict[int, Read]()  # reads by their events
    for _, op, after in neighbours:
        if isinstance(op, Read):
            if isinstance(after, Record) and after.stream == "read" and recorded[after.event] == 1:
                marked[after.event] = op
            else:
                yield f"{op.weight}: a read is not directly followed by an event of its own"
    for before, op, after in neighbours:
        match op:
            case Record(stream="read") if not isinstance(before, Read):
                yield f"event {op.event} of the stream of reads is not directly after a read"
            case Wait(stream="read") if before != Record("copy", op.event):
                yield f"a read waits for event {op.event}, which copies do not record directly before"
            case Wait() if (read := marked.get(op.event)) is not None:
                own = isinstance(after, Copy) and _serves(read, after) and op.stream == after.stream == "copy"
                if not own or awaited[op.event] > 1:
                    yield f"{read.weight}: its read is awaited elsewhere than directly before the copy out of its bytes"
            case Copy() if op.ring is not None and not (isinstance(before, Wait) and before.event in marked):
                yield f"{op.weight}: a copy out of the ring is not directly after the wait for its read"


def _neighbours(cycle: Cycle) -> Iterator[tuple[Op | None, Op, Op | None]]:
    """Yield the ops that each call issues, each with its predecessor and successor."""
    for call in cycle.ops:
        yield from zip((None, *call), call, (*call[1:], None), strict=False)


def _check_prologues(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Check the reads in the prologue of a jump to each call, and in the prologue of a cold start.  When a pass reaches the
    call, some reads have been issued whose copies have not been issued yet.  The prologue must contain exactly these reads,
    with the events that they have in the pass.  The reads must come after all copies that were issued before the prologue."""
    marks = {op: after for _, op, after in _neighbours(cycle) if isinstance(op, Read)}
    lanes = LANES if cycle.plan.pulled else LANES[:1]  # a device has at least these lanes
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
        first = cycle.prologue(call, lanes, jumps=call > 0)
        ops = [earlier, *(earlier._replace(op=op) for op in first)]
        again = [op for op in first if op.stream == "read" and not isinstance(op, Wait)]
        if again != [op for read in expected[call] for op in (read, marks[read])]:
            yield f"a start at call {call} does not read what is read ahead there in a pass"
        if any(each.read and copied < 0 for each, copied in zip(ops, newest(ops, "copy"), strict=True)):
            yield f"a start at call {call} reads into the ring before all earlier copies out of it have ended"
