"""Forms: the ops that are issued in addition to the step of a call (step.py), or instead of it.

* :func:`prologue`: ops before the step.  The prologue copies the chunks that are missing at a cold start, at a jump (a call
  out of the planned order), or after weights were written.  A step also waits for the arrivals of resident chunks, which it
  does not copy itself; the prologue copies these chunks and records their arrivals.
* :func:`captured`: the step as one CUDA graph.
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
    """Numbers of the events that prologues and joins use.  Programs do not contain these events, except for ``reads``.

    ``handover``: event at the beginning of a prologue; the lanes wait for it before they overwrite the arena.
    ``lanes``: for each lane, the event that a join records in it.  ``reads``: events that are recorded after reads.
    """

    handover: int
    lanes: Mapping[Lane, int]
    reads: frozenset[int] = frozenset()

    @staticmethod
    def of(step: Step) -> CallEvents:
        """Choose the events for the calls of a cycle.  ``step``: ops of all these calls."""
        free = _free_event(step)
        reads = frozenset(op.event for op in step if isinstance(op, Record) and op.stream == "read")
        return CallEvents(free, {lane: free + 1 + i for i, lane in enumerate(LANES)}, reads)

    @property
    def count(self) -> int:
        """The number of events, including the events that programs contain.  Events are numbered from 0."""
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
    """Return copies of all chunks that are resident in the arena, for a prologue."""
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
    """Return the ops to issue before a call.  These ops put the arena into the state that it would have if all earlier calls
    of the cycle had run in the planned order.

    ``step``, ``events``: ops and events of all calls of the cycle.  ``begin``: index of the first op of the call.
    ``kept``: copies of the resident chunks, see :func:`resident`.  ``lanes``: lanes of the device.  ``stale``: weights that
    were written since they were copied, or None at a cold start.  ``jumps``: whether the call is a jump, that is, out of the
    planned order.

    At a cold start, the prologue copies all resident chunks, and all streamed chunks that earlier calls would have
    copied for this and later calls.  At a jump, it copies these streamed chunks, and the resident chunks of stale weights.
    Otherwise, it copies only stale weights.  At a cold start and at a jump, the prologue also issues the reads that earlier
    calls would have issued for copies after the beginning of this call.  The prologue's own copies do not use the ring: for a
    weight in a file, the copy itself reads the file.

    The ops of the call may lack a wait for a weight that the prologue copies.  This is the case for some stale weights, and
    for a weight whose first reader is in an earlier call, because that earlier call contains the wait.  If the prologue
    copies such weights, compute waits for all copies at the end of the prologue.
    """
    cold = stale is None and not jumps
    stale = stale or ()
    ahead = reads_ahead(step, begin) if events.reads and (cold or jumps) else ()
    # copies of earlier calls may be in flight; this join orders them before the prologue's copies in the other lane, and
    # before reads that overwrite their bytes of the ring
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
        # in the planned order, ops from ``begin`` on have been issued only by the previous step.  Of their copies, those for
        # this step are needed, unless an earlier call of this step has evicted the weight.  Ops before ``begin`` have been
        # issued by this step.  Of their copies, those for the next step are needed, and those whose weight has not been
        # evicted yet
        needed = evicted.get(copy.weight, -1) >= begin
        if (copy.next_step and needed) if i >= begin else (copy.next_step or needed):
            ops.append(replace(copy, ring=None))
            ops += (op for op in step[i + 1 : i + 2] if isinstance(op, Record) and op.stream == copy.stream)
    ops += ahead
    # for each weight, the index of the wait before its first reader: this is the last wait for the weight before its evict.
    # A wait after the evict belongs to a barrier, which may wait for the copies of the next step
    waits = ((i, weight) for i, op in enumerate(step) if isinstance(op, Wait) for weight in op.weights)
    waited = {weight: i for i, weight in waits if i < evicted.get(weight, -1)}
    if stale or any(i < begin <= evicted[weight] for weight, i in waited.items()):
        ops += events.join(lanes)
    return tuple(ops)


def reads_ahead(step: Step, begin: int) -> Step:
    """Return the reads that a step issues before its op at index ``begin`` for copies after this op, each with its event.
    ``step``: ops of all calls."""
    ops, read = list[Op](), set[tuple[str, int]]()
    # the event that the copy stream waited for last.  When the loop reaches a copy out of the ring, it is the event of the
    # read that belongs to this copy, as program/reads.py proves
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
    """Return the step without reads and without waits for reads.  The result is correct only if no weight is in a file."""
    return tuple(op for op in step if op.stream != "read" and not (isinstance(op, Wait) and op.event in events.reads))


def _kept_arrivals(step: Step, kept: Sequence[Copy]) -> dict[int, list[int]]:
    """Return the events to record after copies of resident chunks, by the index of the copy in ``kept``.

    The step waits for these events but does not record them.  Each event is recorded after the last copy of resident chunks
    that the step waits for with this event.
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

    Each copy is issued directly before compute waits for it.  When a CUDA graph runs, a node with several predecessors
    runs in the stream of the predecessor that was captured first, so issuing copies late keeps compute in one stream.  The
    order of the copies in a lane does not change, nor do the events that each copy waits for.

    A wait for an event that the call itself does not record has no effect in a CUDA graph.  Such an event is the arrival of a
    copy that an earlier call has issued.  That copy has already ended: if the earlier call is a CUDA graph, it waits
    for all its copies before it ends; otherwise compute has waited for them before the graph of this call runs.  No weight
    of a captured call is in a file.
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
