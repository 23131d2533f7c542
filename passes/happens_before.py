"""Happens-before: which operations of a program are ordered on the device, whatever the speed of its streams.

The program is unrolled over a priming and two steps, as the host issues it.  There are two streams, each in order:
*compute* (regions, collectives, waits, evicts, window openings) and *copy* (chunks).  Two kinds of events cross between
them: the opening of a window lets its chunks start, and the arrival of a weight's newest issued chunk ends a wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import networkx as nx
from torch.fx import Node

from .ops import EVICT, WAIT, Prefetch, prefetch_of
from .rewrite import Program

StreamName = Literal["compute", "copy"]
PRIMING = -1


@dataclass(frozen=True)
class Op:
    """One operation of the unrolled program.  ``step``: -1 for the priming.  ``label`` reads like the listing.

    ``serves``: the step whose readers a chunk is copied for.
    """

    step: int
    position: int
    stream: StreamName
    kind: Literal["open", "chunk", "wait", "evict", "region", "other"]
    label: str
    weight: str = ""
    chunk: int = -1
    serves: int = PRIMING
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.label} (step {self.step})" if self.step >= 0 else f"{self.label} (priming)"


class HappensBefore:
    """The order of an unrolled program.  ``ops`` are in host order; ``graph`` is a DAG over their indices."""

    def __init__(self, program: Program, steps: int = 2) -> None:
        self.ops: list[Op] = list(_unroll(program, steps))
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(len(self.ops)))
        newest: dict[str, int] = {}
        arrival: dict[str, int] = {}
        opening = -1
        for i, op in enumerate(self.ops):
            if op.stream in newest:
                self.graph.add_edge(newest[op.stream], i)
            newest[op.stream] = i
            if op.kind == "open":
                opening = i
            elif op.kind == "chunk":
                if op.step != PRIMING:
                    self.graph.add_edge(opening, i, event="window")
                arrival[op.weight] = i
            elif op.kind == "wait" and op.weight in arrival:
                self.graph.add_edge(arrival[op.weight], i, event="arrival")
        self._clocks = self._count()

    def ordered(self, first: int, then: int) -> bool:
        """Whether op ``first`` is over before op ``then`` begins, on every schedule."""
        return self._clocks[then][self.ops[first].stream == "copy"] >= first and first != then

    def _count(self) -> list[tuple[int, int]]:
        """Vector clocks: a node -> the newest op of (compute, copy) that is behind it, itself included."""
        clocks: list[tuple[int, int]] = [(-1, -1)] * len(self.ops)
        for i in nx.topological_sort(self.graph):
            compute, copy = (max((clocks[p][s] for p in self.graph.predecessors(i)), default=-1) for s in (0, 1))
            clocks[i] = (compute, i) if self.ops[i].stream == "copy" else (i, copy)
        return clocks


def _unroll(program: Program, steps: int) -> Iterator[Op]:
    nodes = list(program.module.graph.nodes)
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    for node in nodes:  # the executor primes a cold start with what the step before would have prefetched
        if (prefetch := prefetch_of(node)) is not None and prefetch.next_step:
            yield from _chunks(prefetch, 0, PRIMING)
    for step in range(steps):
        opened: int | None = None
        for position, node in enumerate(nodes):
            if (prefetch := prefetch_of(node)) is not None:
                if prefetch.window != opened:
                    opened = prefetch.window
                    yield Op(step, position, "compute", "open", f"opening of window {opened}")
                yield from _chunks(prefetch, position, step)
            elif node.op not in ("placeholder", "get_attr", "output"):
                yield _compute(weights, node, position, step)


def _chunks(prefetch: Prefetch, position: int, step: int) -> Iterator[Op]:
    weight = prefetch.weight
    for chunk in range(prefetch.first, prefetch.end):
        label = f"prefetch({weight!r}, chunk {chunk}, window={prefetch.window})"
        serves = step + 1 if prefetch.next_step else step
        yield Op(step, position, "copy", "chunk", label, weight=weight, chunk=chunk, serves=serves)


def _compute(weights: Mapping[str, str], node: Node, position: int, step: int) -> Op:
    if node.target is WAIT or node.target is EVICT:
        kind: Literal["wait", "evict"] = "wait" if node.target is WAIT else "evict"
        return Op(step, position, "compute", kind, f"{kind}({node.args[0]!r})", weight=str(node.args[0]))
    reads = tuple(weights[a.name] for a in node.all_input_nodes if a.op == "placeholder" and a.name in weights)
    return Op(step, position, "compute", "region" if node.op == "call_module" else "other", node.name, reads=reads)
