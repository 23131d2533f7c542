"""Happens-before: determines which ops of programs are ordered on the device, whatever the speed of its streams.

Programs that share an arena are unrolled: their ops (step.py) are listed in the order in which the host issues them.  The
programs use the arena one after the other.  In its *turn*, a program issues the prologue of a cold start, and then several
steps.  A step of a cycle is one pass over its calls.

:func:`edges` defines how each op orders other ops.  Compute runs its ops in order, and so do each lane and the stream of
reads.  A wait ends after the point at which its event was recorded last (the newest *mark* of the event).  A collective
starts when compute has reached its Start, and compute waits for its end at its Finish.  Collectives are not ordered in any
other way, because every NCCL communicator has its own stream, and gloo runs several collectives at a time.  So two
collectives are ordered only if compute waits for the end of the first before it issues the second.

If a plan has joins, each of its calls runs in one of two *forms*: *eager*, as described above, or *captured*, as one CUDA
graph.  Forms may alternate arbitrarily.  A captured call has its own lanes and events: its first copy in each lane waits only
for the opening of its window.  Before a captured call, compute waits for the *tail*: all copies that have been issued in the
eager lanes, by prologues and by eager calls of any program.  At the end of a captured call (the *join*), compute waits for
all copies of the call.

``FORMS`` are the sequences of forms that are unrolled: all calls eager, all captured, and both alternating sequences.  A
property that holds for these four sequences holds for every sequence.  Consider an op of one call and an op of the same or
of a later call: whatever forms the calls have, the order between the two ops already occurs in one of the four sequences.
The cases are:

* A copy after an op of compute: in both forms, the call that issues the copy contains the opening of the copy's window, and
  the copy waits for this opening.
* An op of compute after a copy of the same call: in both forms, the call contains a wait of compute for the arrival of the
  copy.
* An op of compute after a copy that an earlier call issued: if the earlier call is captured, compute has waited for the
  copy at the join that ends the earlier call.  If the earlier call is eager and a captured call comes before the op,
  compute has waited for the copy as a part of the tail.  If all calls from the copy to the op are eager, the order is the
  same as in the all-eager sequence.
* A copy after a copy: if both copies are issued by eager calls, they are ordered by their lane; otherwise they are ordered
  through compute, as in the cases above.

If a step consists of a single call, the four sequences contain each pair of forms of two successive calls.  The copies of a
prologue before a captured call are in the eager lanes, so the call waits for them as a part of the tail.  The prologue at a
jump, or after weights were written, issues a part of the copies that the call's prologue at a cold start issues, in the same
order (borders.py).
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
# For each of several consecutive calls, whether the call is captured.  After the last element, the sequence starts again.
Form = tuple[bool, ...]
EAGER: Form = (False,)
FORMS: tuple[Form, ...] = (EAGER, (True,), (False, True), (True, False))


class Issued(NamedTuple):
    """An op of the unrolled programs.  ``label``: text in the style of the listing.  ``reads``: weights that the op
    reads.  ``collectives``: names of the collectives that the op starts, completes, or takes a result from.

    ``turn``: number of the turn, see the module docstring.  ``step``: number of the step in this turn, -1 for the prologue.
    ``call``: number of the call that issues the op.  ``captured``: whether the op is part of a CUDA graph.
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
        """The op if it is a copy, otherwise None."""
        return self.op if isinstance(self.op, Copy) else None

    @property
    def read(self) -> Read | None:
        """The op if it is a read, otherwise None."""
        return self.op if isinstance(self.op, Read) else None

    @property
    def ring(self) -> int | None:
        """The offset in the ring at which a read stores its bytes, or from which a copy takes its bytes; or None if the op is
        neither."""
        return getattr(self.op, "ring", None)

    @property
    def serves(self) -> int | None:
        """The step that reads the chunks of a copy; or None if the op is not a copy, or copies resident chunks, which all
        steps read."""
        return self.step + self.op.next_step if isinstance(self.op, Copy) and self.op.window is not None else None

    @property
    def readable(self) -> tuple[str, ...]:
        """The weights that compute may read after a wait; empty for other ops."""
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
        """Whether the op is part of the plan's step; False for the ops that only the program's graph contains."""
        return not isinstance(self.op, Evaluate | Release)

    @property
    def is_node(self) -> bool:
        """Whether the label of the op is the name of a node of the traced graph."""
        return isinstance(self.op, Run | Start | Finish | Evaluate)

    def of_chunk(self, chunk: int) -> str:
        """Return the label of a copy, with the number of one of its chunks."""
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
    """The position of each op relative to the ops of compute, which run in order.

    ``before``: for each op, the newest op of compute that happens before it.  ``after``: for each op, the first op of
    compute that happens after it.  For an op of compute, both are the op itself.  ``lane``: for each op in a lane, the
    first op in this lane, which identifies the lane; for any other op, the op itself.

    These positions are enough to compare ops: ops in different lanes are ordered only through compute, and so are
    collectives.  Reads and copies also wait for each other directly, see :func:`newest`.
    """

    before: list[int]
    after: list[int]
    lane: list[int]


def edges(ops: Sequence[Issued]) -> Iterator[tuple[int, int]]:
    """Yield the edges of the order, as pairs of indices of ops: the second op of a pair runs after the first, and is also
    issued after it."""
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
    """Return, for each unrolled op, the newest op of a stream that happens before it, or -1 if there is none.  For an op
    of this stream, return the op itself."""
    found = [i if each.stream == stream else -1 for i, each in enumerate(ops)]
    for first, then in edges(ops):  # the edges are sorted by their second op
        found[then] = max(found[then], found[first])
    return found


class HappensBefore:
    """The order of unrolled programs.  ``ops``: ops in the order of issue.  ``graph``: DAG of the indices of these ops."""

    def __init__(self, turns: Sequence[Program | Cycle], steps: int, form: Form = EAGER) -> None:
        """``turns``: programs or cycles that use the arena one after the other.  ``steps``: number of steps in each turn.
        ``form``: forms of the successive calls of all turns; ignored for plans without joins, because all of their calls are
        eager."""
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
        """Return the index of the copy whose arrival the op at index ``wait`` waits for, or None if no op has recorded this
        arrival."""
        at: int | None = wait
        while at is not None and self.ops[at].copy is None:
            at = next((i for i in self.graph.predecessors(at) if self.ops[i].stream in LANES), None)
        return at

    def _count(self) -> _Clocks:
        """Compute the position of each op.  Because every edge follows the order of issue, one pass forward and one pass
        backward are enough."""
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
    """Return the ops of a call in captured form.  ``call``: ops of this call in eager form."""
    of = {each.op: each for each in call}
    return [of.get(op) or Issued(op, "join") for op in captured((each.op for each in call), cycle.events)]


def issued_by(program: Program) -> Iterator[Issued]:
    """Yield the ops of a program, with the default values for turn, step and call."""
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
    """Return the label of a transfer op.  ``node``: node of the op in the program, or None in a prologue."""
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
    """Return the names of the collectives that a node starts, completes, or takes a result from."""
    if collective_kind(node) is not None:
        return (node.name,)
    if (results := list_of(node)) is not None:
        return (results.name,)
    return tuple(c.name for c in awaited(node)) if is_wait_tensor(node) else ()


def _shared(program: Program) -> set[str]:
    """Return the names of the values that collectives read or produce.  Only the releases of these values are checked
    against the order; all other values are read and released by compute, which runs in order."""
    shared: set[str] = set()
    for node in program.module.graph.nodes:
        if collective_kind(node) is not None or list_of(node) is not None:
            shared.update(n.name for n in (node, *node.all_input_nodes))
    return shared
