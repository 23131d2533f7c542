"""Borders: proves that after a jump to a call of a cycle, the arena is in the same state as in a pass over the cycle without
jumps.

The other checks of verify prove that passes without jumps are safe.  At the border between two calls of such a pass, some
chunks are in flight or in use.  The prologue of a jump copies exactly these chunks, in the order in which the pass would have
issued their copies.  Every reader after the jump waits for one of these copies, for a copy that is issued after the jump, or
for a resident chunk.  So the call at which a jump arrives, and every later call, finds the same data as in the pass, and the
proof of the pass holds for these calls, too.

Only the order of eager calls is checked.  For captured calls (CUDA graphs), no check is needed, because a captured call waits
for all copies of the prologue.

Contract
    The checks read only a cycle and its order.  The chunks that are live at a border are derived from the ops, not from the
    plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from chunkflow_compile.passes.step import Op, copies, weights_of

from .cycle import Cycle
from .happens_before import HappensBefore, Issued

# For a weight and a pass, the indices of the ops that read or evict the weight in this pass.
_Uses = Mapping[tuple[str, int | None], list[int]]


def check_borders(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Check the prologue of a jump to each call: it must copy the chunks that are in flight or in use when the second of two
    unrolled passes reaches this call."""
    begins: dict[int, int] = {}
    uses: dict[tuple[str, int | None], list[int]] = {}
    waits: dict[str, list[_Wait]] = {}
    kept: dict[str, int] = {}  # for each weight, the index of the newest copy of its resident chunks
    for i, each in enumerate(order.ops):
        if each.copy is not None and each.serves is None:
            kept[each.copy.weight] = i
        if each.step == 1:
            begins.setdefault(each.call, i)
            if each.readable and (copy := order.awaited(i)) is not None:
                for weight in each.readable:
                    if cycle.plan.lane(weight) == order.ops[copy].stream:
                        waits.setdefault(weight, []).append(_Wait(i, copy))
        for weight in (*each.reads, *each.evicts):
            uses.setdefault((weight, each.step), []).append(i)
    # copies whose chunks are still needed: (index of the last op that uses the chunks, index of the copy)
    alive = list[tuple[int, int]]()
    seen = 0
    for call in range(1, len(cycle.calls)):
        begin, first = begins[call], cycle.prologue(call, jumps=True)
        fresh = (i for i in range(seen, begin) if order.ops[i].serves is not None)
        alive += [(_last_use(order, uses, order.ops[i]), i) for i in fresh]
        alive, seen = [(last, i) for last, i in alive if last >= begin], begin
        fetched, expected = _chunks(first), _chunks(order.ops[i].op for _, i in alive)
        if fetched != expected:
            odd = next(a or b for a, b in zip_longest(fetched, expected) if a != b)
            yield f"{odd[0]}: a jump to call {call} does not fetch what is on its way there in a pass, see chunk {odd[1]}"
        if first[-1].stream == "compute":  # compute waits for all copies of the jump
            continue
        due = kept | {weights_of(order.ops[i].op)[0]: i for _, i in alive if order.ops[i].serves == 1}
        marked = {i for _, i in alive} | set(kept.values())
        for name in (w.name for w in cycle.plan.streamed):
            read = next((i for i in uses.get((name, 1), ()) if i >= begin), None)
            if read is not None and not any(
                begin <= w.at < read and w.arrival >= due.get(name, -1) and (w.arrival >= begin or w.arrival in marked)
                for w in waits.get(name, ())
            ):
                yield f"{name}: after a jump to call {call}, {order.ops[read]} does not wait for it"


class _Wait(NamedTuple):
    """A wait.  ``at``: index of the wait.  ``arrival``: index of the copy for whose arrival it waits.

    The prologue of a jump repeats copies and records their arrivals again.  An op after the jump may wait for the arrival of
    a copy that was issued before the jump and that the prologue does not repeat.  Such a wait ends at once, although the
    copies of the prologue may still be in flight.
    """

    at: int
    arrival: int


def _chunks(ops: Iterable[Op]) -> list[tuple[str, int]]:
    """Return the chunks that the copies in ``ops`` copy, each as a pair of weight and index."""
    return [(op.weight, chunk) for op in copies(ops) for chunk in range(op.first, op.end)]


def _last_use(order: HappensBefore, uses: _Uses, copy: Issued) -> int:
    """Return the index of the last op that uses the chunks of a copy, or the number of ops if this use comes after the
    unrolled passes."""
    if copy.serves is not None and copy.serves >= order.steps:
        return len(order.ops)
    (weight,) = weights_of(copy.op)
    return max(uses.get((weight, copy.serves), ()), default=-1)
