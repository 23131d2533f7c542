"""Timeline: a discrete-event simulation of a step on a hardware profile.  The step is repeated until two successive
repetitions are equal.

Compute runs its ops in order, like a CUDA stream.  When compute reaches a window, the copies of this window are issued at
once.  When it reaches the start of a collective, the collective is issued at once.  ``resources.py`` defines the resources
that ops occupy, and how ops slow each other down.  The timeline depends only on the step, not on the policy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Literal

from chunkflow_compile.passes.forms import reads_ahead
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.plan import Plan, Span, SpanLane
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
    Scheduler,
    Start,
    Step,
    Wait,
    reads,
)

from .durations import Durations
from .resources import IDLE, CollectivePhase, CopyUse, Drive, Queue, ReadUse, Use, stretches

# The maximum number of repetitions.  Usually, the second or third repetition equals the previous one.  If the step still
# changes after MOST_STEPS repetitions, the result is the last repetition.
MOST_STEPS = 12
_SETTLED = 1e-9
# The name of a span in which compute waits at a join, that is, for all copies at the end of a call.
END_OF_CALL = "end of the call"


@dataclass(kw_only=True)
class Timeline:
    """The times of one step in the steady state.  During the simulation, the fields are the sums so far.

    ``slack``: for each weight, seconds from its arrival to its first reader; negative if the reader waited.
    ``peak_bytes``: peak of streamed bytes in slots.  The other fields are the same as in :class:`Prediction`.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    collective_s: float = 0.0
    inflation_s: float = 0.0
    copy_s: float = 0.0
    peak_bytes: int = 0
    slack: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class ComputeWait:
    """A point at which compute waits for copies.  ``lane``: lane of the span that shows this wait.  ``weights``: compute
    waits for the newest copy of each of these weights, one after the other.  ``events``: events that compute waits for at a
    join."""

    lane: Literal["stall", "barrier", "join"]
    weights: tuple[str, ...] = ()
    events: tuple[int, ...] = ()


# The items that the simulation of a step processes one after the other.
Played = CopyUse | ReadUse | ComputeWait | Run | Start | Finish | Evict | Record


class Simulator(Durations):
    """Simulates steps of one problem on one machine."""

    def with_slower_copies(self, factor: float) -> Simulator:
        """Return a simulator like this one in which copies take ``factor`` times as long."""
        other = copy.copy(self)
        other.strain = factor * self.strain
        return other

    def play(self, step: Step, spans: bool = True) -> Timeline:
        """Simulate a step from a cold start to its steady state.  ``spans``: whether to record spans."""
        return Playback(self, step, spans).play()

    def step_under(self, plan: Plan) -> float:
        """Return the time of a step in seconds under a plan.  The plan must have been made for this problem, or for a problem
        with the same structure and other sizes."""
        windows = {w.name: w.windows for w in plan.streamed}
        return self.play(
            Scheduler(self.problem, self.chunk_bytes).step(windows, plan.barriers, plan.joins), spans=False
        ).step_s


class Playback:
    """The simulation of one step.  A subclass in ``simulate/sharded.py`` also simulates the all-gathers of sharded
    weights."""

    def __init__(self, simulator: Simulator, step: Step, spans: bool) -> None:
        self.simulator = simulator
        self.recording = spans
        self.stretch = stretches(simulator.hardware)
        self.items = list(_played(simulator, step))
        transfers = [item for item in self.items if isinstance(item, CopyUse)]
        self.lanes: dict[Lane, Queue[CopyUse]] = {lane: Queue() for lane in LANES}
        self.moving: tuple[Lane, ...] = ()  # the lanes with a copy in flight
        self.collectives: Queue[int] = Queue()
        self.phase: CollectivePhase = "latency"  # the phase of the collective in flight
        self.drive = Drive()
        ahead = reads_ahead(step, 0) if simulator.reads_files else ()  # the reads of the prologue
        self.ahead = [simulator.reading(read) for read in reads(ahead)]
        self.now = 0.0
        self.region_end = IDLE  # end of the running region
        self.attending = False  # whether the running region is attention
        self.attended_s = 0.0  # seconds by which attention has slowed down the collective in flight
        self.step = Timeline()
        self.spans: list[Span] = []
        # ``streamed``: for each weight, the bytes copied per step.  ``live``: bytes that are now in slots
        self.streamed: dict[str, int] = {}
        for transfer in transfers:
            weight = transfer.op.weight
            self.streamed[weight] = self.streamed.get(weight, 0) + transfer.nbytes
        self.live = 0
        self.arrival: dict[str, float] = {}
        # for each event of a join, the queue of its lane and the number of the newest copy when the event was recorded
        self.marks: dict[int, tuple[Queue[CopyUse], int]] = {}

    def play(self) -> Timeline:
        for item in self.items:
            if isinstance(item, CopyUse) and item.op.next_step:
                if item.op.ring is not None:
                    self._read(self.simulator.reading(item.op))
                self._issue(item)
        for reading in self.ahead:
            self._read(reading)
        previous: tuple[float, ...] = ()
        for _ in range(MOST_STEPS):
            begin, self.step = self.now, Timeline(peak_bytes=self.live)
            self.spans.clear()
            for item in self.items:
                self._run(item)
            # because of rounding errors, a copy that ends together with the step may still have a little time left
            for lane in self.moving:
                if self.lanes[lane].left <= _SETTLED * self.lanes[lane].ops[0].copy_s:
                    self._end_copy(lane)
            length = self.now - begin
            # the length of the step alone does not show that the step is steady: if collectives determine the length, it
            # stays the same even if each copy still starts later than in the previous repetition
            rest = [queue.left for queue in self.lanes.values()] + [self.drive.left]
            left = [0.0 if seconds == IDLE else seconds for seconds in rest]
            sums = (self.step.exposed_s, self.step.copy_s, self.step.inflation_s)
            state = (length, *sums, *left, *(len(queue.ops) for queue in self.lanes.values()), len(self.drive.ops))
            if previous and all(abs(a - b) <= _SETTLED * length for a, b in zip(state, previous, strict=True)):
                break
            previous = state
        spans = tuple(Span(s.lane, s.name, s.start - begin, s.end - begin) for s in self.spans)
        return replace(self.step, step_s=length, spans=spans)

    def _run(self, item: Played) -> None:
        if isinstance(item, CopyUse):
            self._issue(item)
        elif isinstance(item, ComputeWait):
            self._stall(item)
        elif isinstance(item, Run):
            self._compute(item.region)
        elif isinstance(item, Evict):
            self.live -= self.streamed.get(item.weight, 0)  # 0 bytes if the whole weight is resident
        elif isinstance(item, Start):
            self.collectives.issue(item.collective, item.collective)
            if len(self.collectives.ops) == 1:
                self._start_collective()
        elif isinstance(item, Finish):
            self._advance_to(self.collectives, item.collective)
        elif isinstance(item, ReadUse):
            self._read(item)
        else:
            queue = self.lanes[_lane_of(item)]
            self.marks[item.event] = queue, queue.issued

    def _record(self, lane: SpanLane, name: str, start: float) -> None:
        if self.recording:
            self.spans.append(Span(lane, name, start, self.now))

    def _issue(self, transfer: CopyUse) -> None:
        self.lanes[transfer.lane].issue(transfer, transfer.op.weight)
        self._start_copy(transfer.lane)

    def _read(self, reading: ReadUse) -> None:
        """Issue a read.  The read starts after all copies that have been issued so far have ended."""
        copied = self.lanes["copy"]
        self.drive.issue(reading, copied.issued)
        self.drive.begin(self.now, copied.ended)

    def _stall(self, item: ComputeWait) -> None:
        for weight in item.weights:
            self._wait(weight, item.lane)
        if not item.events:
            return
        reached = self.now
        for queue, number in map(self.marks.__getitem__, item.events):
            while queue.ended < number:
                self._advance()
        self.step.exposed_s += self.now - reached
        if self.now > reached:
            self._record("join", END_OF_CALL, reached)

    def _wait(self, weight: str, lane: SpanLane) -> None:
        reached, step = self.now, self.step
        self._advance_to(self.lanes[self.simulator.lane(weight)], weight)
        waited = self.now - reached
        step.exposed_s += waited
        if waited:
            self._record(lane, weight, reached)
        if lane == "stall":
            step.slack[weight] = -waited if waited else reached - self.arrival.get(weight, reached)

    def _compute(self, region: int) -> None:
        start, self.attending = self.now, self.simulator.attends[region]
        self.region_end = start + self.simulator.compute_s[region] * self._stretched("region")
        while self.now < self.region_end:
            self._advance()
        self.region_end, self.attending = IDLE, False
        self.step.compute_s += self.now - start
        self._record("compute", self.simulator.problem.regions[region].name, start)

    def _advance_to(self, queue: Queue[CopyUse] | Queue[int], name: str | int) -> None:
        """Advance the time until the newest op of ``name`` in ``queue`` has ended.  ``name``: a weight or a collective."""
        number = queue.newest.get(name, 0)
        while queue.ended < number:
            self._advance()

    def _advance(self) -> None:
        """Advance the time to the next event: the end of the running region, or the end of the first op in a queue."""
        collectives, drive, moving = self.collectives, self.drive, self.moving
        busy, overlaps = collectives.left != IDLE, self._overlaps
        slower_collective = self._stretched(self.phase) if busy else 1.0
        slower = [self._slower(lane, busy) for lane in moving]
        copies_s = [self.lanes[lane].left * by for lane, by in zip(moving, slower, strict=True)]
        collective_s, region_s, read_s = collectives.left * slower_collective, self.region_end - self.now, drive.left
        delta = min(collective_s, region_s, read_s, *copies_s)
        self.now = self.region_end if delta == region_s else self.now + delta
        self.step.copy_s += len(moving) * delta
        for lane, by in zip(moving, slower, strict=True):
            self.lanes[lane].left -= delta / by
        collectives.left -= delta / slower_collective
        if overlaps:
            self.attended_s += delta - delta / self.stretch[self.phase, "region"]
        drive.left -= delta
        region_rate = self._stretched("region")
        for lane, copy_s in zip(moving, copies_s, strict=True):
            if copy_s == delta:
                self._end_copy(lane)
        if read_s == delta:
            self._end_read()
        if collective_s == delta:
            self._end_phase()
        if self.moving != moving or self._overlaps != overlaps:  # the speed of the region changes
            left = (self.region_end - self.now) / region_rate
            self.region_end = self.now + left * self._stretched("region")

    def _stretched(self, use: Use) -> float:
        """Return the factor by which ops in flight slow down a region or a phase of a collective."""
        factor = 1.0
        for lane in self.moving:
            factor *= self.stretch[use, lane]
        if self._overlaps:
            factor *= self.stretch[("region", self.phase) if use == "region" else (use, "region")]
        return factor

    @property
    def _overlaps(self) -> bool:
        """Whether attention and a collective that uses kernels are in flight."""
        ops = self.collectives.ops
        return self.attending and bool(ops) and not self.simulator.by_engine[ops[0]]

    def _slower(self, lane: Lane, collective: object) -> float:
        """Return the factor by which other ops in flight slow down the copy in a lane.  ``collective``: whether a
        collective is in flight."""
        factor = self.stretch.get((lane, self.phase), 1.0) if collective else 1.0
        for other in self.moving if len(self.moving) > 1 else ():
            factor *= self.stretch.get((lane, other), 1.0)
        return factor

    @property
    def _wants_engine(self) -> bool:
        """Whether the collective in flight uses the copy engine or waits for it."""
        if self.phase == "latency" or not self.collectives.ops:
            return False
        return self.simulator.by_engine[self.collectives.ops[0]]

    def _start_copy(self, lane: Lane) -> None:
        """Start the next copy of a lane, if no copy of this lane is in flight, the bytes to copy have been read from the
        SSD, and no collective uses the copy engine."""
        queue = self.lanes[lane]
        if queue.left != IDLE or not queue.ops:
            return
        transfer = queue.ops[0]
        if self._wants_engine or (transfer.op.ring is not None and not self.drive.ready):
            return
        queue.start, queue.left, self.moving = self.now, transfer.copy_s, (*self.moving, lane)
        self.live += transfer.nbytes
        self.step.peak_bytes = max(self.step.peak_bytes, self.live)

    def _end_copy(self, lane: Lane) -> None:
        transfer, self.moving = self.lanes[lane].end(), tuple(other for other in self.moving if other != lane)
        self.arrival[transfer.op.weight] = self.now
        self._record(lane, transfer.name, self.lanes[lane].start)
        if transfer.op.ring is not None:
            self.drive.leave()
        if self.drive.ops:
            self.drive.begin(self.now, self.lanes["copy"].ended)
        if self._wants_engine and not self.moving:
            self._start_exchange()
        self._start_copy(lane)

    def _end_read(self) -> None:
        start, reading = self.drive.start, self.drive.end()
        self._record("read", reading.name, start)
        self.drive.begin(self.now, self.lanes["copy"].ended)
        self._start_copy("copy")

    def _start_collective(self) -> None:
        first = self.collectives.ops[0]
        self.phase = "latency"
        self.collectives.start, self.attended_s = self.now, 0.0
        self.collectives.left = self.simulator.collective_s[first] - self.simulator.link_s[first]
        if not self.collectives.left:
            self._start_exchange()

    def _start_exchange(self) -> None:
        """End the latency phase of a collective.  The exchange of bytes starts as soon as its resources are free."""
        self.phase = "exchange"
        waits = self._wants_engine and bool(self.moving)
        self.collectives.left = IDLE if waits else self.simulator.link_s[self.collectives.ops[0]]

    def _end_phase(self) -> None:
        if self.phase == "latency":
            self._start_exchange()
            return
        index = self.collectives.end()
        took = self.now - self.collectives.start
        self.step.collective_s += took
        self.step.inflation_s += took - self.simulator.collective_s[index] - self.attended_s
        self._record("collective", self.simulator.problem.collectives[index].name, self.collectives.start)
        if self.collectives.ops:
            self._start_collective()
        for lane in LANES:
            self._start_copy(lane)


def _played(simulator: Simulator, step: Step) -> Iterator[Played]:
    """Yield the items of a step to simulate.  Consecutive waits of compute become one wait per weight, in the order of the
    weights' names.  With this order, a stall is attributed to the same weight whichever lanes the weights are in."""
    joins = {op.event for op in step if isinstance(op, Wait) and op.stream == "compute" and not op.weights}
    waits: list[Wait] = []
    for op in step:
        if isinstance(op, Release | Evaluate):
            continue
        if isinstance(op, Wait):
            if op.stream == "compute":
                waits.append(op)
            continue
        if waits:
            yield from _stalls(waits, op)
            waits = []
        if isinstance(op, Copy):
            yield simulator.transfer(op)
        elif isinstance(op, Read):
            yield simulator.reading(op)
        elif not isinstance(op, Record) or op.event in joins:
            yield op
    yield from _stalls(waits, None)


def _stalls(waits: Sequence[Wait], before: Op | None) -> Iterator[ComputeWait]:
    """Yield the waits of compute before an op.  ``before``: the op after the waits, or None at the end of the step.  If this
    op starts a collective, the waits are the barrier of the collective, and their order is kept."""
    for readable, group in groupby(waits, key=lambda wait: bool(wait.weights)):
        together = list(group)
        weights = chain.from_iterable(wait.weights for wait in together)
        if not readable:
            yield ComputeWait("join", events=tuple(wait.event for wait in together))
        elif isinstance(before, Start):
            yield ComputeWait("barrier", tuple(weights))
        else:
            yield ComputeWait("stall", tuple(weights if len(together) == 1 else sorted(weights)))


def _lane_of(record: Record) -> Lane:
    """Return the lane in which an event of a join is recorded."""
    assert record.stream == "copy" or record.stream == "pull"
    return record.stream
