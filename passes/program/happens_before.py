"""Happens-before: which operations of programs are ordered on the device, whatever the speed of its streams.

Programs that share an arena are unrolled turn by turn, in the order in which the host issues their ops.  A turn is a
cold start and some steps of one program, or some passes over the calls of a cycle.  There are four streams.  Three are
each in order: *compute* (regions, waits, evicts, handovers, window openings, completions and releases), and the lanes of
chunks: *copy* (from host memory) and *pull* (from the devices of the ranks).  The fourth is *collective*.  A collective runs
there from its start, which waits for the newest op of compute, to its end, for which a completion makes compute wait.
Nothing else orders collectives: every NCCL communicator has a stream of its own, and gloo runs several at a time.  So the
order of two collectives counts only if compute completes the first before it issues the second.

Five kinds of events order one stream after another: a handover lets the first chunks of a turn start, the opening of a
window lets its chunks start, the arrival of the newest issued chunk of a region's weights in a lane ends its wait, the
start of a collective waits for compute, and its end ends its completion.  Openings and arrivals are the events that the
program names.  If programs pull, compute waits before a handover for the newest chunk of each lane.  So chunks of two lanes
are ordered through compute only.

A call of a plan with joins runs in one of two *forms*, in any order: *eager*, as above, or *captured*, as one CUDA graph.
A captured call has lanes of its own: its first chunk in each waits for the opening of its window only.  A wait there ends
with the arrival of a chunk of the same call; if the chunk that it awaits is of an earlier call or step, it is nothing.  Two
more events order such a call.  At its beginning compute waits for the *tail*, the newest chunk of each eager lane, if one
was issued since the captured call before, by whichever program: by a cold start, a jump, a rewritten weight, or an eager
call.  At its end, the *join*, compute waits for the newest chunk of the call in each lane.

``FORMS`` are the sequences of forms that are unrolled: all calls eager, all captured, and both alternations.  What follows
from these holds for every sequence, because an order that is needed between ops of two calls depends on the forms of these
two and of the calls between them only:

* from compute to a chunk: it leads through the opening of the chunk's window, which is in the chunk's call in both forms;
* from a chunk to compute, in one call: by an arrival there, the same one in both forms, as the order of a lane is;
* from a chunk to compute in a later call: if all calls from the one to the other are eager, as where all calls are;
  else by the join of the first, if that is captured, or else by the tail of the next captured one;
* between chunks: of two eager calls by the order of their lane, otherwise through compute, as before.

One call once in each step is so unrolled in all four pairs of forms.  A jump or a rewritten weight before a captured call
copies in the eager lanes, and the tail follows: it is a cold start that copies less (borders.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from itertools import cycle as repeat
from typing import Literal, NamedTuple

import networkx as nx
from torch.fx import Node

from chunkflow_compile.passes.graph.discover import awaited, collective_kind, completes_itself, is_wait_tensor, list_of
from chunkflow_compile.passes.names import MOVES
from chunkflow_compile.passes.ops import Prefetch, transfer_of
from chunkflow_compile.passes.step import Evict, Record, Wait

from .cycle import Cycle, border
from .rewrite import Program, issued

StreamName = Literal["compute", "copy", "pull", "collective"]
# fmt: off
OpKind = Literal[
    "handover", "tail", "open", "chunk", "wait", "evict", "region", "collective", "element", "completion", "release",
    "join", "other",
]
# fmt: on
PRIMING = -1
# Whether calls are captured, one after the other and again from the first.
Form = tuple[bool, ...]
EAGER: Form = (False,)
FORMS: tuple[Form, ...] = (EAGER, (True,), (False, True), (True, False))


@dataclass(frozen=True)
class Op:
    """One operation of the unrolled programs.  ``step``: -1 for the priming.  ``label``: like a line of the listing.
    ``call``: the call of a cycle that issues it.

    ``serves``: the step whose readers a chunk is copied for; None for a resident chunk, which serves all steps of its
    turn.  ``weights``: those that a wait makes readable.  ``collectives``: those that the op is, takes an element of the
    results of, or completes.  ``values``: those that a release drops.  ``awaits``: the event that a wait waits for, or the
    lane before a chunk.  ``records``: the events that an opening or a chunk records.  ``captured``: whether its call is.
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
    weights: tuple[str, ...] = ()
    awaits: int | None = None
    records: tuple[int, ...] = ()
    call: int = 0
    captured: bool = False

    def __str__(self) -> str:
        turn = f"turn {self.turn}, " if self.turn else ""
        turn += f"call {self.call}, " if self.call else ""
        form = ", captured" if self.captured else ""
        return f"{self.label} ({turn}{f'step {self.step}' if self.step >= 0 else 'priming'}{form})"


class _Clocks(NamedTuple):
    """Where each op is on compute, which is in order: the newest op there that happens ``before`` it, and the first that
    happens ``after`` it, both itself if it is there.  ``copies``: the first of the chunks in whose order it is, itself if it
    is no chunk.

    Chunks of two streams are ordered through compute only, and so is a collective, which is in no order of its own.
    """

    before: list[int]
    after: list[int]
    copies: list[int]


_TAIL = Op(0, 0, "compute", "tail", "tail of the eager copies")
_JOIN = Op(0, 0, "compute", "join", "join")


@dataclass
class _Lane:
    """``gate``: the newest mark on compute that it waits for."""

    newest: int | None = None
    gate: int | None = None


class HappensBefore:
    """The order of unrolled programs.  ``ops``: in the order of issue.  ``graph``: a DAG over their indices.

    ``turns``: the programs or cycles that hold the arena one after the other; each runs ``steps`` steps.
    """

    def __init__(self, turns: Sequence[Program | Cycle], steps: int, form: Form = EAGER) -> None:
        """``form``: of the calls of all turns; those of a plan without joins are eager."""
        self.turns = tuple(Cycle.of(turn) for turn in turns)
        self.steps = steps
        forms = repeat(form)
        unrolled = (_unroll(cycle, turn, steps, forms) for turn, cycle in enumerate(self.turns))
        self.ops: list[Op] = [op for ops in unrolled for op in ops]
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(len(self.ops)))
        self._link()
        self._clocks = self._count()

    def ordered(self, first: int, then: int) -> bool:
        """Whether op ``first`` has finished before op ``then`` begins, however long each op takes."""
        if self.ops[first].stream == "collective":
            return any(end == then or self.ordered(end, then) for end in self.graph.successors(first))
        before, after, copies = self._clocks
        return first < then and (after[first] <= before[then] or copies[first] == copies[then])

    def _link(self) -> None:
        """Add the edges.  Each leads from an op to one that is issued after it."""
        compute: int | None = None
        eager, captured = _lanes(), _lanes()
        tail: dict[StreamName, int] = {}  # the newest chunk of each eager lane, if no captured call has begun since
        pulls = any(turn.plan.pulled for turn in self.turns)
        # turn and event -> the op that recorded it last; of a captured call, only its own
        eager_marks, captured_marks = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        running: dict[str, list[int]] = {}  # collective -> its ops that no completion has ended yet
        for i, op in enumerate(self.ops):
            if op.stream == "collective":
                (name,) = op.collectives
                if op.kind == "collective":
                    self.graph.add_edge(compute, i, event="start")
                    running[name] = []
                running.setdefault(name, []).append(i)
                continue
            lanes, marks = (captured, captured_marks) if op.captured else (eager, eager_marks)
            lane = lanes.get(op.stream)
            previous = compute if lane is None else lane.newest
            if previous is not None:
                self.graph.add_edge(previous, i)
            if op.stream == "compute":
                compute = i
            marked = None if op.awaits is None else marks.get((op.turn, op.awaits))
            marks.update(((op.turn, event), i) for event in op.records)
            if op.kind == "handover":
                if pulls:
                    self._await_newest(lanes, i)
                for each in lanes.values():
                    each.gate = i
            elif lane is not None:
                lane.gate = lane.gate if marked is None else marked
                if lane.gate is not None:
                    self.graph.add_edge(lane.gate, i, event=self.ops[lane.gate].kind)
                lane.newest = i
                if not op.captured:
                    tail[op.stream] = i
            elif op.kind == "wait" and marked is not None:
                self.graph.add_edge(marked, i, event="arrival")
            elif op.kind == "tail":
                self.graph.add_edges_from(((chunk, i) for chunk in tail.values()), event="tail")
                captured, captured_marks, tail = _lanes(), {}, {}
            elif op.kind == "join":
                self._await_newest(captured, i)
            for name in op.collectives:
                self.graph.add_edges_from(((begun, i) for begun in running.pop(name, ())), event="end")

    def _await_newest(self, lanes: Mapping[StreamName, _Lane], i: int) -> None:
        """Add the edges by which an op of compute waits for the newest chunk of each lane."""
        newest = (lane.newest for lane in lanes.values())
        self.graph.add_edges_from(((chunk, i) for chunk in newest if chunk is not None), event=self.ops[i].kind)

    def _count(self) -> _Clocks:
        """The order of issue is topological."""
        count = len(self.ops)
        before, after, copies = list(range(count)), list(range(count)), list(range(count))
        aside = [i for i, op in enumerate(self.ops) if op.stream != "compute"]
        for i in aside:
            earlier = list(self.graph.predecessors(i))
            before[i] = max((before[j] for j in earlier), default=-1)
            if (lane := self.ops[i].stream) in MOVES:
                copies[i] = next((copies[j] for j in earlier if self.ops[j].stream == lane), i)
        for i in reversed(aside):
            after[i] = min((after[j] for j in self.graph.successors(i)), default=count)
        return _Clocks(before, after, copies)


def _unroll(cycle: Cycle, turn: int, steps: int, forms: Iterator[bool]) -> Iterator[Op]:
    yield Op(turn, PRIMING, "compute", "handover", "handover")
    for weight in cycle.plan.streamed:
        chunks = [i for i, window in enumerate(weight.windows) if window is None]
        for chunk in chunks:
            label = f"keep({weight.name!r}, chunk {chunk})"
            records = cycle.kept_events.get(weight.name, ()) if chunk == chunks[-1] else ()
            lane = cycle.plan.lane(weight.name)
            yield Op(turn, PRIMING, lane, "chunk", label, weight=weight.name, chunk=chunk, serves=None, records=records)
    for prefetch in border(cycle, 0).prefetches:  # what the step before would have prefetched
        yield from _chunks(prefetch, turn, PRIMING)
    for step in range(steps):
        for number, program in enumerate(cycle.calls):
            captured = next(forms) and bool(cycle.plan.joins)
            ops = ops_of_call(program, turn, step)
            for op in chain((_TAIL,), ops, (_JOIN,)) if captured else ops:
                changed = number or captured
                yield replace(op, turn=turn, step=step, call=number, captured=captured) if changed else op


def ops_of_call(program: Program, turn: int = 0, step: int = 0) -> Iterator[Op]:
    """The ops of one call of a program in its place in a cycle."""
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    released = _released(program)
    for node, ops in issued(program):
        transfer = transfer_of(node)
        if isinstance(transfer, Prefetch):
            if isinstance(ops[0], Record):
                label = f"opening of window {transfer.copy.window}"
                yield Op(turn, step, "compute", "open", label, records=(ops[0].event,))
            yield from _chunks(transfer, turn, step)
        elif isinstance(transfer, Wait):
            label = f"wait({', '.join(map(repr, transfer.weights))})"
            readable, event = transfer.weights, transfer.event
            yield Op(turn, step, "compute", "wait", label, weights=readable, awaits=event)
        elif isinstance(transfer, Evict):
            yield Op(turn, step, "compute", "evict", f"evict({transfer.weight!r})", weight=transfer.weight)
        elif node.op not in ("placeholder", "get_attr", "output"):
            yield from _issued(weights, node, turn, step)
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


def _lanes() -> dict[StreamName, _Lane]:
    return {moves: _Lane() for moves in MOVES}


def _chunks(prefetch: Prefetch, turn: int, step: int) -> Iterator[Op]:
    copy, then = prefetch.copy, () if prefetch.then is None else (prefetch.then,)
    for chunk in range(copy.first, copy.end):
        label = f"prefetch({copy.weight!r}, chunk {chunk}, window={copy.window})"
        serves = step + 1 if copy.next_step else step
        awaits = prefetch.after if chunk == copy.first else None
        records = then if chunk == copy.end - 1 else ()
        yield Op(
            turn,
            step,
            copy.stream,
            "chunk",
            label,
            weight=copy.weight,
            chunk=chunk,
            serves=serves,
            awaits=awaits,
            records=records,
        )


def _issued(weights: Mapping[str, str], node: Node, turn: int, step: int) -> Iterator[Op]:
    """The op of a node; for a collective that completes itself, its completion too."""
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
