"""Hoisting: whether the products that no latent reaches are hoisted, and the settings of the two programs that they leave.

Contract
    On entry: a Traced, and settings whose goal allows hoisting.
    On exit: main is planned with the memory of the table counted, in an arena that is large enough for the preamble.  In the
    preamble every weight streams, through two regions' worth of memory: it runs once for many steps, and keeps nothing.
    None if there is nothing to hoist, or if "auto" predicts no gain.
    A block that is compiled by kind has a table of its own; the tables of all blocks of its kind share the part of the budget
    that a whole model's table has.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.hoist import MOST_SLOW_BYTES, Halves, check_halves, split
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Repeats, Traced
from chunkflow_compile.passes.placement.coarsest import judged
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.units import enough, size

from .pipeline import Settings, choose_cut, make_plan

# Most rows of a table: a schedule of 50 steps for two prompts.
MOST_ROWS = 128
# The table takes at most one part in so many of the budget.
_SHARE_OF_ROWS = 16
# Steps of a generation, over which the copies of the preamble are spread: diffusers' examples of FLUX.1 have 28, those of
# Qwen-Image and HunyuanVideo 50.
STEPS = 28
# Regions of the preamble whose weights lie in the arena at a time: one is copied while the other computes.
_REGIONS = 2


@dataclass(frozen=True, kw_only=True)
class HoistingFigures:
    """What hoisting takes and saves, in numbers.

    ``weights``, ``nbytes``: the weights that are hoisted.  ``values``, ``row_bytes``: size of a row.  ``slow``: number of
    inputs that the rows depend on.  ``rows``: most that the table holds.  ``outside``, ``arena``: of the settings of main.
    ``fill_s``: seconds of a pass over the preamble, for the rows of a generation of :data:`STEPS` steps.
    """

    weights: int
    nbytes: int
    values: int
    row_bytes: int
    slow: int
    rows: int
    outside: int
    arena: int
    fill_s: float

    @property
    def seconds_per_call(self) -> float:
        """What the preamble adds to a call: a pass per generation, nothing if one input alone, as the timestep, is slow,
        because it takes the same values in the next generation."""
        return self.fill_s / STEPS if self.slow > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Hoisting:
    """Both halves of a model as they are planned.

    ``preamble``, ``main``: the settings of each.  ``preamble_cut``, ``preamble_plan``: of the preamble.  ``rows``: most that
    the table holds.
    """

    halves: Halves
    preamble: Settings
    preamble_cut: Cut
    preamble_plan: Plan
    main: Settings
    rows: int

    @cached_property
    def figures(self) -> HoistingFigures:
        halves = self.halves
        return HoistingFigures(
            weights=len(halves.hoisted),
            nbytes=halves.hoisted_bytes,
            values=len(halves.preamble.graph.graph.output_node().all_input_nodes),
            row_bytes=halves.row_bytes,
            slow=len(halves.slow),
            rows=self.rows,
            outside=self.main.outside,
            arena=self.main.arena,
            fill_s=self._fill_seconds(STEPS),
        )

    def _fill_seconds(self, rows: int) -> float:
        """The predicted time of a pass over the preamble that computes so many rows."""
        problem, settings = self.preamble_cut.problem, self.preamble
        regions = tuple(replace(r, cost=r.cost.repeated(rows)) for r in problem.regions)
        simulator = Simulator(replace(problem, regions=regions), settings.hardware, settings.chunk_bytes)
        return round(simulator.step_under(self.preamble_plan), 9)


def hoisting_of(traced: Traced, settings: Settings) -> Hoisting | None:
    """How a model is hoisted, as the goal of ``settings`` says; None if it is not.

    Raises ChunkflowError if it must be and there is nothing to hoist, or if a row does not fit the budget.  Of the parts of a
    model only blocks are hoisted, and not all kinds of blocks need have anything to hoist.
    """
    goal, repeats = settings.goal, traced.repeats
    if not goal.hoist or goal.policy != "chunkflow" or (settings.part and repeats is None):
        return None
    halves = split(traced)
    if halves is None:
        if goal.hoist == "auto" or repeats is not None:
            return None
        raise ChunkflowError(
            "hoist=True, but no weight is read by products of small inputs alone, such as the timestep: leave hoist out. "
            f"(Inputs are small up to {size(MOST_SLOW_BYTES)}; others are named as hoist=('timestep', ...).)"
        )
    if "verify" not in settings.disabled:
        check_halves(traced, halves)
    if goal.hoist != "auto":
        return plan_halves(halves, settings, repeats)
    with contextlib.suppress(ChunkflowError):  # the budget has no room for it
        if _pays(traced, settings, hoisting := plan_halves(halves, settings, repeats)):
            return hoisting
    return None


def rows_within(halves: Halves, goal: Goal, repeats: Repeats | None = None) -> int:
    """How many rows a table holds at most.  ``goal``: of the model.  ``repeats``: the blocks, each with a table,
    which share their part of it.  Raises ChunkflowError if it has no room for one row of each."""
    if (memory := goal.memory) is None:
        return MOST_ROWS
    option, row_bytes, share = goal.option, halves.row_bytes, memory
    if repeats is not None and repeats.goal.memory is not None:
        row_bytes, share = row_bytes * repeats.count, repeats.goal.memory
    if (most := share // _SHARE_OF_ROWS // row_bytes) < 1:
        least = -(-_SHARE_OF_ROWS * row_bytes * max(1, memory) // max(1, share))
        raise ChunkflowError(
            f"hoist=True keeps rows of {size(row_bytes)}, and at most a sixteenth of {option}={size(memory)} is for "
            f"them: give {option}={enough(least)!r} or more, or leave hoist out."
        )
    return min(MOST_ROWS, most)


def plan_halves(halves: Halves, settings: Settings, repeats: Repeats | None = None) -> Hoisting:
    """The settings of both halves.  ``settings``: of the model.  ``repeats``: of the traced graph.

    Raises ChunkflowError if a row does not fit the budget.
    """
    rows = rows_within(halves, settings.goal, repeats)
    alone = replace(
        settings,
        goal=replace(settings.goal, memory=None, activations=False, slowdown=None, hoist=False, peers=False, yields="auto"),
        plan=None,
        timings=None,
        preamble=True,
        outside=0,
        likes=(),
        joined=False,
        ranks=0,
    )
    cut = choose_cut(halves.preamble, alone)
    least = least_memory(cut.problem, alone.hardware, alone.chunk_bytes)
    preamble = replace(alone, goal=replace(alone.goal, memory=_REGIONS * least))
    plan = make_plan(cut.problem, preamble)
    table, outside = rows * halves.row_bytes, settings.outside + plan.device_bytes - plan.arena_bytes
    main = replace(settings, goal=replace(settings.goal, hoist=False), arena=plan.arena_bytes)
    if repeats is None:
        main = replace(main, outside=outside + table)
    else:
        main = replace(main, outside=outside, table=table, tables=table * repeats.count)
        halves = replace(halves, main=replace(halves.main, repeats=_without(repeats, main.tables)))
    return Hoisting(halves=halves, preamble=preamble, preamble_cut=cut, preamble_plan=plan, main=main, rows=rows)


def _without(repeats: Repeats, nbytes: int) -> Repeats:
    """The blocks with a budget that is smaller by so many bytes."""
    memory = repeats.goal.memory
    return repeats if memory is None else replace(repeats, goal=replace(repeats.goal, memory=memory - nbytes))


def _pays(traced: Traced, settings: Settings, hoisting: Hoisting) -> bool:
    """Whether a step is predicted to be shorter than without hoisting; without a budget, whether it is in less memory.

    A plan or times in ``settings`` decide it: they are those of main, or of the whole graph.  Of a block, as many as a plan
    for its kind is judged by run in turns, and everything is counted per block.
    """
    if (given := settings.plan or settings.timings) is not None:
        return choose_cut(hoisting.halves.main, hoisting.main).problem.digest == given.problem
    try:
        today, each = _plan_of(traced, replace(settings, goal=replace(settings.goal, hoist=False)))
    except ChunkflowError:  # the budget has room for the halves only, if for any
        return True
    hoisted, blocks = _plan_of(hoisting.halves.main, hoisting.main)
    assert today.predicted is not None and hoisted.predicted is not None
    step_s = hoisted.predicted.step_s / blocks + hoisting.figures.seconds_per_call
    goal = settings.goal if traced.repeats is None else traced.repeats.goal
    if goal.memory is not None:
        return step_s < today.predicted.step_s / each
    longest = goal.longest * today.predicted.resident_step_s / each
    taken = hoisted.device_bytes / blocks + hoisting.main.outside - settings.outside + hoisting.main.table
    return step_s <= longest and taken < today.device_bytes / each


def _plan_of(traced: Traced, settings: Settings) -> tuple[Plan, int]:
    """The plan of a graph, or of several blocks in turns if it is one of them, and their number."""
    problem = choose_cut(traced, settings).problem
    turns = replace(settings, part=False)
    planned = judged(
        problem,
        traced.repeats,
        settings.goal,
        lambda problem, *, goal, ends=None: make_plan(
            problem, replace(turns, goal=goal), inside=traced.repeats is not None, ends=ends
        ),
    )
    plan = planned(problem)
    return plan, len(plan.regions) // len(problem.regions)
