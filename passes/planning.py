"""Planning: makes the plan of a problem from the settings of the passes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.placement.timeline import Simulator

from .errors import ChunkflowError
from .goal import DEFAULT_GOAL, Goal
from .hardware import Hardware
from .names import DEFAULT_CHUNK_BYTES, OPTIONAL_PASSES
from .plan import Plan
from .problem import Problem

# With joined="auto", a plan gets joins only if they lengthen the predicted step by less than this share.  If the host is the
# bottleneck, launching each call as one CUDA graph saves far more than this share.
MOST_JOIN_LOSS = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the passes.  Sizes are in bytes.

    ``goal``: objective of plans.  ``plan``: a plan to use instead of making one.  ``timings``: measurements from which plans
    are made, instead of the rates in the profile.  ``group_bytes``: size of the groups of weights between which the graph is
    cut, or None for the coarsest cut that is about as good as the finest.  ``part``, ``external_bytes``, ``arena``: arguments
    of :func:`place`.  ``likes``: problems, each with its plan; a new problem that has the structure of one of these problems
    gets the placement of its plan.  ``joined``: whether the plan has joins, so that each call can be one CUDA graph; "auto"
    to add joins only if they cost little (:data:`MOST_JOIN_LOSS`).  For a cycle of several calls, True means "auto".
    ``preamble``: whether the graph is the preamble of a model (hoisting.py), which runs once for many steps; the preamble is
    planned like a ``part``, and never as a call of a cycle.  ``table``: if the graph is a block with hoisted products, the
    bytes of the table that stores its rows (the hoisted results).  ``tables``: total bytes of the tables for all blocks of
    this type; ``external_bytes`` does not include them, because the cycle of the blocks counts the tables of all block types.
    ``ranks``: number of ranks over whose devices weights may be sharded, or 0 if unknown.  ``disabled``: names of
    :data:`OPTIONAL_PASSES`.
    """

    hardware: Hardware
    goal: Goal = DEFAULT_GOAL
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    group_bytes: int | None = None
    plan: Plan | None = None
    part: bool = False
    external_bytes: int = 0
    arena: int = 0
    likes: tuple[tuple[Problem, Plan], ...] = ()
    timings: Timings | None = None
    joined: Literal[False, True, "auto"] = False
    preamble: bool = False
    table: int = 0
    tables: int = 0
    ranks: int = 0
    disabled: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        check_disabled(self.disabled)

    def enables(self, name: str) -> bool:
        """Return whether an optional pass runs."""
        return name not in self.disabled

    @property
    def external_bytes_with_tables(self) -> int:
        """``external_bytes`` and, for a block that is planned by itself, ``tables``."""
        return self.external_bytes + (self.tables if self.part else 0)


def check_disabled(names: Iterable[str]) -> None:
    """Raise ChunkflowError for a name that is not an optional pass."""
    for name in names:
        if name not in OPTIONAL_PASSES:
            close = difflib.get_close_matches(name, OPTIONAL_PASSES, n=1, cutoff=0.0)[0]
            raise ChunkflowError(
                f"There is no pass {name!r} that can be disabled; did you mean {close!r}? Those that can are "
                f"{', '.join(OPTIONAL_PASSES)}; later passes need all others."
            )


def make_plan(
    problem: Problem, settings: Settings, *, residents_in_arena: bool = False, ends: Sequence[int] | None = None
) -> Plan:
    """Return the plan in ``settings``, or make a plan for the goal in ``settings``.  Raises ChunkflowError if no plan meets
    the goal.

    ``residents_in_arena``: as in :func:`place`.  ``ends``: as in :meth:`Plan.check_problem`.
    """
    if settings.plan is not None:
        return settings.plan
    like = next((plan for other, plan in settings.likes if other.structure == problem.structure), None)
    return place(
        problem,
        settings.hardware,
        settings.goal,
        chunk_bytes=settings.chunk_bytes,
        part=settings.part or settings.preamble,
        like=like,
        residents_in_arena=residents_in_arena,
        external_bytes=settings.external_bytes_with_tables,
        arena=settings.arena,
        timings=settings.timings,
        joins=tuple(ends or (len(problem.regions),)) if settings.joined else (),
    )


def join_loss(
    problem: Problem, settings: Settings, *, residents_in_arena: bool = False, ends: Sequence[int] | None = None
) -> float:
    """Return the relative increase of the predicted step time if compute waits at the end of each call for the copies that
    are still running (a *join*), with the same memory.  For example, 0.01 is an increase of 1 %.

    If ``settings`` contain a plan, its windows are used with and without joins.  Otherwise two plans are made, one with joins
    and one without.  The arguments and errors are the same as for :func:`make_plan`.
    """
    joins = tuple(ends or (len(problem.regions),))
    free = make_plan(problem, replace(settings, joined=False), residents_in_arena=residents_in_arena)
    if settings.plan is not None:
        joined = free
    else:
        taken = free.device_bytes + settings.external_bytes + problem.unpacked_bytes
        memory = taken if settings.goal.memory is None else settings.goal.memory
        goal = replace(settings.goal, memory=memory, slowdown=None)
        joined = make_plan(
            problem, replace(settings, goal=goal, joined=True), residents_in_arena=residents_in_arena, ends=joins
        )
    simulator = Simulator(problem, settings.hardware, free.chunk_bytes, settings.timings)
    steps = simulator.step_under(replace(free, joins=())), simulator.step_under(replace(joined, joins=joins))
    return steps[1] / steps[0] - 1 if steps[0] else 0.0


def with_joins_decided(
    problem: Problem, settings: Settings, *, residents_in_arena: bool = False, ends: Sequence[int] = ()
) -> Settings:
    """Return the settings with True or False for ``joined`` instead of "auto".  The arguments are the same as for
    :func:`make_plan`."""
    if not settings.joined or (settings.joined is True and len(ends) < 2):
        return settings
    return replace(
        settings,
        joined=join_loss(problem, settings, residents_in_arena=residents_in_arena, ends=ends or None) < MOST_JOIN_LOSS,
    )


def minimum_budget(problem: Problem, settings: Settings) -> int:
    """Return the minimum budget in bytes, for weights and activations, for which a problem has a plan."""
    external, machine = settings.external_bytes_with_tables, settings.hardware
    return problem.live_bytes + least_memory(
        problem, machine, settings.chunk_bytes, external, settings.arena, settings.part
    )
