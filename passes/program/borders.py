"""Borders: prove that a jump to a call of a cycle finds the arena as a pass without jumps leaves it there.

A pass without jumps is proved by verify.  At the border before a call, some chunks are on their way or in use.  A jump
first fetches just these, in the order in which the pass would have issued them.  What is read from there on waits for one
of these, for a later copy, or for a chunk that stays.  So the call, and every call after it, finds what it would have found
in the pass, and the proof of the pass holds.

A captured call after a jump waits for all that the jump fetches, and an eager one as where all calls are eager.  So the
order of eager calls is enough.

Contract
    Reads a cycle and its order only: what is alive at a border follows from the ops, not from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from .cycle import Cycle, border
from .happens_before import HappensBefore, Op


def check_borders(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Check that a jump to each call first fetches what is on its way or in use there in the second of two passes."""
    begins: dict[int, int] = {}
    uses: dict[tuple[str, int | None], list[int]] = {}  # weight and pass -> its readers and its evict
    waits: dict[str, list[_Wait]] = {}
    kept: dict[str, int] = {}  # weight -> the newest copy of its chunks that stay
    for i, op in enumerate(order.ops):
        if op.kind == "chunk" and op.serves is None:
            kept[op.weight] = i
        if op.step == 1:
            begins.setdefault(op.call, i)
            for copy in _awaited(order, i) if op.kind == "wait" else ():
                for weight in op.weights:
                    if cycle.plan.lane(weight) == order.ops[copy].stream:
                        waits.setdefault(weight, []).append(_Wait(i, copy))
        for weight in (*op.reads, *([op.weight] if op.kind == "evict" else [])):
            uses.setdefault((weight, op.step), []).append(i)
    alive = list[tuple[int, int]]()  # each copied chunk whose last use is still to come, after the index of that use
    seen = 0
    for call in range(1, len(cycle.calls)):
        begin, first = begins[call], border(cycle, call)
        fresh = (i for i in range(seen, begin) if order.ops[i].kind == "chunk" and order.ops[i].serves is not None)
        alive += [(_last_use(order, uses, order.ops[i]), i) for i in fresh]
        alive, seen = [(last, i) for last, i in alive if last >= begin], begin
        expected = [(order.ops[i].weight, order.ops[i].chunk) for _, i in alive]
        chunks = [(p.copy.weight, c) for p in first.prefetches for c in range(p.copy.first, p.copy.end)]
        if chunks != expected:
            odd = next(a or b for a, b in zip_longest(chunks, expected) if a != b)
            yield f"{odd[0]}: a jump to call {call} does not fetch what is on its way there in a pass, see chunk {odd[1]}"
        if first.waits:
            continue
        due = kept | {order.ops[i].weight: i for _, i in alive if order.ops[i].serves == 1}
        marked = {i for _, i in alive} | set(kept.values())
        for name in (w.name for w in cycle.plan.streamed):
            read = next((i for i in uses.get((name, 1), ()) if i >= begin), None)
            if read is not None and not any(
                begin <= w.at < read and w.arrival >= due.get(name, -1) and (w.arrival >= begin or w.arrival in marked)
                for w in waits.get(name, ())
            ):
                yield f"{name}: after a jump to call {call}, {order.ops[read]} does not wait for it"


class _Wait(NamedTuple):
    """A wait, and the copy whose arrival it awaits.

    A jump records the arrival of a copy again only if it fetches those bytes; that of any other copy from before the jump
    says nothing of what the jump fetches.
    """

    at: int
    arrival: int


def _awaited(order: HappensBefore, i: int) -> list[int]:
    """The copy whose arrival the wait at an index awaits; none if that was not recorded."""
    return [copy for copy in order.graph.predecessors(i) if order.graph.edges[copy, i].get("event") == "arrival"]


def _last_use(order: HappensBefore, uses: Mapping[tuple[str, int | None], list[int]], op: Op) -> int:
    """The index of the last op that uses a chunk; after all ops, if that is in a pass that is not unrolled."""
    if op.serves is not None and op.serves >= order.steps:
        return len(order.ops)
    return max(uses.get((op.weight, op.serves), ()), default=-1)
