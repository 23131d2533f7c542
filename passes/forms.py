"""Forms: the ops that are issued in addition to the step of a call, or instead of it.  (step.py orders the ops of a step.)

* :func:`prologue`: ops before the step.  They copy the chunks that are missing at a cold start, at a jump (a call out of
  the planned order), and after weights were rewritten.  They also record the events that the step waits for but does not
  record.  Each of these events is recorded after the resident chunks of the weights that its wait names;
* :func:`captured`: the step as one CUDA graph;
* :func:`joined`: the step with a join at its end, where compute waits for all copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .names import LANES, Lane
from .plan import Plan, runs
from .step import Copy, Evict, Op, Read, Record, Step, Stream, Wait, join, used_lanes


@dataclass(frozen=True)
class CallEvents:
    """Numbers of the events at the beginning and the end of calls, which do not occur in programs.  ``handover``: event
    at the beginning of a prologue, with which the arena is handed over to the call.  ``lanes``: event of a join, for
    each lane.  ``reads``: events recorded by reads; unlike the other events, they also occur in programs."""

    handover: int
    lanes: Mapping[Lane, int]
    reads: frozenset[int] = frozenset()

    @staticmethod
    def of(step: Step) -> CallEvents:
        """Choose the events for several calls that share them.  ``step``: ops of all these calls."""
        free = _free_event(step)
        reads = frozenset(op.event for op in step if isinstance(op, Record) and op.stream == "read")
        return CallEvents(free, {lane: free + 1 + i for i, lane in enumerate(LANES)}, reads)

    @property
    def count(self) -> int:
        """The number of events, including the events in programs.  Events are numbered from 0."""
        return self.handover + 1 + len(self.lanes)

    def join(self, lanes: Iterable[Lane]) -> Step:
        """Return the ops that make compute wait for all copies issued so far.  ``lanes``: lanes of these copies."""
        return tuple(join({lane: self.lanes[lane] for lane in lanes}))


def joined(step: Step) -> Step:
    """Return the step with a join at its end: compute waits for all copies."""
    free = _free_event(step)
    return *step, *join({lane: free + i for i, lane in enumerate(used_lanes(step))})


def _free_event(step: Step) -> int:
    return 1 + max((op.event for op in step if isinstance(op, Record | Wait)), default=-1)


def resident(plan: Plan) -> tuple[Copy, ...]:
    """Return the copies of the resident chunks in the arena."""
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
    """Return the ops to issue before a call.  After them, the arena is in the state in which a pass (all calls in the
    planned order) would leave it.

    ``step``, ``events``: ops and events of all calls.  ``begin``: index of the first op of the call.  ``kept``: copies
    of resident chunks, see :func:`resident`.  ``lanes``: lanes of the device.  ``stale``: weights that were written
    since they were copied.  ``jumps``: whether the call is a jump, that is, out of the planned order.  If ``stale`` is
    None and the call is not a jump, it is a cold start.

    At a cold start, everything is copied.  Otherwise, the arena already contains the resident chunks of all weights
    that are not stale.  Without a jump, the arena also contains the chunks that are in use or have been copied for this
    call.  At a cold start and at a jump, the prologue also issues the reads that a pass would have issued before this
    call for later copies.  The prologue's own copies do not use the ring: for a weight in a file, the copy itself reads
    the file.

    Compute waits for the prologue's copies of stale weights, and of weights that an earlier call has already waited
    for.  The event that the reader of such a weight waits for may belong to another copy.
    """
    cold = stale is None and not jumps
    stale = stale or ()
    ahead = reads_ahead(step, begin) if events.reads and (cold or jumps) else ()
    # without this join, nothing orders copies in flight in one lane before copies in the other lane, or before reads
    # that overwrite their bytes of the ring
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
        # copies that the last pass would have issued for this pass, and copies that earlier calls of this pass would
        # have issued
        needed = evicted.get(copy.weight, -1) >= begin
        if (copy.next_step and needed) if i >= begin else (copy.next_step or needed):
            ops.append(replace(copy, ring=None))
            ops += (op for op in step[i + 1 : i + 2] if isinstance(op, Record) and op.stream == copy.stream)
    ops += ahead
    # the last wait before the evict belongs to the first reader; a barrier may wait for the copies of the next step
    waits = ((i, weight) for i, op in enumerate(step) if isinstance(op, Wait) for weight in op.weights)
    waited = {weight: i for i, weight in waits if i < evicted.get(weight, -1)}
    if stale or any(i < begin <= evicted[weight] for weight, i in waited.items()):
        ops += events.join(lanes)
    return tuple(ops)


def reads_ahead(step: Step, begin: int) -> Step:
    """Return the reads that a pass has issued before the op at index ``begin`` for copies after this op, in order, with
    their events.

    ``step``: ops of all calls.  ``begin``: index of the op among them.
    """
    ops, read = list[Op](), set[tuple[str, int]]()
    # the event that the copy stream waited for last; directly before a copy out of the ring, it is the event of its read
    # (proved in reads.py)
    event = -1
    for op in (*step[begin:], *step[:begin]):
        if isinstance(op, Read):
            read.add((op.weight, op.first))
        elif isinstance(op, Wait) and op.stream == "copy":
            event = op.event
        elif isinstance(op, Copy) and op.ring is not None and (op.weight, op.first) not in read:
            ops += [Read(op.weight, op.first, op.end, op.ring), Record("read", event)]
    return tuple(ops)


def without_reads(step: Iterable[Op], events: CallEvents) -> Step:
    """Return the step without reads and without waits for them.  This is for the case that no weight is in a file, so
    that all copies are from host memory."""
    return tuple(op for op in step if op.stream != "read" and not (isinstance(op, Wait) and op.event in events.reads))


def _kept_arrivals(step: Step, kept: Sequence[Copy]) -> dict[int, list[int]]:
    """Return the events to record after copies of resident chunks, by the index of the copy in ``kept``.

    These are the events that the step waits for but does not record.  Each event is recorded after the last resident
    chunk of the weights that may be read once the event has been reached.
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
    """Return the step of a call in the form of a CUDA graph, in which compute waits for all copies at the end.

    Each copy is issued directly before compute waits for it.  CUDA runs the work after a join in the stream of the
    parent that was recorded first, so this order keeps compute in one stream.  The order of the copies does not change,
    nor do the events that each copy waits for.  In a CUDA graph, an event has no mark from before the call.  So a wait
    for an event that the call has not recorded ends at once.  Such an event stands for a copy of an earlier call.
    Ending at once is correct: the earlier call waits for all copies before it ends, and a graph is launched after all
    copies outside of graphs.  No weight of such a call is in a file.
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
