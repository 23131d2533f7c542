"""Timeline: play a schedule on a hardware profile, as a discrete-event simulation, until its steps repeat.

There are four lanes.  *Compute* runs the items in order, as a device stream does.  *Collective* runs collectives one
at a time, in the order of their start.  *Copy* runs chunks one at a time, in the order of issue; a chunk is issued when
compute reaches its prefetch.  *Read* reads weights on the drive one at a time, in the order of their copies, ahead of
them as far as the ring in host memory has room; a copy begins when its bytes are read.

On a shared link, a copy and the bytes of a collective in flight together slow each other down by the profile's
factors: 2 for both is a fair share of a link that either fills alone. A collective begins with its latency, in which
ranks meet and nothing crosses the link. A copy in flight stretches compute, and this latency, by the profile's
factor.

A collective on copy engines and the copies of weights take the engine in turns: the collective waits for the copy under
way, and no copy begins before its bytes are through.

The timeline knows no policy: it sees only the schedule.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.ops import Prefetch
from chunkflow_compile.passes.plan import Lane, Plan, Span, span_name
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.ring import ring_bytes, room

from .schedule import Await, Collect, Compute, ScheduleItem, Wait, schedule, transfers_of

# A schedule settles in two or three steps; if one still drifts after this many, its last step is reported.
MOST_STEPS = 12
_SETTLED = 1e-9
_NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step in the steady state.  Seconds; fields and ``spans`` as in :class:`Prediction`.

    ``slack``: weight -> seconds from its arrival to its first reader, negative if the reader waited.  ``peak_bytes``:
    most streamed bytes in slots at once.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    collective_s: float
    inflation_s: float
    copy_s: float
    peak_bytes: int
    slack: Mapping[str, float]
    spans: tuple[Span, ...]


class Simulator:
    """Plays schedules of one problem on one machine."""

    def __init__(self, problem: Problem, hardware: Hardware, chunk_bytes: int, timings: Timings | None = None) -> None:
        """``timings``: measurements, in place of the profile's rates.

        Raises ChunkflowError if they are of another problem.
        """
        self.problem = problem
        self.hardware = hardware if timings is None else timings.machine(hardware, chunk_bytes)
        self.chunk_bytes = chunk_bytes
        self.strain = 1.0
        self.compute_s = [r.cost.seconds(hardware) for r in problem.regions]
        crossing = [self.hardware.crossing_seconds(c.nbytes, c.ranks) for c in problem.collectives]
        self.collective_s = [
            hardware.latency_s(c.ranks) + s for c, s in zip(problem.collectives, crossing, strict=True)
        ]
        if timings is not None:
            timings.check(problem)
            self.compute_s = timings.regions(problem, self.hardware)
            self.collective_s = timings.collectives(problem, self.collective_s)
        self.by_engine = [c.engine == "copy" for c in problem.collectives]
        self.link_s = [min(alone, link) for alone, link in zip(self.collective_s, crossing, strict=True)]
        self.sizes = {w.name: w.nbytes for w in problem.weights}
        self.drive = {w.name for w in problem.weights if w.drive}

    @property
    def taking_the_link(self) -> frozenset[str]:
        """The collectives that copies are slower beside: on a shared link all, else those on copy engines."""
        shared = self.hardware.shared_link
        return frozenset(c.name for c in self.problem.collectives if shared or c.engine == "copy")

    def with_slower_copies(self, factor: float) -> Simulator:
        """The same simulator with copies that take ``factor`` times as long."""
        other = copy.copy(self)
        other.strain = factor * self.strain
        return other

    def nbytes(self, weight: str, first: int, end: int) -> int:
        """Bytes of chunks ``[first, end)`` of a weight."""
        return min(end * self.chunk_bytes, self.sizes[weight]) - first * self.chunk_bytes

    def copy_seconds(self, weight: str, first: int, end: int) -> float:
        """Seconds that chunks ``[first, end)`` of a weight take alone on the link."""
        alone = self.nbytes(weight, first, end) / self.hardware.copy_rate + (end - first) * self.hardware.chunk_s
        return self.strain * alone

    def read_seconds(self, weight: str, first: int, end: int) -> float:
        """Seconds that the drive reads chunks ``[first, end)`` of a weight; 0 if it is in host memory."""
        return self.nbytes(weight, first, end) / self.hardware.drive_bandwidth if weight in self.drive else 0.0

    def play(self, items: Sequence[ScheduleItem], spans: bool = True) -> Timeline:
        """The step that a schedule settles into after a cold start; ``spans``: whether to record them."""
        return _Run(self, items, spans).play()

    def step_under(self, plan: Plan) -> float:
        """Seconds of a step under a plan of this problem, or of the same problem at other sizes."""
        return self.play(schedule(self.problem, transfers_of(self.problem, plan)), spans=False).step_s


@dataclass
class _StepSums:
    """The sums of the step under way."""

    start: float
    compute: float = 0.0
    exposed: float = 0.0
    collective: float = 0.0
    inflation: float = 0.0
    copy: float = 0.0
    peak: int = 0
    slack: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[Lane, str, float, float]] = field(default_factory=list)


class _Run:
    def __init__(self, simulator: Simulator, items: Sequence[ScheduleItem], spans: bool) -> None:
        self.simulator = simulator
        self.spans = spans
        self.items = items
        hardware = simulator.hardware
        self.copy_factor = hardware.copy_slowdown if hardware.shared_link else 1.0
        self.collective_factor = hardware.collective_slowdown if hardware.shared_link else 1.0
        self.compute_factor = hardware.compute_slowdown
        self.now = 0.0
        self.compute_end = _NEVER  # of the region under way
        self.step = _StepSums(0.0)
        self.live = 0
        self.streamed: dict[str, int] = {}
        # Copy lane: what is queued, the seconds left of the first, and the newest issue of each weight.
        self.copies: deque[tuple[Prefetch, float, int, int | None]] = deque()
        self.copy_left = 0.0
        self.copy_start = 0.0
        self.issued = self.arrived = 0
        self.newest: dict[str, int] = {}
        self.arrival: dict[int, float] = {}
        # Read lane: the copies that read the drive, in order, those of a cold start before the steps; how many of them are
        # issued and read; the seconds left of the next one; the bytes in the ring.
        drive = [op for op in items if isinstance(op, Prefetch) and op.weight in simulator.drive]
        self.cold_reads, self.reads = [op for op in drive if op.next_step], drive
        self.most_ring = ring_bytes([simulator.nbytes(op.weight, op.first, op.end) for op in drive])
        self.reads_issued = self.reads_done = 0
        self.read_left = _NEVER
        self.read_start = 0.0
        self.ring = 0
        self.unread = False  # the first copy waits for its bytes
        self.held = False  # the first copy waits for the engine
        self.engine = False  # a collective has the engine
        # Collective lane: what is queued, and the seconds left of the first, in its latency and on the link.
        self.collectives: deque[int] = deque()
        self.latency_left = 0.0
        self.collective_left = 0.0
        self.collective_start = 0.0
        self.started: dict[int, int] = {}
        self.finished: dict[int, int] = {}

    def play(self) -> Timeline:
        for item in self.items:
            if isinstance(item, Prefetch):
                nbytes = self.simulator.nbytes(item.weight, item.first, item.end)
                self.streamed[item.weight] = self.streamed.get(item.weight, 0) + nbytes
        self._start_read()
        for item in self.items:
            if isinstance(item, Prefetch) and item.next_step:
                self._issue(item)
        previous: tuple[float, ...] = ()
        for _ in range(MOST_STEPS):
            self.step = _StepSums(self.now)
            self.step.peak = self.live
            for item in self.items:
                self._run(item)
            # A copy that ends with the step belongs to it, despite rounding errors.
            if self.copying and self.copy_left <= _SETTLED * self.copies[0][1]:
                self._end_copy()
            length = self.now - self.step.start
            # Compare more than the length: if collectives determine it, it settles while copies still catch up.
            read_left = 0.0 if self.read_left == _NEVER else self.read_left
            sums = (self.step.exposed, self.step.copy, self.step.inflation)
            state = (length, *sums, self.copy_left, len(self.copies), read_left, self.ring)
            if previous and all(abs(a - b) <= _SETTLED * length for a, b in zip(state, previous, strict=True)):
                break
            previous = state
        return self._timeline(length)

    def _run(self, item: ScheduleItem) -> None:
        step = self.step
        if isinstance(item, Prefetch):
            self._issue(item)
        elif isinstance(item, Wait):
            wanted = self.newest.get(item.weight, 0)
            reached = self.now
            while self.arrived < wanted:
                self._advance()
            waited = self.now - reached
            step.exposed += waited
            if waited and self.spans:
                step.spans.append(("barrier" if item.barrier else "stall", item.weight, reached, self.now))
            if not item.barrier:
                step.slack[item.weight] = -waited if waited else reached - self.arrival.get(wanted, reached)
        elif isinstance(item, Compute):
            start = self.now
            self.compute_end = start + self.simulator.compute_s[item.region] * (
                self.compute_factor if self.copying else 1
            )
            while self.now < self.compute_end:
                self._advance()
            self.compute_end = _NEVER
            step.compute += self.now - start
            if self.spans:
                step.spans.append(("compute", self.simulator.problem.regions[item.region].name, start, self.now))
        elif isinstance(item, Collect):
            self.started[item.collective] = self.started.get(item.collective, 0) + 1
            self.collectives.append(item.collective)
            if len(self.collectives) == 1:
                self._start_collective()
        elif isinstance(item, Await):
            while self.finished.get(item.collective, 0) < self.started.get(item.collective, 0):
                self._advance()
        else:
            self.live -= self.streamed[item.weight]

    def _issue(self, op: Prefetch) -> None:
        self.issued += 1
        self.newest[op.weight] = self.issued
        seconds = self.simulator.copy_seconds(op.weight, op.first, op.end)
        read = self.reads_issued if op.weight in self.simulator.drive else None
        self.reads_issued += read is not None
        self.copies.append((op, seconds, self.issued, read))
        if len(self.copies) == 1:
            self._start_copy()

    @property
    def copying(self) -> bool:
        return bool(self.copies) and not self.unread and not self.held

    @property
    def wants_engine(self) -> bool:
        """Whether the first collective is to move its bytes by the engine, and its latency is over."""
        return bool(self.collectives) and self.simulator.by_engine[self.collectives[0]] and self.latency_left <= 0

    def _start_copy(self) -> None:
        op, self.copy_left, _, read = self.copies[0]
        self.unread = read is not None and read >= self.reads_done
        self.held = self.wants_engine
        if self.unread or self.held:
            return
        self.copy_start = self.now
        self.live += self.simulator.nbytes(op.weight, op.first, op.end)
        self.step.peak = max(self.step.peak, self.live)

    def _start_read(self) -> None:
        """Read the next bytes, if there is room for them in the ring."""
        if self.read_left != _NEVER or not self.reads:
            return
        op = self._read_op(self.reads_done)
        taken = room(self.simulator.nbytes(op.weight, op.first, op.end))
        if not self.ring or self.ring + taken <= self.most_ring:
            self.ring += taken
            self.read_start = self.now
            self.read_left = self.simulator.read_seconds(op.weight, op.first, op.end)

    def _read_op(self, number: int) -> Prefetch:
        if number < len(self.cold_reads):
            return self.cold_reads[number]
        return self.reads[(number - len(self.cold_reads)) % len(self.reads)]

    def _end_read(self) -> None:
        if self.spans:
            op = self._read_op(self.reads_done)
            self.step.spans.append(("read", span_name(op.weight, op.first, op.end), self.read_start, self.now))
        self.reads_done += 1
        self.read_left = _NEVER
        self._start_read()
        if self.unread:
            self._go_on()

    def _go_on(self) -> None:
        """Start the copy that waited, which stretches the region under way from here on."""
        self._start_copy()
        if self.copying:
            self.compute_end = self.now + (self.compute_end - self.now) * self.compute_factor

    def _start_collective(self) -> None:
        first = self.collectives[0]
        self.collective_left = self.simulator.link_s[first]
        self.latency_left = self.simulator.collective_s[first] - self.collective_left
        self.collective_start = self.now
        self.engine = self.wants_engine and not self.copying

    def _advance(self) -> None:
        """Advance to the next end: of the region under way, the first copy, the first collective or its latency."""
        copying, latency = self.copying, self.latency_left > 0
        collecting = bool(self.collectives) and (self.engine or not self.wants_engine)
        both = copying and collecting and not latency
        copy_factor = self.copy_factor if both else 1.0
        collective_factor = self.collective_factor if both else 1.0
        if latency:
            collective_factor = self.compute_factor if copying else 1.0
        copy_end = self.copy_left * copy_factor if copying else _NEVER
        left = self.latency_left if latency else self.collective_left
        collective_end = left * collective_factor if collecting else _NEVER
        compute_end = self.compute_end - self.now
        delta = min(copy_end, collective_end, compute_end, self.read_left)
        self.now = self.compute_end if delta == compute_end else self.now + delta
        if copying:
            self.step.copy += delta
            self.copy_left -= delta / copy_factor
        read_ends = self.read_left == delta
        self.read_left -= delta
        if copying and copy_end == delta:
            self._end_copy()
        if read_ends:
            self._end_read()
        if latency:
            self.latency_left = 0.0 if collective_end == delta else left - delta / collective_factor
            self.engine = self.wants_engine and not self.copying
        elif collecting:
            self.collective_left -= delta / collective_factor
            if collective_end == delta:
                self._end_collective()

    def _end_copy(self) -> None:
        op, _, number, read = self.copies.popleft()
        self.arrived = number
        self.arrival[number] = self.now
        if self.spans:
            self.step.spans.append(("copy", span_name(op.weight, op.first, op.end), self.copy_start, self.now))
        if read is not None:
            self.ring -= room(self.simulator.nbytes(op.weight, op.first, op.end))
            self._start_read()
        self.engine = self.wants_engine
        if self.copies:
            self._start_copy()
        if not self.copying and self.compute_factor > 1:  # the rest of the region runs at full speed
            self.compute_end = self.now + (self.compute_end - self.now) / self.compute_factor

    def _end_collective(self) -> None:
        index = self.collectives.popleft()
        self.finished[index] = self.finished.get(index, 0) + 1
        took = self.now - self.collective_start
        self.step.collective += took
        self.step.inflation += took - self.simulator.collective_s[index]
        if self.spans:
            name = self.simulator.problem.collectives[index].name
            self.step.spans.append(("collective", name, self.collective_start, self.now))
        self.engine = False
        if self.collectives:
            self._start_collective()
        if self.held:
            self._go_on()

    def _timeline(self, length: float) -> Timeline:
        step = self.step
        return Timeline(
            step_s=length,
            compute_s=step.compute,
            exposed_s=step.exposed,
            collective_s=step.collective,
            inflation_s=step.inflation,
            copy_s=step.copy,
            peak_bytes=step.peak,
            slack=step.slack,
            spans=tuple(Span(n, m, a - step.start, b - step.start) for n, m, a, b in step.spans),
        )
