"""``replan``: give a compiled model another plan between two calls, without recompiling."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from chunkflow_compile.options import Options
from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import Policy
from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.placed.placement import placements_of
from chunkflow_compile.runtime.bound_cycle import BoundCycle
from chunkflow_compile.runtime.measurement import measured
from chunkflow_compile.runtime.rank_times import RankTimes
from chunkflow_compile.runtime.single_call import replan as plan_again
from chunkflow_compile.units import Size


def replan(
    model: nn.Module,
    *,
    memory: Size | None = None,
    weight_memory: Size | None = None,
    slowdown: float | None = None,
    policy: Policy | None = None,
    plan: str | Path | None = None,
    as_measured: bool = False,
) -> nn.Module:
    """Give every program of a compiled or placed model a new plan, which applies from the next call on; return ``model``.

    The new plan is verified, and outputs do not change.  The next call is a cold start.

    ``memory``, ``weight_memory``, ``slowdown``, ``policy``, ``plan``: the new goal, as in the options of the backend.  If
    none of these arguments is given, the current goal is kept.  A new goal also applies to input sizes that have not occurred
    yet.  The exception is ``plan``, because a given plan applies to one input size only.
    ``as_measured``: whether to plan from the measured times of the calls so far, instead of the rates in the hardware
    profile.

    Programs that run as a cycle (see ``cycles``) are planned together.  If a new goal is given, a cycle is planned only after
    the order of its calls has repeated again.  With ``as_measured``, a cycle is planned from the times of its calls and the
    times between its calls.
    Ranks that share collectives plan from the maxima of their times.  So with ``as_measured``, this function is itself a
    collective: each rank must call it at the same point of its program.  If a rank does not call it, the other ranks wait for
    this rank until the timeout of the process group.

    Raises ChunkflowError, and changes nothing, if no plan meets the goal or if the model has not run yet.  With
    ``as_measured``, the error is also raised if the model has not run yet on another rank.
    """
    all_programs = list(programs(model))
    if not all_programs:
        raise ChunkflowError("No program of this model runs yet: compile it with ChunkFlow and call it first.")
    goal, settings = None, dict[str, Any]()
    if any(given is not None for given in (memory, weight_memory, slowdown, policy, plan)):
        policy = policy or "chunkflow"
        chosen = Options(memory=memory, weight_memory=weight_memory, slowdown=slowdown, policy=policy, plan=plan)
        goal, settings["plan"] = chosen.goal, chosen.given_plan()
    elif as_measured:
        settings["plan"] = None  # a plan that was read from a file would ignore the measured times
    running = cycles(model) if as_measured else ()
    apart = [program for program in all_programs if not any(program.key in cycle.keys for cycle in running)]
    bound: list[BoundCycle] = [*apart, *running]
    timed = bound if as_measured else []
    if goal is not None:  # now plan only the programs; cycles are planned after the order of their calls has repeated
        bound, timed = [*all_programs], [s for s in timed if not s.keys]
    times = _times(timed)
    with contextlib.ExitStack() as locks:
        for arena in sorted({cycle.arena for cycle in bound}, key=id):
            locks.enter_context(arena.lock())
        try:
            plan_again({cycle: times.get(cycle) for cycle in bound}, goal, **settings)
        except ChunkflowError as error:
            if memory is None or all(program.variant.settings.goal.split != "auto" for program in all_programs):
                raise
            raise ChunkflowError(
                f"{error} Blocks keep the number of slices that they were compiled with: compile the model with this budget "
                "to split them into more."
            ) from error
    if goal is not None and plan is None:  # a given plan applies to one input size only
        for placement in placements_of(model):
            placement.aim_for(goal)
    return model


def _times(bound: Sequence[BoundCycle]) -> dict[BoundCycle, Timings]:
    """Return a mapping from each cycle to its measured times, as maxima over all ranks that run this cycle.

    Raises ChunkflowError if a rank has not measured one of the cycles, or does not call this function.
    """
    names = [f"{i}: {cycle.times.name}" for i, cycle in enumerate(bound)]
    groups = (group for cycle in bound for group in cycle.times.groups)
    ranks = RankTimes(groups, dict(zip(names, map(_own_times, bound), strict=True)))
    while ranks.missing:
        ranks.read(wait=True)
    largest = {s: times for s, name in zip(bound, names, strict=True) if (times := ranks.timings[name]) is not None}
    if len(largest) < len(bound):
        raise ChunkflowError("No step was measured yet, here or on another rank: call the compiled model again.")
    return largest


def _own_times(cycle: BoundCycle) -> Timings | None:
    steps = [step for step in cycle.measurements if step.plan == cycle.plan.digest]
    if cycle.keys:
        return cycle.times.timings(1)
    return measured(cycle.plan, steps).timings() if steps else None
