"""Cycles of calls: functions that detect calls that repeat, and plan these calls together, from the hardware profile or from
measured times."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.pass_pipeline import make_cycle
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.program.cycle import Call
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.progress import planning

from .arena import Arena
from .bound_cycle import BoundCycle
from .call_site import CallKey, CallSite
from .cuda_graphs import MOST_GRAPHS
from .variants import without_call_fields

# The maximum number of calls in a cycle.  This number is enough for two models of 128 blocks that are called twice per step.
MOST_CALLS = 512
# The maximum number of previous calls that are tried as the first call of a cycle.  These calls have the same key as the
# last call, and the most recent call is tried first.  One try would not be enough: if a step cache skips blocks in some
# steps, the calls since the most recent of these calls may be only a part of the cycle.
_TRIES = 4


def candidate_periods(history: Sequence[CallKey]) -> Iterator[tuple[CallKey, ...]]:
    """Yield candidates for a cycle whose first call is the last call in ``history``.  A candidate is a tuple of keys.
    ``history``: the keys of the latest calls, oldest first.

    A candidate begins at a previous call that has the same key as the last call, and ends directly before the last call.  A
    candidate is yielded if ``history`` contains the same sequence of calls directly before the candidate.  If a candidate
    consists of repetitions of a shorter sequence, the shorter sequence is yielded instead.  Candidates that begin at more
    recent calls are yielded first.
    """
    end = len(history) - 1
    earlier = (i for i in range(end - 1, max(-1, end - MOST_CALLS - 1), -1) if history[i] is history[end])
    for begin in itertools.islice(earlier, _TRIES):
        length, keys = end - begin, history[begin:end]
        once = _shortest_period(tuple(keys))
        if len(once) < length or (begin >= length and history[begin - length : begin] == keys):
            yield once


def _shortest_period(keys: tuple[CallKey, ...]) -> tuple[CallKey, ...]:
    """Return the shortest sequence of keys such that ``keys`` consists of repetitions of this sequence."""
    length = len(keys)
    return next(keys[:n] for n in range(1, length + 1) if length % n == 0 and keys == keys[:n] * (length // n))


def is_rotation(keys: tuple[CallKey, ...], others: tuple[CallKey, ...]) -> bool:
    """Return whether two cycles consist of the same calls in the same cyclic order.  The first calls of the two cycles may
    differ."""
    if len(keys) != len(others):
        return False
    return any(keys == (*others[i:], *others[:i]) for i, key in enumerate(others) if key is keys[0])


def is_optimal_for(cycle: BoundCycle, settings: Settings) -> bool:
    """Return whether the plan of a cycle is also the best plan for the new ``settings`` of one of its calls.

    This is the case if three conditions hold: the old and the new settings differ only in the budget, the new budget is not
    larger than the old budget, and the plan fits into the new budget.
    """
    planned, wanted = cycle.settings.goal.memory, settings.goal.memory
    if _unbudgeted(cycle.settings) != _unbudgeted(settings):
        return False
    if wanted is None or planned is None:
        return wanted is planned
    return wanted <= planned and fits_budget(cycle, cycle.cycle.problem.live_bytes, settings.goal)


def fits_budget(cycle: BoundCycle, live_bytes: int, goal: Goal) -> bool:
    """Return whether the weights of a cycle and ``live_bytes`` of activations fit into the budget of ``goal``."""
    used = cycle.plan.device_bytes + cycle.settings.external_bytes + goal.counted(live_bytes)
    return goal.memory is None or used <= goal.memory


def _unbudgeted(settings: Settings) -> Settings:
    """Return the settings without the budget, and without the other fields that may differ between the calls of a cycle."""
    settings = without_call_fields(settings)
    return replace(settings, goal=replace(settings.goal, memory=None))


def plan_cycle(
    arena: Arena,
    keys: tuple[CallKey, ...],
    calls: Sequence[Call],
    buffers: Mapping[str, HostBuffer],
    settings: Settings,
    timings: Timings | None = None,
    replan_after: int = 0,
) -> BoundCycle:
    """Plan a cycle.  Raises ChunkflowError if there is no plan."""
    with planning(f"{len(keys)} calls that repeat"):
        joined = settings.joined if len(calls) <= MOST_GRAPHS else False  # longer cycles are never CUDA graphs
        cycle = make_cycle(calls, replace(settings, timings=timings, joined=joined))
        return BoundCycle(arena, calls, buffers, settings, cycle, keys=keys, replan_after=replan_after)


def calls_of(calls: Sequence[CallSite], live: Sequence[int]) -> tuple[list[Call], dict[str, HostBuffer]]:
    """Return the calls of a cycle, and a mapping from each weight's name in the cycle to its buffer.

    A weight that two calls read counts as two weights of the cycle, because each of the two calls needs a separate copy of
    the weight.  ``live``: for each call, the bytes of its activations (see :class:`Call`).
    """
    placed = list[Call]()
    buffers: dict[str, HostBuffer] = {}
    taken = set[str]()
    for call, live_bytes in zip(calls, live, strict=True):
        names: dict[str, str] = {}
        for name, wanted in call.names().items():
            numbered = (f"{wanted} ({i})" for i in itertools.count(2))
            names[name] = next(n for n in itertools.chain([wanted], numbered) if n not in taken)
            taken.add(names[name])
            if name in call.buffers:
                buffers[names[name]] = call.buffers[name]
        placed.append(call.in_cycle(names, live_bytes))
    return placed, buffers


def merge_settings(calls: Sequence[CallSite]) -> Settings | None:
    """Return the settings of a cycle: the common settings of its calls, with the largest budget of any call.  Return None if
    the settings of the calls differ in anything except the budget."""
    shared = [_unbudgeted(call.variant.settings) for call in calls]
    if any(settings != shared[0] for settings in shared):
        return None
    budget = max((m for call in calls if (m := call.variant.settings.goal.memory) is not None), default=None)
    arena = max(call.variant.settings.arena for call in calls)
    return replace(shared[0], goal=replace(shared[0].goal, memory=budget), external_bytes=_outside(calls), arena=arena)


def _outside(calls: Sequence[CallSite]) -> int:
    """Return the bytes on the device that the plan of a cycle does not cover.

    These are the bytes of the tables of rows (rows.py), and of the models' weights that no call of the cycle reads.
    """
    left: dict[int, int] = {}
    for call in dict.fromkeys(calls):  # each call is counted once, although it may occur several times in a cycle
        left[call.model] = (
            left.get(call.model, call.variant.settings.external_bytes + call.kept_bytes) - call.kept_bytes
        )
    tables = sum(call.variant.settings.table for call in dict.fromkeys(calls))
    return tables + sum(max(0, nbytes) for nbytes in left.values())


def dump(cycle: BoundCycle, calls: Sequence[CallSite]) -> None:
    """If any of the ``calls`` has a dump folder, create another folder next to this dump folder.  Write the plan and the
    programs of the cycle to the new folder now, and the measurements of the cycle later, as they are made."""
    other = next((call.variant.folder for call in calls if call.variant.folder is not None), None)
    if other is not None:
        with contextlib.suppress(OSError):  # a full disk must not stop the model
            cycle.measure_into(_write(cycle, other))


def _write(cycle: BoundCycle, other: Path) -> Path:
    plan, rank = cycle.plan, other.name.partition("_")[0]
    folder = other.parent / f"{rank}_cycle_of_{len(cycle.keys)}_{plan.digest}"
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    calls = (
        f"# call {number}: {plan.regions[call.start].block}\n{call}" for number, call in enumerate(cycle.cycle.calls)
    )
    (folder / "calls.txt").write_text("\n\n".join(calls))
    return folder
