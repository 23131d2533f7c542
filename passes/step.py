"""Step: one step of a program as a list of operations, in the order in which the host issues them.

A GPU runs several streams at once, and each runs its own operations in order.  ``compute`` runs regions.  ``copy`` and
``pull`` are the lanes, which fill slots from host memory and from the devices of the other ranks.  ``collective`` runs
collectives.  Operations of two streams are ordered by events: :class:`Record` marks a point of a stream, and a stream that
has issued a :class:`Wait` continues when that point is reached.

Order for each region k: the collectives that start before it, each after its barriers; the completions awaited before
it; the join, if a call ends there; the copies of window k; the waits for the weights that k is the first to read;
region k; the evicts of the weights that k is the last to read.

    Record(compute, 4)  Wait(copy, 4)    the opening of window k: its copies may overwrite what was read before k
    Copy(copy, ...)  Record(copy, 5)     the arrival of a copy, if it is the newest one that a region waits for in its lane
    Wait(compute, 5, (weights))          before the region.  A lane is in order, so the earlier copies have arrived as well
    Record(copy, 9)  Wait(compute, 9)    a join, in each lane: at the end of a call, all copies have arrived

A call is issued in one of these forms:

* :func:`order`: the step itself, one op at a time;
* :func:`prologue`, before it: what is copied first at a cold start, at a jump, and when weights were rewritten.  It also
  records the events that a step awaits but does not record, after the resident chunks of the weights that the wait names;
* :func:`captured`: the step as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple

from .names import MOVES, Moves
from .plan import Barrier, Plan, Windows, runs
from .problem import Problem, Weight

Stream = Literal["compute", "copy", "pull", "collective"]


@dataclass(frozen=True)
class Record:
    """Marks a point of a stream.  ``event``: its number; if it has been recorded before, the newest mark counts."""

    stream: Stream
    event: int


@dataclass(frozen=True)
class Wait:
    """A stream waits for the newest mark of an event.  ``weights``: those that it makes readable; none for an opening and for
    a join."""

    stream: Stream
    event: int
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Chunks ``[first, end)`` of a weight are copied into its slot, started by ``window``; None for resident chunks, which a
    prologue copies.  ``next_step``: whether they serve the next step (wrap-around)."""

    stream: Moves
    weight: str
    first: int
    end: int
    window: int | None
    next_step: bool = False


@dataclass(frozen=True)
class Run:
    """A region runs.  ``region``: its index."""

    stream: ClassVar[Stream] = "compute"
    region: int


@dataclass(frozen=True)
class Start:
    """A collective starts when compute has reached this point.  ``collective``: its index."""

    stream: ClassVar[Stream] = "collective"
    collective: int


@dataclass(frozen=True)
class Finish:
    """Compute waits for the end of a collective.  ``collective``: its index."""

    stream: ClassVar[Stream] = "compute"
    collective: int


@dataclass(frozen=True)
class Evict:
    """The last reader of a weight has finished: from here on its slot may be overwritten."""

    stream: ClassVar[Stream] = "compute"
    weight: str


@dataclass(frozen=True)
class Release:
    """Values of which no later op reads anything are dropped.  ``values``: the names of their nodes."""

    stream: ClassVar[Stream] = "compute"
    values: tuple[str, ...]


@dataclass(frozen=True)
class Evaluate:
    """Any other node of a program is evaluated, such as an element of the outputs of a region.  ``value``: its name.
    ``stream``: "collective" for an element of the results of a collective, before its end."""

    stream: Stream
    value: str


Op = Record | Wait | Copy | Run | Start | Finish | Evict | Release | Evaluate
Step = tuple[Op, ...]

# The place of a copy in the order of issue: window, urgency, weight, first chunk; of resident chunks, before all others.
_Place = tuple[int, int, int, int]
# A copy as compute finds it where it waits: its turn and its place.  The turn is 0 for a copy of this step, -1 for one of the
# step before, and -2 for resident chunks.
_Newest = tuple[int, _Place]


def weights_of(op: Op) -> tuple[str, ...]:
    """The weights that an op moves, awaits or evicts."""
    if isinstance(op, Copy | Evict):
        return (op.weight,)
    return op.weights if isinstance(op, Wait) else ()


def copies(ops: Iterable[Op]) -> Iterator[Copy]:
    """The copies among ops."""
    return (op for op in ops if isinstance(op, Copy))


def marks(ops: Iterable[Op]) -> Step:
    """What records and awaits events among ops."""
    return tuple(op for op in ops if isinstance(op, Record | Wait))


def order(problem: Problem, plan: Plan) -> Step:
    """The step of a program under a plan, with calls that are issued one op at a time: without joins."""
    return Scheduler(problem).step({w.name: w.windows for w in plan.streamed}, plan.barriers, kept=True)


@dataclass(frozen=True)
class CallEvents:
    """The events at the beginnings and ends of calls, which no program names.  ``handover``: of the arena, when a prologue
    begins.  ``lanes``: for each lane, that of a join."""

    handover: int
    lanes: Mapping[Moves, int]

    @staticmethod
    def of(step: Step) -> CallEvents:
        """``step``: of all calls that share their events."""
        free = _free_event(step)
        return CallEvents(free, {lane: free + 1 + i for i, lane in enumerate(MOVES)})

    @property
    def count(self) -> int:
        """How many events there are with those that the programs name; they are numbered from 0."""
        return self.handover + 1 + len(self.lanes)

    def join(self, lanes: Iterable[Moves]) -> Step:
        """The ops by which compute waits for all copies that lanes have been given."""
        return tuple(_join({lane: self.lanes[lane] for lane in lanes}))


def joined(step: Step) -> Step:
    """The step with a join at its end."""
    free = _free_event(step)
    return *step, *_join({lane: free + i for i, lane in enumerate(_used(step))})


def _free_event(step: Step) -> int:
    return 1 + max((op.event for op in step if isinstance(op, Record | Wait)), default=-1)


def resident(plan: Plan) -> tuple[Copy, ...]:
    """The copies of the chunks that stay in the arena."""
    return tuple(
        Copy(plan.lane(weight.name), weight.name, run.first, run.end, None)
        for weight in plan.streamed
        for run in runs(weight.windows)
        if run.window is None
    )


def prologue(
    step: Step,
    begin: int,
    kept: Sequence[Copy],
    lanes: Sequence[Moves],
    stale: Collection[str] | None = None,
    *,
    jumps: bool = False,
) -> Step:
    """What is issued before a call, so that it finds in the arena what a pass without jumps leaves there.

    ``step``: of all calls.  ``begin``: the index of the first op of the call.  ``kept``: see :func:`resident`.  ``lanes``: of
    the device.  At a cold start, everything is copied.  If ``jumps``, or with ``stale`` weights, which were rewritten, the
    arena has the resident chunks of all others; without ``jumps``, also what is on its way here or in use.

    Compute waits for the copies if a weight has been waited for in a call before, and for stale weights: the event that a
    reader awaits may be that of another copy.
    """
    cold = stale is None and not jumps
    stale, events = stale or (), CallEvents.of(step)
    # nothing else orders what one lane has in flight before the copies of the other
    ops = [*events.join(lanes)] if len(lanes) > 1 else []
    ops += [Record("compute", events.handover), *(Wait(lane, events.handover) for lane in lanes)]
    arrivals = _kept_arrivals(step, kept)
    for i, copy in enumerate(kept):
        if cold or copy.weight in stale:
            ops.append(copy)
            ops += (Record(copy.stream, event) for event in arrivals.get(i, ()))
    evicted = {op.weight: i for i, op in enumerate(step) if isinstance(op, Evict)}
    for i in (*range(begin, len(step)), *range(begin)):
        copy = step[i]
        if not isinstance(copy, Copy) or not (cold or jumps or copy.weight in stale):
            continue
        # those that the last pass has issued for this one, and those that the calls before have issued in this pass
        needed = evicted.get(copy.weight, -1) >= begin
        if (copy.next_step and needed) if i >= begin else (copy.next_step or needed):
            ops.append(copy)
            ops += (op for op in step[i + 1 : i + 2] if isinstance(op, Record) and op.stream == copy.stream)
    # the last wait before the evict is that of the first reader; a barrier may wait for the copies of the next step
    waits = ((i, weight) for i, op in enumerate(step) if isinstance(op, Wait) for weight in op.weights)
    waited = {weight: i for i, weight in waits if i < evicted.get(weight, -1)}
    if stale or any(i < begin <= evicted[weight] for weight, i in waited.items()):
        ops += events.join(lanes)
    return tuple(ops)


def _kept_arrivals(step: Step, kept: Sequence[Copy]) -> dict[int, list[int]]:
    """Index of a copy of resident chunks -> the events that are recorded after it.

    They are those that are awaited and that the step does not record: each is recorded after the last resident chunks of the
    weights that are readable then.
    """
    last = {copy.weight: i for i, copy in enumerate(kept)}
    recorded = {op.event for op in step if isinstance(op, Record)}
    readable: dict[int, list[int]] = {}
    for op in step:
        if isinstance(op, Wait) and op.event not in recorded:
            readable.setdefault(op.event, []).extend(last[w] for w in op.weights if w in last)
    arrivals: dict[int, list[int]] = {}
    for event, copies in readable.items():
        if copies:
            arrivals.setdefault(max(copies), []).append(event)
    return arrivals


def captured(step: Iterable[Op], events: CallEvents) -> Step:
    """The step of a call in a CUDA graph, which waits for all its copies at its end.

    A copy is issued right before compute waits for it.  CUDA runs what follows a join in the lane of that parent which was
    recorded first, and this keeps compute in one lane.  The order of the copies stays, and what each waits for.  An event has
    no mark from before the call, so a wait for one that the call has not recorded, which is for a copy of an earlier call, is
    over at once: that call waits for all copies before it ends, and a graph is launched after all copies outside of graphs.
    """
    ops, later = list[Op](), dict[Stream, list[Op]]()
    for op in step:
        if op.stream in MOVES:
            later.setdefault(op.stream, []).append(op)
            continue
        if isinstance(op, Wait):
            for waiting in later.values():
                arrived = next((i + 1 for i, op_ in enumerate(waiting) if op_ == Record(op_.stream, op.event)), 0)
                ops += waiting[:arrived]
                del waiting[:arrived]
        ops.append(op)
    for lane in MOVES:
        ops += later.get(lane, ())
    return *ops, *events.join(_used(ops))


# The transfer ops of a step with their events: those before each region and each start of a collective, and those after each
# region.
Transfers = tuple[Mapping[Op, Sequence[Op]], Mapping[Op, Sequence[Evict]]]


def transfers(step: Step) -> Transfers:
    """The transfer ops of a step without joins, by what they are next to."""
    before, after = dict[Op, list[Op]](), dict[Op, list[Evict]]()
    waiting = list[Op]()
    for op in step:
        if isinstance(op, Run | Start):
            before[op], waiting = waiting, []
            evicts = after[op] = []
        elif isinstance(op, Evict):
            evicts.append(op)
        elif not isinstance(op, Finish):
            waiting.append(op)
    return before, after


class _Streamed(NamedTuple):
    """A weight that may be streamed.  ``position``: in the order of names.  ``kept``: the place of its resident chunks.
    ``first``, ``last``: the regions that read it first and last."""

    name: str
    lane: Moves
    position: int
    kept: _Place
    first: int
    last: int
    evict: Evict


# The place of a copy, and whether it serves the next step.
_Issued = tuple[_Place, bool]


class _Arrival(NamedTuple):
    """What compute awaits: a copy, by its place, and the weights that are readable then."""

    place: _Place
    weights: tuple[str, ...]


class _Placed(NamedTuple):
    """``opened``: the copies of each window, in the order of issue.  ``awaited``: for each region that is the first to read
    weights, their lanes, newest copies and names.  ``evicted``: by the region that reads them last."""

    opened: dict[int, list[tuple[_Place, Copy]]]
    awaited: dict[int, list[tuple[Moves, _Newest, str]]]
    evicted: dict[int, list[Evict]]


class Scheduler:
    """Orders the ops of the steps of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._count = count = len(problem.regions)
        self._collectives = problem.collectives
        kept = {w.name: (-1, place, 0, 0) for place, w in enumerate(problem.weights)}
        used = sorted((w for w in problem.weights if w.uses), key=lambda w: w.name)
        self._weights = [
            _Streamed(w.name, _lane(w), i, kept[w.name], w.uses[0], w.uses[-1], Evict(w.name))
            for i, w in enumerate(used)
        ]
        self._lane = {w.name: w.lane for w in self._weights}
        self._lanes = [lane for lane in MOVES if lane in self._lane.values()]
        self._runs = [Run(k) for k in range(count)]
        self._starts: list[list[int]] = [[] for _ in range(count + 1)]
        self._finishes: list[list[Finish]] = [[] for _ in range(count + 1)]
        for i, collective in enumerate(problem.collectives):
            self._starts[collective.before].append(i)
            self._finishes[collective.until].append(Finish(i))

    def step(
        self,
        windows: Mapping[str, Windows],
        barriers: Iterable[Barrier] = (),
        joins: Collection[int] = (),
        *,
        kept: bool = False,
    ) -> Step:
        """The step in which each chunk is copied in its window.

        ``windows``: streamed weight -> the window of each chunk.  ``joins``: as in a Plan.  ``kept``: whether a weight whose
        chunks all stay in the arena is awaited too, for a cold start.  Within a window, chunks are in the order in which they
        are needed.  Events are numbered in the order in which the step names them.
        """
        placed, starts, finishes = self._place(windows, kept), self._starts, self._finishes
        read = {k: list(self._read(awaited)) for k, awaited in placed.awaited.items()}
        names = {b.collective: b.weights for b in barriers}
        issued = self._issued(placed, windows) if names else {}
        held = {i: list(self._held(names.get(c.name, ()), c.before, issued)) for i, c in enumerate(self._collectives)}
        marked = {arrival.place for arrivals in (*read.values(), *held.values()) for arrival in arrivals}
        used = _used(copy for copies in placed.opened.values() for _, copy in copies) if joins else []
        events = _Events()
        ops: list[Op] = []
        for k in range(self._count + 1):
            for i in starts[k]:
                ops += [Wait("compute", events[place], weights) for place, weights in held[i]]
                ops.append(Start(i))
            ops += finishes[k]
            if k in joins:
                ops += _join({lane: events[lane, k] for lane in used})
            if k in placed.opened:
                _open(ops, placed.opened[k], marked, events)
            if k < self._count:
                ops += [Wait("compute", events[place], weights) for place, weights in read.get(k, ())]
                ops.append(self._runs[k])
                ops += placed.evicted.get(k, ())
        return tuple(ops)

    def _place(self, windows: Mapping[str, Windows], kept: bool) -> _Placed:
        """``kept``: see :meth:`step`."""
        count, placed = self._count, _Placed({}, {}, {})
        for weight in self._weights:
            newest: _Newest | None = None
            for first, end, window in runs(windows.get(weight.name, ())):
                if window is None:
                    newest = newest or (-2, weight.kept)
                    continue
                place = window, (weight.first - window) % count, weight.position, first
                copy = Copy(weight.lane, weight.name, first, end, window, window > weight.first)
                placed.opened.setdefault(window, []).append((place, copy))
                found = (-1 if copy.next_step else 0), place
                newest = found if newest is None or found > newest else newest
            if newest is not None and (kept or newest[0] > -2):
                placed.awaited.setdefault(weight.first, []).append((weight.lane, newest, weight.name))
                placed.evicted.setdefault(weight.last, []).append(weight.evict)
        for copies in placed.opened.values():
            copies.sort()  # by place: no two are equal
        return placed

    def _read(self, awaited: Sequence[tuple[Moves, _Newest, str]]) -> Iterator[_Arrival]:
        """What compute awaits before a region that is the first to read these weights: the newest of their copies in each
        lane."""
        for lane in self._lanes:
            if mine := [(newest, name) for moves, newest, name in awaited if moves == lane]:
                yield _Arrival(max(mine)[0][1], tuple(name for _, name in mine))

    def _held(self, names: Iterable[str], before: int, issued: Mapping[str, Sequence[_Issued]]) -> Iterator[_Arrival]:
        """What compute awaits at a barrier before a region, in the order of its weights, whose lanes may alternate.

        Nothing for a weight of which compute finds no copy that it has not awaited in the step before.
        """
        found = {name: max(newest) for name in names if (newest := list(_found(issued.get(name, ()), before)))}
        for _, run in groupby(found, key=self._lane.__getitem__):
            mine = [(found[name], name) for name in run]
            yield _Arrival(max(mine)[0][1], tuple(name for _, name in mine))

    def _issued(self, placed: _Placed, windows: Mapping[str, Windows]) -> dict[str, list[_Issued]]:
        """The copies of each weight, and that of its resident chunks."""
        issued = {w.name: [(w.kept, False)] if None in windows.get(w.name, ()) else [] for w in self._weights}
        for copies in placed.opened.values():
            for place, copy in copies:
                issued[copy.weight].append((place, copy.next_step))
        return issued


def _found(issued: Iterable[_Issued], before: int) -> Iterator[_Newest]:
    """The copies that compute finds before a region."""
    for place, next_step in issued:
        if place[0] < before:
            yield (0 if place[0] >= 0 else -2), place
        elif next_step:
            yield -1, place


def _used(ops: Iterable[Op]) -> list[Moves]:
    """The lanes of the copies among ops."""
    used = {op.stream for op in ops if isinstance(op, Copy)}
    return [lane for lane in MOVES if lane in used]


def _open(ops: list[Op], copies: Sequence[tuple[_Place, Copy]], marked: Collection[_Place], events: _Events) -> None:
    """Open a window: each lane waits for its opening before its first copy.  ``marked``: the copies that are awaited."""
    opening, waiting = events[copies[0][1].window], set[Moves]()
    ops.append(Record("compute", opening))
    for place, copy in copies:
        if copy.stream not in waiting:
            waiting.add(copy.stream)
            ops.append(Wait(copy.stream, opening))
        ops.append(copy)
        if place in marked:
            ops.append(Record(copy.stream, events[place]))


def _join(lanes: Mapping[Moves, int]) -> Iterator[Op]:
    """Let compute wait for all copies issued so far.  ``lanes``: those that are used, with an event for each."""
    yield from (Record(lane, event) for lane, event in lanes.items())
    yield from (Wait("compute", event) for event in lanes.values())


class _Events(dict[object, int]):
    """The number of the event of a window, of the arrival of a copy (by its place), or of a join."""

    def __missing__(self, what: object) -> int:
        number = self[what] = len(self)
        return number


def _lane(weight: Weight) -> Moves:
    return weight.source.lane
