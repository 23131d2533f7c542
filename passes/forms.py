"""Forms: the ops that are issued for a call beside its step, which step.py orders, and in its place.

* :func:`prologue`, before it: what is copied first at a cold start, at a jump, and when weights were rewritten.  It also
  records the events that a step awaits but does not record, after the resident chunks of the weights that the wait names;
* :func:`captured`: the step as one CUDA graph;
* :func:`joined`: the step with a join at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .names import LANES, Lane
from .plan import Plan, runs
from .step import Copy, Evict, Op, Read, Record, Step, Stream, Wait, join, used_lanes


@dataclass(frozen=True)
class CallEvents:
    """The events at the beginnings and ends of calls, which no program names.  ``handover``: of the arena, when a prologue
    begins.  ``lanes``: for each lane, that of a join.  ``reads``: those that reads record, which programs do name."""

    handover: int
    lanes: Mapping[Lane, int]
    reads: frozenset[int] = frozenset()

    @staticmethod
    def of(step: Step) -> CallEvents:
        """``step``: of all calls that share their events."""
        free = _free_event(step)
        reads = frozenset(op.event for op in step if isinstance(op, Record) and op.stream == "read")
        return CallEvents(free, {lane: free + 1 + i for i, lane in enumerate(LANES)}, reads)

    @property
    def count(self) -> int:
        """How many events there are with those that the programs name; they are numbered from 0."""
        return self.handover + 1 + len(self.lanes)

    def join(self, lanes: Iterable[Lane]) -> Step:
        """The ops by which compute waits for all copies that lanes have been given."""
        return tuple(join({lane: self.lanes[lane] for lane in lanes}))


def joined(step: Step) -> Step:
    """The step with a join at its end."""
    free = _free_event(step)
    return *step, *join({lane: free + i for i, lane in enumerate(used_lanes(step))})


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
    lanes: Sequence[Lane],
    events: CallEvents,
    stale: Collection[str] | None = None,
    *,
    jumps: bool = False,
) -> Step:
    """What is issued before a call, so that it finds in the arena what a pass without jumps leaves there.

    ``step``, ``events``: of all calls.  ``begin``: the index of the first op of the call.  ``kept``: see :func:`resident`.
    ``lanes``: of the device.

    At a cold start, everything is copied.  If ``jumps``, or with ``stale`` weights, which were rewritten, the arena has the
    resident chunks of all others; without ``jumps``, also what is on its way here or in use.  A cold start and a jump issue
    the reads again that a pass has issued here for later copies.  What the prologue itself copies is in no ring: a weight in
    a file is read by its copy.

    Compute waits for the copies if a weight has been waited for in a call before, and for stale weights: the event that a
    reader awaits may be that of another copy.
    """
    cold = stale is None and not jumps
    stale = stale or ()
    ahead = reads_ahead(step, begin) if events.reads and (cold or jumps) else ()
    # nothing else orders what one lane has in flight before the copies of the other, and copies before reads into their bytes
    ops = [*events.join(lanes)] if len(lanes) > 1 or ahead else []
    handed: list[Stream] = [*lanes, "read"] if ahead else [*lanes]
    ops += [Record("compute", events.handover), *(Wait(stream, events.handover) for stream in handed)]
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
            ops.append(replace(copy, ring=None))
            ops += (op for op in step[i + 1 : i + 2] if isinstance(op, Record) and op.stream == copy.stream)
    ops += ahead
    # the last wait before the evict is that of the first reader; a barrier may wait for the copies of the next step
    waits = ((i, weight) for i, op in enumerate(step) if isinstance(op, Wait) for weight in op.weights)
    waited = {weight: i for i, weight in waits if i < evicted.get(weight, -1)}
    if stale or any(i < begin <= evicted[weight] for weight, i in waited.items()):
        ops += events.join(lanes)
    return tuple(ops)


def reads_ahead(step: Step, begin: int) -> Step:
    """The reads, with their marks, that a pass has issued before an op for copies from it on, in their order.

    ``step``: of all calls.  ``begin``: the index of the op.
    """
    ops, read = list[Op](), set[tuple[str, int]]()
    event = -1  # for which the copies waited last, directly before a copy out of the ring: reads.py proves that
    for op in (*step[begin:], *step[:begin]):
        if isinstance(op, Read):
            read.add((op.weight, op.first))
        elif isinstance(op, Wait) and op.stream == "copy":
            event = op.event
        elif isinstance(op, Copy) and op.ring is not None and (op.weight, op.first) not in read:
            ops += [Read(op.weight, op.first, op.end, op.ring), Record("read", event)]
    return tuple(ops)


def without_reads(step: Iterable[Op], events: CallEvents) -> Step:
    """The step if no weight is in a file: its copies are from host memory."""
    return tuple(op for op in step if op.stream != "read" and not (isinstance(op, Wait) and op.event in events.reads))


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
    No weight of such a call is in a file.
    """
    ops, later = list[Op](), dict[Stream, list[Op]]()
    for op in without_reads(step, events):
        if op.stream in LANES:
            later.setdefault(op.stream, []).append(op)
            continue
        if isinstance(op, Wait):
            for waiting in later.values():
                arrived = next((i + 1 for i, op_ in enumerate(waiting) if op_ == Record(op_.stream, op.event)), 0)
                ops += waiting[:arrived]
                del waiting[:arrived]
        ops.append(op)
    for lane in LANES:
        ops += later.get(lane, ())
    return *ops, *events.join(used_lanes(ops))
