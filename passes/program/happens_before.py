"""Happens-before: determines which ops of programs are ordered on the device, whatever the speed of its streams.

Programs that share an arena are unrolled turn by turn: their ops (step.py) are listed in the order in which the host issues
them.  A turn consists of the prologue of a cold start and several steps of one program, or several passes over the calls of
a cycle.

:func:`edges` defines the effect of each op on the order.  Compute, the lanes and the stream of reads each run in order.  A
wait comes after the newest mark of its event.  A collective starts when compute has reached its start, and compute waits
for its end at its finish.  Nothing else orders collectives: every NCCL communicator has its own stream, and gloo runs
several collectives at a time.  So two collectives are ordered only if compute completes the first before it issues the
second.

A call of a plan with joins runs in one of two *forms*, which may alternate arbitrarily: *eager*, as above, or
*captured*, as one CUDA graph.  A captured call has its own lanes and events: its first copy in each lane waits only for
the opening of its window.  Before a captured call, compute waits for the *tail*.  The tail consists of all copies that
any program has issued in the eager lanes, for a cold start, a jump, a rewritten weight or an eager call.  At the end of
a captured call (the *join*), compute waits for all copies of the call.

``FORMS`` are the sequences of forms that are unrolled: all calls eager, all captured, and both alternating sequences.
A property that holds for these four sequences holds for every sequence, because the order between ops of two calls
depends only on the forms of these two calls and of the calls between them:

* from compute to a copy: through the opening of the copy's window, which is part of the copy's call in both forms;
* from a copy to compute in the same call: through an arrival in this call, which is the same in both forms, like the order of
  a lane;
* from a copy to compute in a later call: if all calls from the first to the second are eager, as in the all-eager sequence.
  Otherwise through the join of the copy's call, if it is captured, or else through the tail of the next captured call;
* between two copies: if both calls are eager, by the order of their lane; otherwise through compute, as above.

With a single call per step, all four pairs of forms are unrolled in this way.  A jump or a rewritten weight before a
captured call copies in the eager lanes, and then the tail follows.  Such a jump or rewrite is equivalent to a cold
start that copies less (borders.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import cycle as repeat
from typing import NamedTuple

import networkx as nx
from torch.fx import Node

from chunkflow_compile.passes.forms import captured
from chunkflow_compile.passes.graph.discover import awaited, collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.ops import prefetch_of
from chunkflow_compile.passes.step import (
    Copy,
    Evaluate,
    Evict,
    Finish,
    Op,
    Read,
    Record,
    Release,
    Run,
    Start,
    Stream,
    Transfer,
    Wait,
)

from .cycle import Cycle
from .rewrite import Program, issued

PRIMING = -1
# For consecutive calls, whether each is captured.  The sequence repeats from the start.
Form = tuple[bool, ...]
EAGER: Form = (False,)
FORMS: tuple[Form, ...] = (EAGER, (True,), (False, True), (True, False))


class Issued(NamedTuple):
    """An op of the unrolled programs.  ``label``: text in the style of the listing.  ``reads``: weights that the op
    reads.  ``collectives``: names of the collectives that the op starts, completes, or takes a result from.

    ``step``: number of the step, -1 for the prologue.  ``call``: number of the call that issues the op.  ``captured``:
    whether the op is part of a CUDA graph.
    """

    op: Op
    label: str
    reads: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    turn: int = 0
    step: int = PRIMING
    call: int = 0
    captured: bool = False

    @property
    def stream(self) -> Stream:
        return self.op.stream

    @property
    def copy(self) -> Copy | None:
        """The op, if it is a copy."""
        return self.op if isinstance(self.op, Copy) else None

    @property
    def read(self) -> Read | None:
        """The op, if it is a read."""
        return self.op if isinstance(self.op, Read) else None

    @property
    def ring(self) -> int | None:
        """The byte of the ring at which a read, or a copy out of the ring, begins; None for other ops."""
        return getattr(self.op, "ring", None)

    @property
    def serves(self) -> int | None:
        """The step for whose readers a copy is made, or None for resident chunks, which are for all steps of their turn."""
        return self.step + self.op.next_step if isinstance(self.op, Copy) and self.op.window is not None else None

    @property
    def readable(self) -> tuple[str, ...]:
        """The weights that may be read after a wait; empty for other ops."""
        return self.op.weights if isinstance(self.op, Wait) else ()

    @property
    def evicts(self) -> tuple[str, ...]:
        """The weight that the op evicts, as a tuple; empty for other ops."""
        return (self.op.weight,) if isinstance(self.op, Evict) else ()

    @property
    def releases(self) -> tuple[str, ...]:
        """The values that the op releases; empty for other ops."""
        return self.op.values if isinstance(self.op, Release) else ()

    @property
    def starts(self) -> bool:
        """Whether the op starts a collective."""
        return isinstance(self.op, Start)

    @property
    def planned(self) -> bool:
        """Whether the op belongs to the plan's step.  All other ops exist only in the graph."""
        return not isinstance(self.op, Evaluate | Release)

    @property
    def is_node(self) -> bool:
        """Whether the label of the op is the name of a node of the traced graph."""
        return isinstance(self.op, Run | Start | Finish | Evaluate)

    def of_chunk(self, chunk: int) -> str:
        """Return the label of a copy for one of its chunks."""
        assert isinstance(self.op, Copy)
        weight, window = self.op.weight, self.op.window
        if window is None:
            return f"keep({weight!r}, chunk {chunk})"
        return f"prefetch({weight!r}, chunk {chunk}, window={window})"

    def text(self, chunk: int | None = None) -> str:
        """Return the op and its position as text.  ``chunk``: chunk of the copy to name in the text, or None."""
        turn = f"turn {self.turn}, " if self.turn else ""
        turn += f"call {self.call}, " if self.call else ""
        form = ", captured" if self.captured else ""
        label = self.label if chunk is None else self.of_chunk(chunk)
        return f"{label} ({turn}{f'step {self.step}' if self.step >= 0 else 'priming'}{form})"

    def __str__(self) -> str:
        return self.text()


class _Clocks(NamedTuple):
    """The position of each op relative to compute, which runs in order.  ``before``: for each op, the newest op of
    compute that happens before it.  ``after``: for each op, the first op of compute that happens after it.  For an op
    of compute, both are the op itself.  ``lane``: for each op, the first op of its lane, or the op itself if it is not
    in a lane.

    Ops of different lanes are ordered only through compute, and so are collectives, which do not run in order.  For reads,
    which wait for copies and vice versa, see :func:`newest`.
    """

    before: list[int]
    after: list[int]
    lane: list[int]


def edges(ops: Sequence[Issued]) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices that define the order of unrolled ops.  The second op of a pair is issued later than the
    first op and runs after it."""
    newest: dict[Hashable, int] = {}  # for each stream, the last op issued in it
    marks: dict[Hashable, int] = {}  # for each event, the op that recorded it last
    running: dict[str, list[int]] = {}  # for each collective, its ops that have not been completed yet
    for i, each in enumerate(ops):
        op, stream = each.op, each.op.stream
        if stream == "collective":
            if isinstance(op, Start):
                yield newest["compute"], i
                running[each.collectives[0]] = []
            running.setdefault(each.collectives[0], []).append(i)
            continue
        # a captured call has its own lanes and events
        where = (each.turn, each.step, each.call) if each.captured else None
        lane = stream if stream == "compute" else (stream, where)
        if lane in newest:
            yield newest[lane], i
        newest[lane] = i
        if isinstance(op, Record):
            marks[each.turn, op.event, where] = i
        elif isinstance(op, Wait):
            if (mark := marks.get((each.turn, op.event, where))) is not None:
                yield mark, i
        elif isinstance(op, Finish):
            yield from ((begun, i) for name in each.collectives for begun in running.pop(name, ()))


def newest(ops: Sequence[Issued], stream: Stream) -> list[int]:
    """Return, for each unrolled op, the newest op of a stream that happens before it or is the op itself; -1 if there
    is none."""
    found = [i if each.stream == stream else -1 for i, each in enumerate(ops)]
    for first, then in edges(ops):  # sorted by the second op
        found[then] = max(found[then], found[first])
    return found


class HappensBefore:
    """The order of unrolled programs.  ``ops``: ops in the order of issue.  ``graph``: DAG over their indices.

    ``turns``: programs or cycles that use the arena one after the other; each runs ``steps`` steps.
    """

    def __init__(self, turns: Sequence[Program | Cycle], steps: int, form: Form = EAGER) -> None:
        """``form``: forms of the calls of all turns.  Calls of a plan without joins are always eager."""
        self.turns = tuple(Cycle.of(turn) for turn in turns)
        self.steps = steps
        forms = repeat(form)
        lanes = LANES if any(turn.plan.pulled for turn in self.turns) else LANES[:1]
        unrolled = (_unroll(cycle, turn, steps, forms, lanes) for turn, cycle in enumerate(self.turns))
        self.ops: list[Issued] = [op for ops in unrolled for op in ops]
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(range(len(self.ops)))
        self.graph.add_edges_from(edges(self.ops))
        self._clocks = self._count()

    def ordered(self, first: int, then: int) -> bool:
        """Return whether op ``first`` has finished before op ``then`` begins, however long each op takes."""
        if self.ops[first].stream == "collective":
            return any(end == then or self.ordered(end, then) for end in self.graph.successors(first))
        before, after, lane = self._clocks
        return first < then and (after[first] <= before[then] or lane[first] == lane[then])

    def awaited(self, wait: int) -> int | None:
        """Return the index of the copy that the wait at index ``wait`` waits for, or None if the arrival of the copy
        was not recorded."""
        at: int | None = wait
        while at is not None and self.ops[at].copy is None:
            at = next((i for i in self.graph.predecessors(at) if self.ops[i].stream in LANES), None)
        return at

    def _count(self) -> _Clocks:
        """Compute the positions in one pass, because the order of issue is topological."""
        count = len(self.ops)
        before, after, lane = list(range(count)), list(range(count)), list(range(count))
        aside = [i for i, each in enumerate(self.ops) if each.stream != "compute"]
        for i in aside:
            earlier = list(self.graph.predecessors(i))
            before[i] = max((before[j] for j in earlier), default=-1)
            if (stream := self.ops[i].stream) in LANES:
                lane[i] = next((lane[j] for j in earlier if self.ops[j].stream == stream), i)
        for i in reversed(aside):
            after[i] = min((after[j] for j in self.graph.successors(i)), default=count)
        return _Clocks(before, after, lane)


def _unroll(cycle: Cycle, turn: int, steps: int, forms: Iterator[bool], lanes: Sequence[Lane]) -> Iterator[Issued]:
    for op in cycle.prologue(0, lanes):
        yield Issued(op, _label(op), turn=turn)
    calls = [list(issued_by(call)) for call in cycle.calls]
    graphs = [_captured(cycle, call) for call in calls] if cycle.plan.joins else []
    tail = [Issued(op, "tail of the eager copies", turn=turn) for op in cycle.events.join(lanes)]
    for step in range(steps):
        for number, call in enumerate(calls):
            if next(forms) and graphs:
                yield from (each._replace(step=step, call=number) for each in tail)
                yield from (each._replace(turn=turn, step=step, call=number, captured=True) for each in graphs[number])
            else:
                yield from (each._replace(turn=turn, step=step, call=number) for each in call)


def _captured(cycle: Cycle, call: Sequence[Issued]) -> list[Issued]:
    """Return the ops of a cycle's call in captured form, that is, as a CUDA graph."""
    of = {each.op: each for each in call}
    return [of.get(op) or Issued(op, "join") for op in captured((each.op for each in call), cycle.events)]


def issued_by(program: Program) -> Iterator[Issued]:
    """Yield the ops of one call of a program, numbered as in its first step."""
    weights = {placeholder: name for name, placeholder in program.weight_inputs.items()}
    shared = _shared(program)
    for node, ops in issued(program):
        reads = tuple(weights[a.name] for a in node.all_input_nodes if a.op == "placeholder" and a.name in weights)
        for op in ops:
            if isinstance(op, Transfer | Evict):
                yield Issued(op, _label(op, node))
            elif not isinstance(op, Release):
                ends = isinstance(op, Finish) and not is_wait_tensor(node)
                yield Issued(op, f"completion of {node.name}" if ends else node.name, () if ends else reads, _of(node))
            elif values := tuple(value for value in op.values if value in shared):
                yield Issued(op, f"release of {', '.join(values)}")


def _label(op: Op, node: Node | None = None) -> str:
    """Return the label of a transfer op.  ``node``: its node in the program, or None in a prologue."""
    if isinstance(op, Copy):
        return f"prefetch({op.weight!r})"
    if isinstance(op, Read):
        return f"read({op.weight!r}, chunks {op.first} to {op.end - 1})"
    if isinstance(op, Evict):
        return f"evict({op.weight!r})"
    if isinstance(op, Wait) and op.stream == "compute":
        return f"wait({', '.join(map(repr, op.weights))})"
    if isinstance(op, Record) and op.stream == "compute":
        prefetch = None if node is None else prefetch_of(node)
        return "handover" if prefetch is None else f"opening of window {prefetch.copy.window}"
    return f"event in lane {op.stream}"


def _of(node: Node) -> tuple[str, ...]:
    """Return the names of the collectives that a node is, completes, or takes a result from."""
    if collective_kind(node) is not None:
        return (node.name,)
    if (results := list_of(node)) is not None:
        return (results.name,)
    return tuple(c.name for c in awaited(node)) if is_wait_tensor(node) else ()


def _shared(program: Program) -> set[str]:
    """Return the values that the collective stream reads or makes.  All other values are released in the order of
    compute."""
    shared: set[str] = set()
    for node in program.module.graph.nodes:
        if collective_kind(node) is not None or list_of(node) is not None:
            shared.update(n.name for n in (node, *node.all_input_nodes))
    return shared
