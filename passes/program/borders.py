"""Borders: proves that after a jump to a call of a cycle, the arena is in the same state as in a pass without jumps.

A pass without jumps is proved by verify.  At the border before a call, some chunks are in flight or in use.  A jump first
copies exactly these chunks, in the order in which the pass would have issued them.  Every later read waits for one of these
copies, for a later copy, or for a resident chunk.  So the call, and every call after it, finds the same data as in the
pass, and the proof of the pass holds.

A captured call after a jump waits for all copies of the jump.  An eager call waits as in a sequence of eager calls.  So it
is enough to check the order of eager calls.

Contract
    Reads only a cycle and its order.  The chunks that are live at a border are derived from the ops, not from the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from chunkflow_compile.passes.step import Op, copies, weights_of

from .cycle import Cycle
from .happens_before import HappensBefore, Issued

# The indices of the readers and the evict of a weight, by the weight and the pass.
_Uses = Mapping[tuple[str, int | None], list[int]]


def check_borders(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Check the jump to each call: it must first copy the chunks that are in flight or in use before this call in the
    second of two passes."""
    begins: dict[int, int] = {}
    uses: dict[tuple[str, int | None], list[int]] = {}
    waits: dict[str, list[_Wait]] = {}
    kept: dict[str, int] = {}  # for each weight, the newest copy of its resident chunks
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
    alive = list[tuple[int, int]]()  # copies whose last use is still to come: (index of this use, index of the copy)
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
    """The index of a wait, and the index of the copy for whose arrival it waits.

    A jump records the arrival of a copy again only if the jump repeats this copy.  The arrival of any other copy before
    the jump does not imply the arrival of the copies of the jump.
    """

    at: int
    arrival: int


def _chunks(ops: Iterable[Op]) -> list[tuple[str, int]]:
    """Return the weights and chunks of all copies among ops."""
    return [(op.weight, chunk) for op in copies(ops) for chunk in range(op.first, op.end)]


def _last_use(order: HappensBefore, uses: _Uses, copy: Issued) -> int:
    """Return the index of the last op that uses the chunks of a copy, or the number of ops if the last use is in a pass
    that is not unrolled."""
    if copy.serves is not None and copy.serves >= order.steps:
        return len(order.ops)
    (weight,) = weights_of(copy.op)
    return max(uses.get((weight, copy.serves), ()), default=-1)
