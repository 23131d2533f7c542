"""Place: turns a Problem and a Hardware into a Plan for a goal, which is a memory budget or a step time.

Contract
    On entry: a Problem, a Hardware and a Goal.  No tensors, clocks or devices are needed.
    On exit: every weight has a home and a reason.  A streamed weight has a slot, and each of its streamed chunks has a
    window.  Chunks that are live in the same window never share bytes.  The same arguments give the same Plan, byte for
    byte.  The budget (``goal.memory``) is a hard limit: if no plan fits, :func:`place` raises a ChunkflowError that states
    the minimum memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import BudgetError, ChunkflowError
from chunkflow_compile.passes.goal import DEFAULT_GOAL, Goal
from chunkflow_compile.passes.graph.labels import region_labels
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import Policy
from chunkflow_compile.passes.plan import Barrier, Plan, Prediction, Span, WeightPlan, Windows, aligned, runs
from chunkflow_compile.passes.problem import Problem, Source, Weight
from chunkflow_compile.units import enough, size

from .policies import block_regions, layerwise, next_block_barriers
from .reasons import reason
from .search import ROUNDING, Candidate, Planner
from .slots import Lifetime, LiveRange, assign_slots
from .timeline import Simulator, Timeline
from .windows import as_windows

# The policies whose plans depend on the budget.
BUDGETED: tuple[Policy, ...] = ("layerwise-prefix", "chunkflow")
# If a call must stream every weight and does not fit in memory, these limits are tried in order until the call fits.  Each
# limit is the maximum number of regions by which a copy is ahead of its reader.
_WINDOWS_AHEAD = (8, 4, 2, 1)


def place(
    problem: Problem,
    hardware: Hardware,
    goal: Goal = DEFAULT_GOAL,
    *,
    chunk_bytes: int = 16 << 20,
    part: bool = False,
    like: Plan | None = None,
    residents_in_arena: bool = False,
    external_bytes: int = 0,
    arena: int = 0,
    timings: Timings | None = None,
    joins: tuple[int, ...] = (),
) -> Plan:
    """Decide the home, slot and windows of every weight.

    ``part``: whether the program is a part of a model, and the other parts use the same arena before it runs again.  Then
    every weight is streamed, and every copy is for the call in which it is issued.  ``like``: a plan for the same goal and
    for a problem that has the same structure, but other sizes.  Its placement is reused if it meets the goal: then the
    programs of both plans can alternate without a cold start.  ``residents_in_arena``: whether resident weights, too, are
    placed in the arena.  Then the weights of all programs that share the arena need only the memory that the largest of their
    plans needs.  ``external_bytes``: bytes of weights on the device that the program does not read.  These bytes count
    against the budget.  This rank's shards and the unpacked values of the largest packed weight also count against it, and so
    do activations if the budget covers them.  ``arena``: minimum size of the arena in bytes, if another program of the model
    needs an arena of this size.  ``timings``: measurements of the problem, used instead of the rates in the profile.
    ``joins``: as in :class:`Plan`.

    Raises ChunkflowError if the budget is below the minimum that the program needs, or if the timings belong to another
    problem.
    """
    external_bytes += problem.unpacked_bytes + goal.counted(problem.live_bytes)
    simulator = Simulator(problem, hardware, chunk_bytes, timings)
    planner = Planner(problem, simulator, goal, external_bytes, joins, 0 if residents_in_arena else arena)
    builder = PlanBuilder(planner, residents_in_arena, arena)
    if goal.policy == "chunkflow":
        taken = None if like is None else _taken_over(planner, builder, like)
        if taken is not None:
            plan = taken
        elif part:
            plan = _within_call(planner, builder)
        elif goal.memory is None:
            plan = _smallest(planner, builder)
        else:
            plan = _fastest(planner, builder, goal.memory)
    elif goal.policy == "layerwise-prefix":
        plan = _prefix(planner, builder)
    else:
        plan = builder.plan(*_policy_windows(planner))
    if goal.memory is not None and plan.device_bytes + external_bytes > goal.memory:
        least = size(plan.device_bytes + external_bytes)
        raise ChunkflowError(
            f"{goal.option}={size(goal.memory)} is below the {least} that policy {goal.policy} takes; it has no smaller plan."
        )
    return plan


def least_memory(
    problem: Problem, hardware: Hardware, chunk_bytes: int, external_bytes: int = 0, arena: int = 0, part: bool = False
) -> int:
    """Return the minimum weight bytes on the device for which there is a plan.  ``external_bytes``, ``arena``, ``part``: see
    :func:`place`."""
    external_bytes += problem.unpacked_bytes
    planner = Planner(problem, Simulator(problem, hardware, chunk_bytes), external_bytes=external_bytes)
    return PlanBuilder(planner, arena=arena).minimal(part)[1]


def _policy_windows(planner: Planner) -> tuple[dict[str, Windows], tuple[Barrier, ...]]:
    policy = planner.goal.policy
    if policy == "resident":
        return {}, ()
    if policy not in ("layerwise", "layerwise-barrier"):
        raise ChunkflowError(f"Policy {policy} has no windows: add its branch to _policy_windows.")
    windows = as_windows(planner.chunks, layerwise(planner.problem, planner.chunks), planner.count)
    streamed = [w for w in planner.weights if any(k is not None for k in windows[w.name])]
    return windows, next_block_barriers(planner.problem, streamed) if policy == "layerwise-barrier" else ()


def _prefix(planner: Planner, builder: PlanBuilder) -> Plan:
    """Return the layerwise plan with as many of the first blocks resident as fit in the budget."""
    if planner.goal.memory is None:
        raise ChunkflowError("Policy layerwise-prefix keeps what fits a budget: give weight_memory=BYTES.")
    placed = layerwise(planner.problem, planner.chunks)
    streamed = planner.play(placed)
    for first, last in block_regions(planner.problem):
        kept = [None if first <= c.first <= last else w for c, w in zip(planner.chunks, placed, strict=True)]
        candidate = planner.play(kept)
        if builder.slots(candidate) > planner.goal.memory:
            break
        placed, streamed = kept, candidate
    return builder.candidate(streamed)


def _smallest(planner: Planner, builder: PlanBuilder) -> Plan:
    smallest = planner.smallest(planner.goal.longest * planner.resident.step_s)
    # slots are rounded up to the alignment, but resident weights are not.  So the plan with all weights resident may be
    # smaller than a plan that streams some of them
    return builder.candidate(min(smallest, planner.all_resident, key=builder.slots))


def _taken_over(planner: Planner, builder: PlanBuilder, like: Plan) -> Plan | None:
    """Return the plan for this problem with the placement of ``like``, or None if this plan does not meet the goal."""
    kept = as_windows(planner.chunks, [None] * len(planner.chunks), planner.count)
    slots = {w.name: w.offset for w in like.streamed if w.offset is not None}
    plan = builder.plan({**kept, **{w.name: w.windows for w in like.streamed}}, like.barriers, slots)
    if planner.goal.memory is not None:
        return plan if plan.device_bytes + planner.external_bytes <= planner.goal.memory else None
    assert plan.predicted is not None
    target = planner.goal.longest * planner.resident.step_s
    return plan if plan.predicted.step_s <= target * (1 + ROUNDING) else None


def _within_call(planner: Planner, builder: PlanBuilder) -> Plan:
    """Return a plan in which every weight is streamed, and every copy is issued in the call that reads the weight.  Each copy
    starts early enough to be hidden, if it can start this early within the call and the memory limit."""
    memory = planner.goal.memory
    wanted = planner.latest(planner.chunks)
    early = planner.play([max(0, window) for window in wanted])
    if memory is None or builder.slots(early) <= memory:
        return builder.candidate(early)
    # start each copy as many regions before its reader as memory permits
    for ahead in _WINDOWS_AHEAD:
        later = [max(0, c.first - ahead, w) for c, w in zip(planner.chunks, wanted, strict=True)]
        if builder.slots(candidate := planner.play(later)) <= memory:
            return builder.candidate(candidate)
    return builder.candidate(_minimal(planner, builder, memory, part=True))


def _minimal(planner: Planner, builder: PlanBuilder, memory: int, part: bool = False) -> Candidate:
    """Return the smallest placement.  Raises BudgetError if this placement does not fit in ``memory`` bytes.  ``part``: see
    :func:`place`."""
    smallest, floor = builder.minimal(part)
    if memory < floor:
        finer = "cut finer regions with a smaller group_bytes"
        if floor == planner.kept_bytes:
            finer = "stream smaller weights with a smaller min_bytes"
        values = " and the values that a region unpacks," if planner.problem.unpacked_bytes else ""
        pieces, live = planner.problem.piece_bytes, planner.goal.counted(planner.problem.live_bytes)
        parts = [(live, "for activations"), (pieces, "for this rank's pieces of weights")]
        parts = [(nbytes, what) for nbytes, what in parts if nbytes]
        parts.append((planner.kept_bytes - pieces - live, "for small and tied weights, which stay on the device"))
        (first, what), *more = parts
        kept = ", ".join([f"{size(first)} of them {what}", *(f"{size(nbytes)} {what}" for nbytes, what in more)])
        option = planner.goal.option
        raise BudgetError(
            f"{option}={size(memory)} is too little: the program needs {size(floor)}, {kept},{values} and the rest for the "
            f"streamed weights that one region reads. Give {option}={enough(floor)!r} or more, or {finer}.",
            floor,
        )
    return smallest


def _fastest(planner: Planner, builder: PlanBuilder, memory: int) -> Plan:
    fitting = [c for c in (_minimal(planner, builder, memory), planner.all_resident) if builder.slots(c) <= memory]
    fastest = planner.fastest(memory) if memory >= planner.floor() else None
    cut = 0
    while fastest is not None and planner.rank_key(fastest) < min(map(planner.rank_key, fitting)):
        over = builder.slots(fastest, quick=True) - memory  # without quick, this takes half a second for 2,000 chunks
        if over <= 0:
            fitting.append(fastest)
            break
        if not cut and (slotted := planner.slotted(fastest, memory)) is not None:
            fitting += [slotted] if builder.slots(slotted) <= memory else []
        # because of gaps between slots, the arena exceeds the budget: search again with a budget that is smaller by at least
        # ``over``
        cut = max(2 * cut, over)
        fastest = planner.smaller(fastest, memory - cut)
    return builder.candidate(min(fitting, key=planner.rank_key))


class PlanBuilder:
    """Builds plans from placements: assigns slots, and adds predictions and reasons."""

    def __init__(self, planner: Planner, residents_in_arena: bool = False, arena: int = 0) -> None:
        """``residents_in_arena``, ``arena``: as in :func:`place`."""
        self.planner = planner
        self.residents_in_arena = residents_in_arena
        self.least_arena = arena
        self.problem = planner.problem
        self.digest = planner.problem.digest

    def candidate(self, candidate: Candidate) -> Plan:
        windows = as_windows(self.planner.chunks, candidate.placed, self.planner.count)
        hard = self.planner.barriers(self.planner.scheduler.step(windows)) if candidate.hard else ()
        return self.plan(windows, hard, candidate.slots)

    def slots(self, candidate: Candidate, quick: bool = False) -> int:
        """Return the weight bytes on the device for a candidate, including gaps between slots.  ``quick``: whether to
        assign slots with fewer tries."""
        windows = as_windows(self.planner.chunks, candidate.placed, self.planner.count)
        streamed = self._streamed(windows)
        return self._arena(windows, streamed, candidate.slots, quick)[1] + self._outside(streamed)

    def minimal(self, part: bool = False) -> tuple[Candidate, int]:
        """Return the smallest placement that streams all weights, and the weight bytes on the device of the smallest plan.
        In this placement, each copy starts in the window of the weight's first reader.  The smallest plan has this
        placement or, unless ``part`` is set, all weights resident, if this takes less memory than streaming all weights.
        ``part``: see :func:`place`."""
        smallest = self.planner.play([c.first for c in self.planner.chunks])
        return smallest, min(map(self.slots, (smallest,) if part else (smallest, self.planner.all_resident)))

    def plan(
        self, windows: Mapping[str, Windows], hard: tuple[Barrier, ...], slots: Mapping[str, int] | None = None
    ) -> Plan:
        """Build a plan.  ``hard``: barriers of the plan.  ``slots``: for each weight, the offset of its slot, taken from a
        candidate or a plan with the same windows.  If ``slots`` is None, this method assigns slots."""
        streamed = self._streamed(windows)
        at, arena = self._arena(windows, streamed, slots)
        held = {w: b.collective for b in reversed(hard) for w in b.weights}
        timeline = self.planner.simulator.play(self.planner.scheduler.step(windows, hard, self.planner.joins))
        weights = []
        for weight in self.problem.weights:
            mine = windows.get(weight.name, ()) if weight.name in at else ()
            slack = timeline.slack.get(weight.name)
            why = reason(self.planner, weight, windows.get(weight.name, ()), slack, held.get(weight.name))
            weights.append(
                WeightPlan(
                    name=weight.name,
                    home="device" if weight.name not in at else "peers" if weight.source.sharded else "host",
                    nbytes=weight.nbytes,
                    why=why,
                    offset=at.get(weight.name),
                    windows=mine,
                    first_use=weight.uses[0] if weight.uses else -1,
                    last_use=weight.uses[-1] if weight.uses else -1,
                    slack_s=None if slack is None or not mine else round(slack, 9),
                    source=Source(ranks=weight.source.ranks),
                )
            )
        plan = Plan(
            policy=self.planner.goal.policy,
            problem=self.digest,
            hardware=self.planner.simulator.hardware.name,
            chunk_bytes=self.planner.simulator.chunk_bytes,
            arena_bytes=arena,
            regions=region_labels(self.problem),
            weights=tuple(weights),
            barriers=hard,
            predicted=self._prediction(timeline, windows, streamed),
            joins=self.planner.joins,
        )
        return plan

    def _streamed(self, windows: Mapping[str, Windows]) -> list[Weight]:
        placed = ((w, windows.get(w.name, ())) for w in self.problem.weights)
        return [w for w, chunks in placed if chunks and (self.residents_in_arena or any(k is not None for k in chunks))]

    def _outside(self, streamed: list[Weight]) -> int:
        """Return the bytes on the device outside the arena: weights without a slot, weights that the program does not
        read, and this rank's shards."""
        problem = self.problem
        return self.planner.external_bytes + problem.piece_bytes + problem.total_bytes - sum(w.nbytes for w in streamed)

    def _arena(
        self,
        windows: Mapping[str, Windows],
        streamed: list[Weight],
        slots: Mapping[str, int] | None,
        quick: bool = False,
    ) -> tuple[dict[str, int], int]:
        """Return the offset of each weight in the arena, and the size of the arena.  If ``slots`` are given, weights
        without a slot in ``slots`` are placed above all others."""
        if slots is None:
            lifetimes = [self._lifetime(w, windows[w.name]) for w in streamed]
            offsets, arena = assign_slots(lifetimes, self.planner.count, quick)
            return {w.name: offset for w, offset in zip(streamed, offsets, strict=True)}, max(arena, self.least_arena)
        at = dict(slots)
        arena = max((at[w.name] + aligned(w.nbytes) for w in streamed if w.name in at), default=0)
        for weight in streamed:
            if weight.name not in at:
                at[weight.name], arena = arena, arena + aligned(weight.nbytes)
        return at, max(arena, self.least_arena)

    def _lifetime(self, weight: Weight, windows: Windows) -> Lifetime:
        """Return the lifetime of a weight.  A streamed chunk is live from the opening of its window to the end of its last
        reader.  A resident chunk is live in all windows."""
        count, chunk_bytes = self.planner.count, self.planner.simulator.chunk_bytes
        first, last = weight.uses[0], weight.uses[-1]
        ranges = []
        for run in runs(windows):
            begin, end = run.first * chunk_bytes, min(run.end * chunk_bytes, weight.nbytes)
            if run.window is None:
                ranges.append(LiveRange(begin, end, 0, count))
            else:
                ranges.append(LiveRange(begin, end, run.window, (first - run.window) % count + last - first + 1))
        return Lifetime(tuple(ranges))

    def _prediction(self, timeline: Timeline, windows: Mapping[str, Windows], streamed: list[Weight]) -> Prediction:
        simulator = self.planner.simulator
        inside = sum(
            aligned(simulator.nbytes(w.name, r.first, r.end))
            for w in streamed
            for r in runs(windows[w.name])
            if r.window is None
        )
        outside = self._outside(streamed) - self.planner.goal.counted(self.problem.live_bytes)
        return Prediction(
            step_s=round(timeline.step_s, 9),
            resident_step_s=round(self.planner.resident.step_s, 9),
            compute_s=round(timeline.compute_s, 9),
            exposed_s=round(timeline.exposed_s, 9),
            collective_s=round(timeline.collective_s, 9),
            inflation_s=round(timeline.inflation_s, 9) + 0.0,
            copy_s=round(timeline.copy_s, 9),
            peak_bytes=timeline.peak_bytes + inside + outside,
            spans=tuple(Span(s.lane, s.name, round(s.start, 9), round(s.end, 9)) for s in timeline.spans),
        )
