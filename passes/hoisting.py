"""Hoisting: decides whether the matrix products that do not depend on the latent are hoisted.  Hoisting splits a model
into two halves (graph/hoist.py): the preamble computes these products, and main computes the rest.

Contract
    On entry: a Traced, and settings whose goal allows hoisting.
    On exit: the settings of both halves, or None if there is nothing to hoist or "auto" predicts no gain.  The settings
    of main account for the memory of the table, which stores the rows (results of the preamble), and for an arena that is
    large enough for the preamble.

The preamble runs once for many steps, so none of its weights stays on the device.  All weights of the preamble are streamed
through an arena that is large enough for the weights of two regions.  If blocks are compiled separately, each block has its
own table.  Together, the tables of all blocks of one type get at most a sixteenth of the part of the budget that is for these
blocks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.hoist import MOST_SLOW_BYTES, Halves, check_halves, split
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Repeats, Traced
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.units import enough, size

from .cutting import choose_cut, plans_of
from .goal import Goal
from .planning import Settings, make_plan

# The maximum number of rows of a table: enough for a schedule of 50 steps for two prompts.
MOST_ROWS = 128
# The table of rows takes at most 1 / 16 of the budget.
_SHARE_OF_ROWS = 16
# The assumed number of steps of a generation, by which the time of the preamble is divided.  The examples in diffusers use
# 28 steps for FLUX.1, and 50 for Qwen-Image and HunyuanVideo.
STEPS = 28
# The number of regions of the preamble whose weights are in the arena at the same time: the weights of the next region are
# copied while a region computes.
_REGIONS = 2


@dataclass(frozen=True, kw_only=True)
class HoistingFigures:
    """The costs and savings of hoisting in numbers.

    ``weights``, ``nbytes``: number of hoisted weights, and their total bytes.  ``values``, ``row_bytes``: number of
    tensors in a row, and their total bytes.  ``slow``: number of inputs that a row depends on.  ``rows``: capacity of the
    table that stores the rows.  ``external_bytes``, ``arena``: fields of the settings of main (the model without the
    preamble).  ``fill_s``: predicted seconds in which the preamble computes the rows for :data:`STEPS` steps in one pass over
    its weights.
    """

    weights: int
    nbytes: int
    values: int
    row_bytes: int
    slow: int
    rows: int
    external_bytes: int
    arena: int
    fill_s: float

    @property
    def seconds_per_call(self) -> float:
        """The seconds by which the preamble lengthens each step, on average over a generation.  If rows depend on a single
        input, the result is 0: this input is the timestep, whose values are the same in every generation, so the rows are
        computed only once."""
        return self.fill_s / STEPS if self.slow > 1 else 0.0

    def budget_for(self, nbytes: int) -> int:
        """Return the smallest budget, in bytes, that covers the table of rows and a plan of main with ``nbytes`` bytes.  The
        size of the table depends on the budget."""
        others = nbytes + self.external_bytes - self.rows * self.row_bytes
        for rows in range(1, MOST_ROWS):
            budget = max(others + rows * self.row_bytes, _SHARE_OF_ROWS * rows * self.row_bytes)
            if budget // _SHARE_OF_ROWS // self.row_bytes == rows:
                return budget
        return others + MOST_ROWS * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Hoisting:
    """Both halves of a model, with the settings to plan them.

    ``preamble``, ``main``: settings of each half.  ``preamble_cut``, ``preamble_plan``: cut and plan of the preamble.
    ``rows``: capacity of the table in rows.
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
            external_bytes=self.main.external_bytes,
            arena=self.main.arena,
            fill_s=self._fill_seconds(STEPS),
        )

    def _fill_seconds(self, rows: int) -> float:
        """Return the predicted seconds in which the preamble computes ``rows`` rows in one pass over its weights."""
        problem, settings = self.preamble_cut.problem, self.preamble
        regions = tuple(replace(r, cost=r.cost.repeated(rows)) for r in problem.regions)
        simulator = Simulator(replace(problem, regions=regions), settings.hardware, settings.chunk_bytes)
        return round(simulator.step_under(self.preamble_plan), 9)


def hoisting_of(traced: Traced, settings: Settings) -> Hoisting | None:
    """Return the halves of a graph with their settings, or None if the graph is not to be split: ``settings`` do not ask
    for it, there is nothing to hoist, or "auto" predicts no gain.

    Only whole models, and blocks that are compiled separately, are split.  With hoist=True, raises ChunkflowError if there
    is nothing to hoist in a whole model, or if a row does not fit in the budget.  For a block with nothing to hoist, the
    result is None.
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
    if settings.enables("verify"):
        check_halves(traced, halves)
    if goal.hoist != "auto":
        return plan_halves(halves, settings, repeats)
    with contextlib.suppress(ChunkflowError):  # a row does not fit in the budget
        if _pays(traced, settings, hoisting := plan_halves(halves, settings, repeats)):
            return hoisting
    return None


def rows_within(halves: Halves, goal: Goal, repeats: Repeats | None = None) -> int:
    """Return how many rows the table of a graph can store within the budget.  Raises ChunkflowError if a single row does not
    fit.

    ``goal``: goal for the model, or for a single block.  ``repeats``: if the graph is a block, all blocks of its type;
    their tables share a part of the model's budget."""
    if (memory := goal.memory) is None:
        return MOST_ROWS
    option, row_bytes, share = goal.option, halves.row_bytes, memory
    if repeats is not None and repeats.goal.memory is not None:
        row_bytes, share = row_bytes * repeats.count, repeats.weights()
    if (most := share // _SHARE_OF_ROWS // row_bytes) < 1:
        least = -(-_SHARE_OF_ROWS * row_bytes * max(1, memory) // max(1, share))
        raise ChunkflowError(
            f"hoist=True keeps rows of {size(row_bytes)}, and at most a sixteenth of {option}={size(memory)} is for "
            f"them: give {option}={enough(least)!r} or more, or leave hoist out."
        )
    return min(MOST_ROWS, most)


def plan_halves(halves: Halves, settings: Settings, repeats: Repeats | None = None) -> Hoisting:
    """Plan the preamble, and make the settings of main.  ``settings``: settings of the model.  ``repeats``: if the
    graph is a block, all blocks of its type.

    Raises ChunkflowError if a row does not fit in the budget.
    """
    rows = rows_within(halves, settings.goal, repeats)
    alone = replace(
        settings,
        goal=replace(
            settings.goal,
            memory=None,
            activations=False,
            slowdown=None,
            hoist=False,
            peers=False,
            yields="auto",
            exchange_groups=False,
        ),
        plan=None,
        timings=None,
        preamble=True,
        external_bytes=0,
        likes=(),
        joined=False,
        ranks=0,
    )
    cut = choose_cut(halves.preamble, alone)
    least = least_memory(cut.problem, alone.hardware, alone.chunk_bytes)
    preamble = replace(alone, goal=replace(alone.goal, memory=_REGIONS * least))
    plan = make_plan(cut.problem, preamble)
    table, external = rows * halves.row_bytes, settings.external_bytes + plan.device_bytes - plan.arena_bytes
    main = replace(settings, goal=replace(settings.goal, hoist=False), arena=plan.arena_bytes)
    if repeats is None:
        main = replace(main, external_bytes=external + table)
    else:
        main = replace(main, external_bytes=external, table=table, tables=table * repeats.count)
        halves = replace(halves, main=replace(halves.main, repeats=replace(repeats, tables=main.tables)))
    return Hoisting(halves=halves, preamble=preamble, preamble_cut=cut, preamble_plan=plan, main=main, rows=rows)


def _pays(traced: Traced, settings: Settings, hoisting: Hoisting) -> bool:
    """Return whether hoisting is predicted to shorten the step.  Without a budget, return whether hoisting saves memory
    while the step stays short enough.

    If ``settings`` contain a plan or timings, return whether these were made for main rather than for the whole graph.  If
    the graph is a block, the plans cover several repetitions of the block, and their times and bytes per repetition are
    compared.
    """
    if (given := settings.plan or settings.timings) is not None:
        return choose_cut(hoisting.halves.main, hoisting.main).problem.digest == given.problem
    try:
        today, each = _plan_of(traced, replace(settings, goal=replace(settings.goal, hoist=False)))
    except ChunkflowError:  # the whole graph does not fit in the budget, but the halves may
        return True
    hoisted, blocks = _plan_of(hoisting.halves.main, hoisting.main)
    assert today.predicted is not None and hoisted.predicted is not None
    step_s = hoisted.predicted.step_s / blocks + hoisting.figures.seconds_per_call
    goal = settings.goal if traced.repeats is None else traced.repeats.goal
    if goal.memory is not None:
        return step_s < today.predicted.step_s / each
    longest = goal.longest * today.predicted.resident_step_s / each
    taken = hoisted.device_bytes / blocks + hoisting.main.external_bytes - settings.external_bytes + hoisting.main.table
    return step_s <= longest and taken < today.device_bytes / each


def _plan_of(traced: Traced, settings: Settings) -> tuple[Plan, int]:
    """Return the plan of a graph, and the number of times that the plan contains the graph.  A plan contains a whole model
    once.  It contains a block several times if the block is compiled separately."""
    problem = choose_cut(traced, settings).problem
    plan = plans_of(traced, settings, problem)(problem)
    return plan, len(plan.regions) // len(problem.regions)
