"""Converts the step that a plan predicts to bars, stalls and slots, for pictures and trace viewers.

Here, a lane is a row of the picture: compute, collectives, copies, pulls, or reads from the SSD.  The step is one of a series
of equal steps.  Times are in seconds from the start of the step.  A bar that starts in the previous step has a negative
``start``.  A bar that ends in the next step has an ``end`` above ``step_s``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.labels import weight_label
from chunkflow_compile.passes.names import LANES
from chunkflow_compile.passes.plan import Plan, RegionLabel, Span, runs, span_chunks, span_name
from chunkflow_compile.units import size

StepLane = Literal["compute", "collective", "copy", "pull", "read"]
STEP_LANES: tuple[StepLane, ...] = get_args(StepLane)
HELD = "held back until the copies have arrived, so that none runs at the same time"
_JOINED = "the call ends when its copies have arrived, so that it can be one CUDA graph"
# An upper bound of the rounding error in a sum of a thousand spans, in seconds.  Every span is longer than this.
_TOLERANCE_S = 1e-8


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A piece of work in a lane of the picture.

    ``name``: the name of the work in the program.  ``label``: a short name for people, which is unique only within ``block``.
    """

    lane: StepLane
    name: str
    label: str
    block: str
    start: float
    end: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A stall, that is, a time in which compute waits for weights.

    ``before``: the region or collective that cannot start, or the end of the call.  ``weights``: the weights that compute
    waits for; empty at the end of a call, where compute waits for all copies.  ``why``: the reason for the stall.
    """

    before: str
    weights: tuple[str, ...]
    start: float
    end: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A range of bytes in the arena that contains a piece of a weight.

    ``begin``, ``stop``: the first byte, and the byte after the last byte.  ``start``: the time at which the copy into the
    range starts.  ``end``: the time at which the last reader of the weight ends.  A resident piece is in its range during
    the whole step.
    """

    weight: str
    label: str
    block: str
    begin: int
    stop: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """One predicted step.

    ``blocks``: for each block, the start of its first region and the end of its last region.  ``inflation_s``: the seconds
    that copies add to the time of collectives.
    """

    step_s: float
    inflation_s: float
    arena_bytes: int
    bars: tuple[Bar, ...]
    stalls: tuple[Stall, ...]
    slots: tuple[Slot, ...]
    blocks: Mapping[str, tuple[float, float]]

    def lane(self, name: StepLane) -> tuple[Bar, ...]:
        return tuple(b for b in self.bars if b.lane == name)

    @property
    def shown(self) -> tuple[StepLane, ...]:
        """The lanes to show: compute, copies, and all other lanes that are not empty."""
        return tuple(lane for lane in STEP_LANES if lane in ("compute", "copy") or self.lane(lane))

    def occupancy(self) -> list[tuple[float, int]]:
        """Return the use of the arena over one step, as pairs (time, number of bytes in use from this time on)."""
        changes: list[tuple[float, int]] = []
        for slot in self.slots:
            for start, end in around(slot.start, slot.end, self.step_s):
                # Times are rounded, because a slot may be allocated exactly when another slot is freed.  If both times are
                # equal, the sorted order subtracts the bytes of the freed slot first.
                changes += [(round(start, 12), slot.stop - slot.begin), (round(end, 12), slot.begin - slot.stop)]
        points, level = [(0.0, 0)], 0
        for time, change in sorted(changes):
            level += change
            points = points[:-1] if points[-1][0] == time else points
            points.append((time, level))
        return points


def lanes_of(plan: Plan) -> Lanes:
    """Return the step that a plan predicts.  Raises ChunkflowError if the plan has no prediction."""
    predicted = plan.predicted
    if predicted is None:
        raise ChunkflowError("The plan has no prediction. Write one with chunkflow plan --json.")
    compute = [s for s in predicted.spans if s.lane == "compute"]
    blocks: dict[str, tuple[float, float]] = {}
    for region, span in zip(plan.regions, compute, strict=True):
        begin, _ = blocks.get(region.block, (span.start, 0.0))
        blocks[region.block] = (begin, span.end)
    blocks.pop("", None)
    return Lanes(
        step_s=predicted.step_s,
        inflation_s=predicted.inflation_s,
        arena_bytes=plan.arena_bytes,
        bars=tuple(_bars(plan, predicted.spans)),
        stalls=tuple(sorted(_stalls_before(plan, predicted.spans), key=lambda s: s.start)),
        slots=tuple(_slots(plan, predicted.spans)),
        blocks=blocks,
    )


def around(start: float, end: float, step: float) -> Iterator[tuple[float, float]]:
    """Divide the interval [start, end) at the boundaries between steps, and shift each part into the first step.

    ``step``: the duration of the step.
    """
    if end - start >= step:
        yield 0.0, step
        return
    if start < 0:
        yield start + step, step
        start = 0.0
    if end > step:
        yield 0.0, end - step
        end = step
    if end > start:
        yield start, end


def _bars(plan: Plan, spans: tuple[Span, ...]) -> Iterator[Bar]:
    block_of = {w.name: plan.regions[w.first_use].block for w in plan.weights if w.first_use >= 0}
    weights = {w.name: w for w in plan.weights}
    regions = iter(plan.regions)
    for span in spans:
        if span.lane == "compute":
            region: RegionLabel = next(regions)
            yield _bar(span, "compute", region.what, region.block, f"{region.block or 'outside blocks'}: {region.what}")
        elif span.lane == "collective":
            kind = span.name.rstrip("0123456789").rstrip("_").replace("_single", "").replace("_into_tensor", "")
            yield _bar(span, "collective", kind.replace("_", "-"), "", span.name)
        elif span.lane == "copy" or span.lane == "pull" or span.lane == "read":
            name, first, end = span_chunks(span.name)
            detail = f"chunks {first} to {end - 1}, {size(plan.nbytes(weights[name], first, end))}"
            yield _bar(span, span.lane, weight_label(name, block_of[name]), block_of[name], detail)


def _bar(span: Span, lane: StepLane, label: str, block: str, detail: str) -> Bar:
    return Bar(lane=lane, name=span.name, label=label, block=block, start=span.start, end=span.end, detail=detail)


def _stalls_before(plan: Plan, spans: tuple[Span, ...]) -> Iterator[Stall]:
    """Yield the stalls of a step.  Consecutive waits before the same region count as one stall."""
    weights = {w.name: w for w in plan.weights}
    compute = [s for s in spans if s.lane == "compute"]
    for first, waits in groupby((s for s in spans if s.lane == "stall"), key=lambda s: weights[s.name].first_use):
        stalled = list(waits)
        worst = weights[max(stalled, key=lambda s: s.end - s.start).name]
        names = tuple(s.name for s in stalled)
        yield Stall(
            before=compute[first].name, weights=names, start=stalled[0].start, end=stalled[-1].end, why=worst.why
        )
    collectives = sorted((s for s in spans if s.lane == "collective"), key=lambda s: s.start)
    for wait in (s for s in spans if s.lane == "barrier"):
        # The barrier delays the next collective that waits for this weight.
        held = {b.collective for b in plan.barriers if wait.name in b.weights}
        before = next(c.name for c in collectives if c.name in held and c.start >= wait.end - _TOLERANCE_S)
        yield Stall(before=before, weights=(wait.name,), start=wait.start, end=wait.end, why=HELD)
    for join in (s for s in spans if s.lane == "join"):
        yield Stall(before=join.name, weights=(), start=join.start, end=join.end, why=_JOINED)


def _slots(plan: Plan, spans: tuple[Span, ...]) -> Iterator[Slot]:
    step = plan.predicted.step_s if plan.predicted is not None else 0.0
    compute = [s for s in spans if s.lane == "compute"]
    copies = {s.name: s for s in spans if s.lane in LANES}
    for weight in plan.streamed:
        block = plan.regions[weight.first_use].block
        label = weight_label(weight.name, block)
        over = compute[weight.last_use].end
        for run in runs(weight.windows):
            begin, stop = ((weight.offset or 0) + b for b in plan.span(weight, run.first, run.end))
            start = 0.0
            if run.window is not None:
                span = copies.get(span_name(weight.name, run.first, run.end))
                start = span.start if span is not None else compute[run.window].start
                if weight.wraps(run.window) and start >= compute[run.window].start - _TOLERANCE_S:
                    start -= step  # the copy runs at the end of the previous step
            end = over if run.window is not None else step
            yield Slot(weight=weight.name, label=label, block=block, begin=begin, stop=stop, start=start, end=end)
