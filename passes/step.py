"""Step: the operations of one step of a program, in the order in which the host issues them.

A GPU runs several streams concurrently, and each stream runs its operations in order.  ``compute`` runs regions.
``copy`` and ``pull`` are the lanes: ``copy`` fills slots from host memory, and ``pull`` fills slots from the devices of
the other ranks.  ``collective`` runs collectives.  ``read`` reads files on the SSD into a ring buffer in host memory; copies
take their bytes from this buffer (ring.py).  Events order the operations of different streams: :class:`Record` marks a point
in a stream, and a :class:`Wait` makes another stream wait until this point has been reached.

For each region k, the operations are issued in this order:

1. The starts of the collectives before region k.  Directly before the start of a collective, the waits of its
   :class:`Barrier`, if it has one.
2. The waits for the ends of the collectives whose ``until`` is k.
3. The join, if a call ends before region k.
4. The copies of window k.
5. The waits for the weights that region k is the first to read.
6. Region k.
7. The evicts of the weights that region k is the last to read.

The events:

    Record(compute, 4)  Wait(copy, 4)    opening of window k: the regions before k have finished, so the bytes that they read
                                         may be overwritten
    Copy(copy, ...)  Record(copy, 5)     arrival: of the copies in a lane that a region waits for, only the newest copy is
                                         followed by a Record
    Wait(compute, 5, (weights))          wait of a region for an arrival; all earlier copies in the lane have arrived as well,
                                         because a lane runs its copies in order
    Record(copy, 9)  Wait(compute, 9)    join at the end of a call: compute waits for all copies in the lane
    Wait(read, 5)  Read(...)  Record(read, 6)   a read waits for the copy that frees its bytes of the ring
    Wait(copy, 6)  Copy(copy, ...)       a copy out of the ring waits for the read that has stored its bytes there

forms.py defines the prologue, which is issued before a call, and the form of a call that is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple

from .names import LANES, Lane
from .plan import Barrier, Plan, Windows, runs
from .problem import Problem, Weight
from .ring import ring_slots

Stream = Literal["compute", "copy", "pull", "collective", "read"]


@dataclass(frozen=True)
class Record:
    """Records an event: marks a point in a stream.  ``event``: number of the event; a new mark replaces the previous mark of
    the event."""

    stream: Stream
    event: int


@dataclass(frozen=True)
class Wait:
    """A stream waits for the newest mark of an event.  ``weights``: weights that compute may read after this wait; empty for
    openings, for joins, and for waits between reads and copies."""

    stream: Stream
    event: int
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Copies chunks ``[first, end)`` of a weight into its slot.  ``window``: window that starts the copy, or None for
    resident chunks, which are copied by a prologue.  ``next_step``: whether the chunks are read in the next step
    (wrap-around).  ``ring``: the position in the ring at which the bytes to copy begin, or None if the copy does not
    read from the ring."""

    stream: Lane
    weight: str
    first: int
    end: int
    window: int | None
    next_step: bool = False
    ring: int | None = None


@dataclass(frozen=True)
class Read:
    """Reads chunks ``[first, end)`` of a weight from a file into the ring.  The next copy of these chunks takes them from the
    ring.  ``ring``: offset in the ring."""

    stream: ClassVar[Stream] = "read"
    weight: str
    first: int
    end: int
    ring: int


@dataclass(frozen=True)
class Run:
    """Runs a region.  ``region``: index of the region."""

    stream: ClassVar[Stream] = "compute"
    region: int


@dataclass(frozen=True)
class Start:
    """Starts a collective when compute has reached this point.  ``collective``: index of the collective."""

    stream: ClassVar[Stream] = "collective"
    collective: int


@dataclass(frozen=True)
class Finish:
    """Compute waits for the end of a collective.  ``collective``: index of the collective."""

    stream: ClassVar[Stream] = "compute"
    collective: int


@dataclass(frozen=True)
class Evict:
    """Marks that the last reader of a weight has finished: from here on, its slot may be overwritten."""

    stream: ClassVar[Stream] = "compute"
    weight: str


@dataclass(frozen=True)
class Release:
    """Drops values that no op after this one reads.  The only exception is a Run that follows directly: its region still
    reads these values, and then frees them itself.  ``values``: names of the nodes that produced the values."""

    stream: ClassVar[Stream] = "compute"
    values: tuple[str, ...]


@dataclass(frozen=True)
class Evaluate:
    """Evaluates a node that no other op represents, such as a node that takes one element of a region's outputs.  ``value``:
    name of the node.  ``stream``: "collective" if the node takes an element of the results of a collective that has not
    ended, otherwise "compute"."""

    stream: Stream
    value: str


Op = Record | Wait | Copy | Read | Run | Start | Finish | Evict | Release | Evaluate
Step = tuple[Op, ...]
# The ops that move weights or order streams.
Transfer = Record | Wait | Copy | Read


def weights_of(op: Op) -> tuple[str, ...]:
    """Return the weights that an op copies, reads, waits for or evicts."""
    if isinstance(op, Copy | Read | Evict):
        return (op.weight,)
    return op.weights if isinstance(op, Wait) else ()


def released_by(op: Op) -> tuple[str, ...]:
    """Return the values that an op drops."""
    return op.values if isinstance(op, Release) else ()


def copies(ops: Iterable[Op]) -> Iterator[Copy]:
    """Return the copies among ops."""
    return (op for op in ops if isinstance(op, Copy))


def reads(ops: Iterable[Op]) -> Iterator[Read]:
    """Return the reads among ops."""
    return (op for op in ops if isinstance(op, Read))


def marks(ops: Iterable[Op]) -> Step:
    """Return the ops that record events or wait for them."""
    return tuple(op for op in ops if isinstance(op, Record | Wait))


# The transfer ops of a step with their events, as two mappings whose keys are the Run and Start ops of the step.  The first
# mapping contains the transfer ops before each Run or Start, and the second mapping contains the evicts after it.
Transfers = tuple[Mapping[Op, Sequence[Op]], Mapping[Op, Sequence[Evict]]]


def transfers(step: Step) -> Transfers:
    """Return the transfer ops of a step, grouped by the Run or Start that they precede or follow.  ``step``: a step without
    joins."""
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


def used_lanes(ops: Iterable[Op]) -> list[Lane]:
    """Return the lanes of the copies among ops."""
    used = {copy.stream for copy in copies(ops)}
    return [lane for lane in LANES if lane in used]


def join(lanes: Mapping[Lane, int]) -> Iterator[Op]:
    """Yield the ops that make compute wait for all copies issued so far.  ``lanes``: for each lane in use, the event to
    record."""
    yield from (Record(lane, event) for lane, event in lanes.items())
    yield from (Wait("compute", event) for event in lanes.values())


# The place of a copy in the order of issue.  Copies are sorted by their window, the number of regions from the window to the
# first reader, the position of the weight, and their first chunk.  Resident chunks have window -1.
_Place = tuple[int, int, int, int]
# A copy that compute waits for, as a pair of its step and its place.  The step is 0 for the current step, -1 for the previous
# step, and -2 for resident chunks, which were copied before both steps.
_Newest = tuple[int, _Place]


def order(problem: Problem, plan: Plan) -> Step:
    """Return the step of a program under a plan, without joins.  The host issues this step for calls that are not CUDA
    graphs."""
    scheduler = Scheduler(problem, plan.chunk_bytes)
    return scheduler.step({w.name: w.windows for w in plan.streamed}, plan.barriers, kept=True)


class _Streamed(NamedTuple):
    """A weight that may be streamed.  ``position``: position of the weight if weights are sorted by name.  ``kept``: place of
    the copy of its resident chunks.  ``first``, ``last``: first and last region that read the weight."""

    name: str
    lane: Lane
    position: int
    kept: _Place
    first: int
    last: int
    evict: Evict


# The place of a copy, and whether its chunks are read in the next step.
_Issued = tuple[_Place, bool]


class _Arrival(NamedTuple):
    """An arrival that compute waits for.  ``place``: place of the copy that arrives.  ``weights``: weights that compute
    may read after it has waited for the arrival."""

    place: _Place
    weights: tuple[str, ...]


class _Placed(NamedTuple):
    """Copies and weights by region.  ``opened``: copies of each window, in the order of issue.  ``awaited``: for each region,
    the lane, newest copy and name of each weight that the region is the first to read.  ``evicted``: for each region, the
    evicts of the weights that the region is the last to read."""

    opened: dict[int, list[tuple[_Place, Copy]]]
    awaited: dict[int, list[tuple[Lane, _Newest, str]]]
    evicted: dict[int, list[Evict]]


class Scheduler:
    """Puts the ops of a step in order, for one problem."""

    def __init__(self, problem: Problem, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._in_files = {w.name: w.nbytes for w in problem.weights if w.source.reads_file}
        self._count = count = len(problem.regions)
        self._collectives = problem.collectives
        kept = {w.name: (-1, place, 0, 0) for place, w in enumerate(problem.weights)}
        used = sorted((w for w in problem.weights if w.uses), key=lambda w: w.name)
        self._weights = [
            _Streamed(w.name, _lane(w), i, kept[w.name], w.uses[0], w.uses[-1], Evict(w.name))
            for i, w in enumerate(used)
        ]
        self._lane = {w.name: w.lane for w in self._weights}
        self._lanes = [lane for lane in LANES if lane in self._lane.values()]
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
        """Return the step for a choice of windows.

        ``windows``: for each streamed weight, the windows of its chunks.  ``joins``: as in a Plan.  ``kept``: whether
        compute also waits for weights whose chunks are all resident; programs need these waits after a cold start.
        Within a window, chunks are copied in the order in which regions read them.  Events are numbered in the order in
        which the step names them.  The events of reads get the highest numbers.
        """
        placed, starts, finishes = self._place(windows, kept), self._starts, self._finishes
        read = {k: list(self._read(awaited)) for k, awaited in placed.awaited.items()}
        names = {b.collective: b.weights for b in barriers}
        issued = self._issued(placed, windows) if names else {}
        held = {i: list(self._held(names.get(c.name, ()), c.before, issued)) for i, c in enumerate(self._collectives)}
        marked = {arrival.place for arrivals in (*read.values(), *held.values()) for arrival in arrivals}
        used = used_lanes(copy for copies in placed.opened.values() for _, copy in copies) if joins else []
        events = _Events()
        ops: list[Op] = []
        for k in range(self._count + 1):
            for i in starts[k]:
                ops += [Wait("compute", events[place], weights) for place, weights in held[i]]
                ops.append(Start(i))
            ops += finishes[k]
            if k in joins:
                ops += join({lane: events[lane, k] for lane in used})
            if k in placed.opened:
                _open(ops, placed.opened[k], marked, events)
            if k < self._count:
                ops += [Wait("compute", events[place], weights) for place, weights in read.get(k, ())]
                ops.append(self._runs[k])
                ops += placed.evicted.get(k, ())
        return tuple(self._with_reads(ops, events) if self._in_files else ops)

    def _with_reads(self, ops: Sequence[Op], events: _Events) -> Iterator[Op]:
        """Insert reads into the ops.  Each read comes directly after the copy that frees the bytes of the ring that the read
        fills."""
        copied = [op for op in copies(ops) if op.weight in self._in_files]
        slots, count = ring_slots([self._nbytes(op) for op in copied]), len(copied)
        following = [list[int]() for _ in copied]  # for each copy, the reads to issue directly after it
        for number, slot in enumerate(slots):
            following[slot.after].append(number)
        copying, due = -1, list[int]()
        for op in (*ops, None):
            if due:
                arrives = isinstance(op, Record) and op.stream == "copy"
                freed = op.event if isinstance(op, Record) and arrives else events["freed", copying]
                yield from (Record("copy", freed), Wait("read", freed))
                for number in due:
                    read = copied[number]
                    yield Read(read.weight, read.first, read.end, slots[number].begin)
                    yield Record("read", events["read", number])
                due = []
                if arrives:
                    continue
            if isinstance(op, Copy) and op.weight in self._in_files:
                copying += 1
                due = sorted(following[copying], key=lambda number: (number - copying - 1) % count)
                yield Wait("copy", events["read", copying])
                yield replace(op, ring=slots[copying].begin)
            elif op is not None:
                yield op

    def _nbytes(self, op: Copy) -> int:
        return min(op.end * self._chunk_bytes, self._in_files[op.weight]) - op.first * self._chunk_bytes

    def _place(self, windows: Mapping[str, Windows], kept: bool) -> _Placed:
        """Group copies and weights by region.  ``kept``: see :meth:`step`."""
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
            copies.sort()  # by place; places are unique
        return placed

    def _read(self, awaited: Sequence[tuple[Lane, _Newest, str]]) -> Iterator[_Arrival]:
        """Yield the arrivals that compute waits for before a region: in each lane, the newest copy of the weights that the
        region is the first to read.  ``awaited``: these weights, see :class:`_Placed`."""
        for lane in self._lanes:
            if mine := [(newest, name) for used, newest, name in awaited if used == lane]:
                yield _Arrival(max(mine)[0][1], tuple(name for _, name in mine))

    def _held(self, names: Iterable[str], before: int, issued: Mapping[str, Sequence[_Issued]]) -> Iterator[_Arrival]:
        """Yield the arrivals that compute waits for at a :class:`Barrier`, directly before a collective starts.

        ``names``: weights of the barrier.  ``before``: the index of the region that follows the start of the collective.
        There is one arrival for each sequence of consecutive weights in the same lane.

        A weight is left out if compute has already waited for all its copies in the previous step.
        """
        found = {name: max(newest) for name in names if (newest := list(_found(issued.get(name, ()), before)))}
        for _, run in groupby(found, key=self._lane.__getitem__):
            mine = [(found[name], name) for name in run]
            yield _Arrival(max(mine)[0][1], tuple(name for _, name in mine))

    def _issued(self, placed: _Placed, windows: Mapping[str, Windows]) -> dict[str, list[_Issued]]:
        """Return the copies of each weight, including the copy of its resident chunks."""
        issued = {w.name: [(w.kept, False)] if None in windows.get(w.name, ()) else [] for w in self._weights}
        for copies in placed.opened.values():
            for place, copy in copies:
                issued[copy.weight].append((place, copy.next_step))
        return issued


def _found(issued: Iterable[_Issued], before: int) -> Iterator[_Newest]:
    """Yield the copies of a weight that have been issued when compute reaches region ``before``: copies by this step, copies
    by the previous step for this step, and the copy of resident chunks."""
    for place, next_step in issued:
        if place[0] < before:
            yield (0 if place[0] >= 0 else -2), place
        elif next_step:
            yield -1, place


def _open(ops: list[Op], copies: Sequence[tuple[_Place, Copy]], marked: Collection[_Place], events: _Events) -> None:
    """Append the ops of a window to ``ops``.  Each lane waits for the opening of the window before its first copy.
    ``marked``: places of the copies that compute waits for."""
    opening, waiting = events[copies[0][1].window], set[Lane]()
    ops.append(Record("compute", opening))
    for place, copy in copies:
        if copy.stream not in waiting:
            waiting.add(copy.stream)
            ops.append(Wait(copy.stream, opening))
        ops.append(copy)
        if place in marked:
            ops.append(Record(copy.stream, events[place]))


class _Events(dict[object, int]):
    """Assigns numbers to events in the order in which they are first looked up.  The keys identify the opening of a
    window, the arrival of a copy (by its place), a join, a read, or the copy that a read waits for."""

    def __missing__(self, what: object) -> int:
        number = self[what] = len(self)
        return number


def _lane(weight: Weight) -> Lane:
    return weight.source.lane
