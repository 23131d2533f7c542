"""Happens-before: which operations of programs are ordered on the device, whatever the speed of its streams.

Programs that share an arena are unrolled turn by turn, in the order in which the host issues their ops.  A turn is a
cold start and some steps of one program, or some passes over the calls of a cycle.  There are three streams.  Two are
each in order: *compute* (regions, waits, evicts, handovers, window openings, completions and releases) and *copy*
(chunks).  The third is *collective*.  A collective runs there from its start, which waits for the newest op of compute,
to its end, for which a completion makes compute wait.  Nothing else orders collectives: every NCCL communicator has a
stream of its own, and gloo runs several at a time.  So the order of two collectives counts only if compute completes the
first before it issues the second.

Five kinds of events order one stream after another: a handover lets the first copies of a turn start, the opening of a
window lets its chunks start, the arrival of the newest issued chunk of a region's weights ends its waits (arrivals.py),
the start of a collective waits for compute, and its end ends its completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import networkx as nx
from torch.fx import Node

from chunkflow_compile.passes.graph.discover import awaited, collective_kind, completes_itself, is_wait_tensor, list_of
from chunkflow_compile.passes.ops import EVICT, WAIT, Prefetch, prefetch_of

from .arrivals import Arrivals, arrivals
from .cycle import Cycle, border
from .rewrite import Program

StreamName = Literal["compute", "copy", "collective"]
OpKind = Literal[
    "handover", "open", "chunk", "wait", "evict", "region", "collective", "element", "completion", "release", "other"
]
PRIMING = -1


@dataclass(frozen=True)
class Op:
    """One operation of the unrolled programs.  ``step``: -1 for the priming.  ``label``: like a line of the listing.
    ``call``: the call of a cycle that issues it.

    ``serves``: the step whose readers a chunk is copied for; None for a resident chunk, which serves all steps of its
    turn.  ``collectives``: those that the op is, takes an element of the results of, or completes.  ``values``: those
    that a release drops.  ``mark``: the arrival recorded after a chunk, or awaited by a wait, see arrivals.py.
    """

    turn: int
    step: int
    stream: StreamName
    kind: OpKind
    label: str
    weight: str = ""
    chunk: int = -1
    serves: int | None = PRIMING
    reads: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    mark: int | None = None
    call: int = 0

    def __str__(self) -> str:
        turn = f"turn {self.turn}, " if self.turn else ""
        turn += f"call {self.call}, " if self.call else ""
        return f"{self.label} ({turn}{f'step {self.step}' if self.step >= 0 else 'priming'})"


class HappensBefore:
    """The order of unrolled programs.  ``ops``: in the order of issue.  ``graph``: a DAG over their indices.

    ``turns``: the programs or cycles that hold the arena one after the other; each runs ``steps`` steps.
    """

    def __init__(self, turns: Sequence[Program | Cycle], steps: int) -> None:
        self.turns = tuple(Cycle.of(turn) for turn in turns)
        self.steps = steps
        self.ops: list[Op] = [op for turn, cycle in enumerate(self.turns) for op in _unroll(cycle, turn, steps)]
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(len(self.ops)))
        self._link()
        self._clocks = self._count()

    def ordered(self, first: int, then: int) -> bool:
        """Whether op ``first`` has finished before op ``then`` begins, however long each op takes."""
        if self.ops[first].stream == "collective":
            return any(end == then or self.ordered(end, then) for end in self.graph.successors(first))
        return self._clocks[then][self.ops[first].stream == "copy"] >= first and first != then

    def _link(self) -> None:
        """Add the edges.  Each leads from an op to one that is issued after it."""
        newest: dict[str, int] = {}
        arrival: dict[tuple[int, int], int] = {}
        running: dict[str, list[int]] = {}  # collective -> its ops that no completion has ended yet
        gate: int | None = None  # the newest event that the copy stream waits for
        for i, op in enumerate(self.ops):
            if op.stream == "collective":
                (name,) = op.collectives
                if op.kind == "collective":
                    self.graph.add_edge(newest["compute"], i, event="start")
                    running[name] = []
                running.setdefault(name, []).append(i)
                continue
            if op.stream in newest:
                self.graph.add_edge(newest[op.stream], i)
            newest[op.stream] = i
            if op.kind in ("open", "handover"):
                gate = i
            elif op.kind == "chunk":
                if gate is not None:
                    self.graph.add_edge(gate, i, event=self.ops[gate].kind)
                if op.mark is not None:
                    arrival[op.turn, op.mark] = i
            elif op.kind == "wait" and op.mark is not None and (op.turn, op.mark) in arrival:
                self.graph.add_edge(arrival[op.turn, op.mark], i, event="arrival")
            for name in op.collectives:
                self.graph.add_edges_from(((begun, i) for begun in running.pop(name, ())), event="end")

    def _count(self) -> list[tuple[int, int]]:
        """Vector clocks: for each op the newest (compute, copy) ops that happen before it, itself included.

        A collective has no component: what happens after its end happens after a completion, which is on compute.
        """
        clocks: list[tuple[int, int]] = []
        for i, op in enumerate(self.ops):  # the order of issue is topological
            compute = copy = -1
            for before in self.graph.predecessors(i):
                compute, copy = max(compute, clocks[before][0]), max(copy, clocks[before][1])
            if op.stream == "compute":
                compute = i
            elif op.stream == "copy":
                copy = i
            clocks.append((compute, copy))
        return clocks


def _unroll(cycle: Cycle, turn: int, steps: int) -> Iterator[Op]:
    marks = arrivals(cycle)
    yield Op(turn, PRIMING, "compute", "handover", "handover")
    for weight in cycle.plan.streamed:
        for chunk in (i for i, window in enumerate(weight.windows) if window is None):
            label = f"keep({weight.name!r}, chunk {chunk})"
            mark = marks.marked.get(weight.name)
            yield Op(turn, PRIMING, "copy", "chunk", label, weight=weight.name, chunk=chunk, serves=None, mark=mark)
    for node in border(cycle, 0).prefetches:  # what the step before would have prefetched
        if (prefetch := prefetch_of(node)) is not None:
            yield from _chunks(prefetch, turn, PRIMING, marks.marked.get(node))
    for step in range(steps):
        for number, program in enumerate(cycle.calls):
            for op in ops_of_call(program, marks, turn, step):
                yield replace(op, call=number) if number else op


def ops_of_call(program: Program, marks: Arrivals, turn: int = 0, step: int = 0) -> Iterator[Op]:
    """The ops of one call of a program in its place in a cycle.  ``marks``: the marks of its transfers there."""
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    released = _released(program)
    opened: int | None = None
    for node in program.module.graph.nodes:
        if (prefetch := prefetch_of(node)) is not None:
            if prefetch.window != opened:
                opened = prefetch.window
                yield Op(turn, step, "compute", "open", f"opening of window {opened}")
            yield from _chunks(prefetch, turn, step, marks.marked.get(node))
        elif node.op not in ("placeholder", "get_attr", "output"):
            yield from _issued(weights, node, turn, step, marks.awaited.get(node))
        if (values := released.get(node.name)) and node.op != "placeholder":
            label = f"release of {', '.join(values)}"
            yield Op(turn, step, "compute", "release", label, values=values)


def _released(program: Program) -> dict[str, tuple[str, ...]]:
    """The releases of values that the collective stream reads or makes.  All others are in the order of compute."""
    shared: set[str] = set()
    for node in program.module.graph.nodes:
        if collective_kind(node) is not None or list_of(node) is not None:
            shared.update(n.name for n in (node, *node.all_input_nodes))
    released = {node: tuple(v for v in values if v in shared) for node, values in program.releases.items()}
    return {node: values for node, values in released.items() if values}


def _chunks(prefetch: Prefetch, turn: int, step: int, mark: int | None) -> Iterator[Op]:
    weight = prefetch.weight
    for chunk in range(prefetch.first, prefetch.end):
        label = f"prefetch({weight!r}, chunk {chunk}, window={prefetch.window})"
        serves = step + 1 if prefetch.next_step else step
        last = mark if chunk == prefetch.end - 1 else None
        yield Op(turn, step, "copy", "chunk", label, weight=weight, chunk=chunk, serves=serves, mark=last)


def _issued(weights: Mapping[str, str], node: Node, turn: int, step: int, mark: int | None) -> Iterator[Op]:
    """The op of a node; for a collective that completes itself, its completion too."""
    if node.target is WAIT or node.target is EVICT:
        moves: OpKind = "wait" if node.target is WAIT else "evict"
        label, weight = f"{moves}({node.args[0]!r})", str(node.args[0])
        yield Op(turn, step, "compute", moves, label, weight=weight, mark=mark)
        return
    reads = tuple(weights[a.name] for a in node.all_input_nodes if a.op == "placeholder" and a.name in weights)
    kind: OpKind = "region" if node.op == "call_module" else "other"
    stream: StreamName = "compute"
    collectives: tuple[str, ...] = ()
    if collective_kind(node) is not None:
        kind, stream, collectives = "collective", "collective", (node.name,)
    elif (results := list_of(node)) is not None:
        kind, stream, collectives = "element", "collective", (results.name,)
    elif is_wait_tensor(node):
        kind, collectives = "completion", tuple(c.name for c in awaited(node))
    yield Op(turn, step, stream, kind, node.name, reads=reads, collectives=collectives)
    if kind == "collective" and completes_itself(node):
        yield Op(turn, step, "compute", "completion", f"completion of {node.name}", collectives=collectives)
