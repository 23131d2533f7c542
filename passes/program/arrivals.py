"""Arrivals: which copies are marked, and which mark each region waits for.

Copies run in the order in which they are issued, and so do pulls.  So a region that waits for several weights waits for one
mark only of each lane, after the copy of theirs that is issued last there, and no other copy of theirs needs a mark.  The
executor records and awaits these marks, and verify proves that they suffice.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain

from torch.fx import Node

from chunkflow_compile.passes.names import MOVES
from chunkflow_compile.passes.ops import WAIT, Prefetch, prefetch_of

from .cycle import Cycle
from .rewrite import Program


@dataclass(frozen=True)
class Arrivals:
    """``marked``: prefetch, or the weight whose resident chunks are copied on a cold start -> number of its mark.

    ``awaited``: wait -> number of the mark to wait for, in the lane of its weight; a wait that is not in it follows one that
    covers it.
    """

    marked: Mapping[Node | str, int]
    awaited: Mapping[Node, int]

    @property
    def order(self) -> object:
        """What is marked, by number, and what the waits await, in their order: equal in programs that share their marks."""
        return tuple(m if isinstance(m, str) else prefetch_of(m) for m in self.marked), tuple(self.awaited.values())


def arrivals(cycle: Cycle | Program) -> Arrivals:
    """The marks of a program, or of all programs of a cycle."""
    cycle = Cycle.of(cycle)
    # the resident chunks, in the order in which a cold start copies them
    kept = [w.name for w in cycle.plan.streamed if None in w.windows]
    issued: dict[str, list[tuple[int, Node | str]]] = {}  # weight -> its copies in a step: position, what
    for position, name in enumerate(kept):
        issued.setdefault(name, []).append((position, name))
    nodes = [list(program.module.graph.nodes) for program in cycle.calls]
    starts = [0, *accumulate(map(len, nodes))]
    for position, node in enumerate(chain(*nodes)):
        if (prefetch := prefetch_of(node)) is not None:
            issued.setdefault(prefetch.weight, []).append((position, node))
    marked: dict[Node | str, int] = {}
    awaited: dict[Node, int] = {}
    for start, call in zip(starts, nodes, strict=False):
        for position, group in _wait_groups(call):
            for moves in MOVES:
                waits = [node for node in group if cycle.plan.lane(str(node.args[0])) == moves]
                copies = [
                    (turn, at, copied)
                    for node in waits
                    for at, copied in issued.get(str(node.args[0]), ())
                    if (turn := _turn(at, copied, start + position)) is not None
                ]
                if copies:
                    newest = max(copies, key=lambda c: c[:2])[2]
                    awaited[waits[0]] = marked.setdefault(newest, len(marked))
    return Arrivals(marked, awaited)


def _turn(position: int, copied: Node | str, before: int) -> int | None:
    """The step in which a copy was issued that a wait at ``before`` finds: 0 its own, -1 the one before, -2 a cold start.

    None for one that is issued only after the wait.  At a barrier, the newest may be a copy for the next step.
    """
    if isinstance(copied, str):
        return -2
    if position < before:
        return 0
    prefetch = prefetch_of(copied)
    return -1 if prefetch is not None and prefetch.next_step else None


def arrivals_at(cycle: Cycle, marks: Arrivals, call: int, program: Program) -> Arrivals:
    """The marks of a cycle, ``marks``, for another program in the place of a call.

    Its transfers take the marks of those that they replace, so no other call is read.  If they are not the same transfers,
    all calls are read.
    """
    before, after = _transfers(cycle.calls[call]), _transfers(program)
    if [op for _, op in before] != [op for _, op in after]:
        return arrivals(cycle.at(call, program))
    pairs = [(old, new) for (old, _), (new, _) in zip(before, after, strict=True)]
    marked: dict[Node | str, int] = {new: marks.marked[old] for old, new in pairs if old in marks.marked}
    awaited = {new: marks.awaited[old] for old, new in pairs if old in marks.awaited}
    return Arrivals(ChainMap(marked, marks.marked), awaited)  # type: ignore[arg-type]


def _transfers(program: Program) -> list[tuple[Node, Prefetch | str]]:
    """The prefetches and the waits of a program, in their order, each with what it moves."""
    nodes = program.module.graph.nodes
    ops = ((node, str(node.args[0]) if node.target is WAIT else prefetch_of(node)) for node in nodes)
    return [(node, op) for node, op in ops if op is not None]


def _wait_groups(nodes: Iterable[Node]) -> Iterator[tuple[int, list[Node]]]:
    """The position of a group's first wait, and its waits: those with no call and no prefetch between them."""
    group: list[Node] = []
    begin = 0
    for position, node in enumerate(nodes):
        if node.target is WAIT:
            begin = begin if group else position
            group.append(node)
        elif group:
            yield begin, group
            group = []
    if group:
        yield begin, group
