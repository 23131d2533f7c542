"""Happens-before: which operations of programs are ordered on the device, whatever the speed of its streams.

Programs that share an arena are unrolled turn by turn, in the order in which the host issues their ops.  A turn is a
cold start and some steps of one program.  There are two streams, each in order: *compute* (regions, collectives, waits,
evicts, handovers, window openings) and *copy* (chunks).  Three kinds of events order one stream after the other: a
handover lets the first copies of a turn start, the opening of a window lets its chunks start, and the arrival of a
weight's newest issued chunk ends a wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import networkx as nx
from torch.fx import Node

from chunkflow_compile.passes.ops import EVICT, WAIT, Prefetch, prefetch_of

from .rewrite import Program

StreamName = Literal["compute", "copy"]
PRIMING = -1


@dataclass(frozen=True)
class Op:
    """One operation of the unrolled programs.  ``step``: -1 for the priming.  ``label``: like a line of the listing.

    ``serves``: the step whose readers a chunk is copied for; None for a resident chunk, which serves all steps of its
    turn.
    """

    turn: int
    step: int
    position: int
    stream: StreamName
    kind: Literal["handover", "open", "chunk", "wait", "evict", "region", "other"]
    label: str
    weight: str = ""
    chunk: int = -1
    serves: int | None = PRIMING
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        turn = f"turn {self.turn}, " if self.turn else ""
        return f"{self.label} ({turn}{f'step {self.step}' if self.step >= 0 else 'priming'})"


class HappensBefore:
    """The order of unrolled programs.  ``ops``: in the order of issue.  ``graph``: a DAG over their indices.

    ``turns``: the programs that hold the arena one after the other; each runs ``steps`` steps.
    """

    def __init__(self, turns: Sequence[Program], steps: int) -> None:
        self.turns = tuple(turns)
        self.steps = steps
        self.ops: list[Op] = [op for turn, program in enumerate(turns) for op in _unroll(program, turn, steps)]
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(len(self.ops)))
        newest: dict[str, int] = {}
        arrival: dict[tuple[int, str], int] = {}
        awaited: int | None = None  # the newest event that the copy stream waits for
        for i, op in enumerate(self.ops):
            if op.stream in newest:
                self.graph.add_edge(newest[op.stream], i)
            newest[op.stream] = i
            if op.kind in ("open", "handover"):
                awaited = i
            elif op.kind == "chunk":
                if awaited is not None:
                    self.graph.add_edge(awaited, i, event=self.ops[awaited].kind)
                arrival[op.turn, op.weight] = i
            elif op.kind == "wait" and (op.turn, op.weight) in arrival:
                self.graph.add_edge(arrival[op.turn, op.weight], i, event="arrival")
        self._clocks = self._count()

    def ordered(self, first: int, then: int) -> bool:
        """Whether op ``first`` has finished before op ``then`` begins, however long each op takes."""
        return self._clocks[then][self.ops[first].stream == "copy"] >= first and first != then

    def _count(self) -> list[tuple[int, int]]:
        """Vector clocks: for each op the newest (compute, copy) ops that happen before it, itself included."""
        clocks: list[tuple[int, int]] = [(-1, -1)] * len(self.ops)
        for i in nx.topological_sort(self.graph):
            compute, copy = (max((clocks[p][s] for p in self.graph.predecessors(i)), default=-1) for s in (0, 1))
            clocks[i] = (compute, i) if self.ops[i].stream == "copy" else (i, copy)
        return clocks


def _unroll(program: Program, turn: int, steps: int) -> Iterator[Op]:
    nodes = list(program.module.graph.nodes)
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    yield Op(turn, PRIMING, 0, "compute", "handover", "handover")
    for weight in program.plan.streamed:
        for chunk in (i for i, window in enumerate(weight.windows) if window is None):
            label = f"keep({weight.name!r}, chunk {chunk})"
            yield Op(turn, PRIMING, 0, "copy", "chunk", label, weight=weight.name, chunk=chunk, serves=None)
    for node in nodes:  # on a cold start the executor first issues what the step before would have prefetched
        if (prefetch := prefetch_of(node)) is not None and prefetch.next_step:
            yield from _chunks(prefetch, 0, turn, PRIMING)
    for step in range(steps):
        opened: int | None = None
        for position, node in enumerate(nodes):
            if (prefetch := prefetch_of(node)) is not None:
                if prefetch.window != opened:
                    opened = prefetch.window
                    yield Op(turn, step, position, "compute", "open", f"opening of window {opened}")
                yield from _chunks(prefetch, position, turn, step)
            elif node.op not in ("placeholder", "get_attr", "output"):
                yield _compute(weights, node, position, turn, step)


def _chunks(prefetch: Prefetch, position: int, turn: int, step: int) -> Iterator[Op]:
    weight = prefetch.weight
    for chunk in range(prefetch.first, prefetch.end):
        label = f"prefetch({weight!r}, chunk {chunk}, window={prefetch.window})"
        serves = step + 1 if prefetch.next_step else step
        yield Op(turn, step, position, "copy", "chunk", label, weight=weight, chunk=chunk, serves=serves)


def _compute(weights: Mapping[str, str], node: Node, position: int, turn: int, step: int) -> Op:
    if node.target is WAIT or node.target is EVICT:
        kind: Literal["wait", "evict"] = "wait" if node.target is WAIT else "evict"
        return Op(turn, step, position, "compute", kind, f"{kind}({node.args[0]!r})", weight=str(node.args[0]))
    reads = tuple(weights[a.name] for a in node.all_input_nodes if a.op == "placeholder" and a.name in weights)
    return Op(
        turn, step, position, "compute", "region" if node.op == "call_module" else "other", node.name, reads=reads
    )
