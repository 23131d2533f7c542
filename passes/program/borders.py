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

from chunkflow_compile.passes.ops import prefetch_of

from .cycle import Cycle, border
from .happens_before import HappensBefore, Op


def check_borders(cycle: Cycle, order: HappensBefore) -> Iterator[str]:
    """Check that a jump to each call first fetches what is on its way or in use there in the second of two passes."""
    begins: dict[int, int] = {}
    uses: dict[tuple[str, int | None], list[int]] = {}  # weight and pass -> its readers and its evict
    waits: dict[str, list[_Wait]] = {}
    kept: dict[str, int] = {}  # weight -> the newest copy of its chunks that stay
    newest = dict[str, _Wait]()  # lane -> the newest wait there
    for i, op in enumerate(order.ops):
        if op.kind == "chunk" and op.serves is None:
            kept[op.weight] = i
        if op.step == 1:
            begins.setdefault(op.call, i)
            if op.kind == "wait":
                lane = cycle.plan.lane(op.weight)
                if (wait := _wait(order, i)) is not None:
                    newest[lane] = wait
                if lane in newest:
                    waits.setdefault(op.weight, []).append(newest[lane]._replace(at=i))
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
        chunks = [(p.weight, c) for n in first.prefetches if (p := prefetch_of(n)) for c in range(p.first, p.end)]
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
                begin <= w.issued <= w.at < read
                and w.arrival >= due.get(name, -1)
                and (w.arrival >= begin or w.arrival in marked)
                for w in waits.get(name, ())
            ):
                yield f"{name}: after a jump to call {call}, {order.ops[read]} does not wait for it"


class _Wait(NamedTuple):
    """A wait, and the copy whose mark it awaits: its own, or that of the wait before it which covers it, ``issued`` there.

    A jump records the mark of a copy again only if it fetches those bytes; the mark of any other copy from before the jump
    says nothing of what the jump fetches.
    """

    at: int
    issued: int
    arrival: int


def _wait(order: HappensBefore, i: int) -> _Wait | None:
    """The wait at an index, None if it awaits no mark of its own."""
    awaited = [copy for copy in order.graph.predecessors(i) if order.graph.edges[copy, i].get("event") == "arrival"]
    return _Wait(i, i, awaited[0]) if awaited else None


def _last_use(order: HappensBefore, uses: Mapping[tuple[str, int | None], list[int]], op: Op) -> int:
    """The index of the last op that uses a chunk; after all ops, if that is in a pass that is not unrolled."""
    if op.serves is not None and op.serves >= order.steps:
        return len(order.ops)
    return max(uses.get((op.weight, op.serves), ()), default=-1)
