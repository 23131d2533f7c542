"""Schedule: the order of all ops in a step, from the windows of its chunks.  Rewrite writes it, the timeline plays it.

Order for each region k: the collectives that start before it, each after its barriers; the completions awaited before
it; the join, if a call ends there; the prefetches of window k; the waits for the weights that k is the first to read;
region k; the evicts of the weights that k is the last to read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from chunkflow_compile.passes.ops import Prefetch
from chunkflow_compile.passes.plan import Barrier, Plan, Windows, runs
from chunkflow_compile.passes.problem import Problem


@dataclass(frozen=True)
class Wait:
    """Compute waits for a weight.  ``barrier``: before a collective, not before a reader."""

    weight: str
    barrier: bool = False


@dataclass(frozen=True)
class Evict:
    weight: str


@dataclass(frozen=True)
class Compute:
    """``region``: its index."""

    region: int


@dataclass(frozen=True)
class Collect:
    """``collective``: its index."""

    collective: int


@dataclass(frozen=True)
class Await:
    """``collective``: its index."""

    collective: int


@dataclass(frozen=True)
class Join:
    """Compute waits for all copies issued so far: the end of a call that may be one CUDA graph.  It is in no program."""


ScheduleItem = Prefetch | Wait | Evict | Compute | Collect | Await | Join


@dataclass(frozen=True)
class Transfers:
    """The transfer ops of a program, by position.

    ``prefetches`` by window, ``waits`` and ``evicts`` by region, ``barriers`` by name of the collective.
    """

    prefetches: Mapping[int, tuple[Prefetch, ...]]
    waits: Mapping[int, tuple[str, ...]]
    evicts: Mapping[int, tuple[str, ...]]
    barriers: Mapping[str, tuple[str, ...]]


def transfers(
    problem: Problem, windows: Mapping[str, Windows], barriers: Iterable[Barrier] = (), *, kept: bool = False
) -> Transfers:
    """Place the transfer ops.  ``windows``: streamed weight -> the window of each chunk.  ``kept``: whether a weight whose
    chunks all stay in the arena gets a wait too, for a cold start.

    Within a window, chunks are in the order in which they are needed.
    """
    count = len(problem.regions)
    prefetches: dict[int, list[tuple[int, int, Prefetch]]] = {}
    waits: dict[int, list[str]] = {}
    evicts: dict[int, list[str]] = {}
    for position, weight in enumerate(sorted(problem.weights, key=lambda w: w.name)):
        chunks = windows.get(weight.name, ())
        if all(w is None for w in chunks) and not (kept and chunks):
            continue
        first, last = weight.uses[0], weight.uses[-1]
        waits.setdefault(first, []).append(weight.name)
        evicts.setdefault(last, []).append(weight.name)
        for run in runs(chunks):
            if run.window is not None:
                op = Prefetch(weight.name, run.first, run.end, run.window, run.window > first)
                urgency = (first - run.window) % count
                prefetches.setdefault(run.window, []).append((urgency, position, op))
    ordered = {w: tuple(p[2] for p in sorted(ops, key=_by_urgency)) for w, ops in prefetches.items()}
    return Transfers(
        prefetches=ordered,
        waits={k: tuple(v) for k, v in waits.items()},
        evicts={k: tuple(v) for k, v in evicts.items()},
        barriers={b.collective: b.weights for b in barriers},
    )


def transfers_of(problem: Problem, plan: Plan) -> Transfers:
    """The transfer ops of a program under a plan."""
    return transfers(problem, {w.name: w.windows for w in plan.streamed}, plan.barriers, kept=True)


def _by_urgency(entry: tuple[int, int, Prefetch]) -> tuple[int, int, int]:
    urgency, position, op = entry
    return urgency, position, op.first


def schedule(problem: Problem, ops: Transfers, joins: Collection[int] = ()) -> tuple[ScheduleItem, ...]:
    """One step, in the order in which the host issues it.  ``joins``: as in a Plan."""
    items: list[ScheduleItem] = []
    count = len(problem.regions)
    starts: list[list[int]] = [[] for _ in range(count + 1)]
    awaited: list[list[int]] = [[] for _ in range(count + 1)]
    for i, collective in enumerate(problem.collectives):
        starts[collective.before].append(i)
        awaited[collective.until].append(i)
    for k in range(count + 1):
        for i in starts[k]:
            items.extend(Wait(w, True) for w in ops.barriers.get(problem.collectives[i].name, ()))
            items.append(Collect(i))
        items.extend(Await(i) for i in awaited[k])
        if k in joins:
            items.append(Join())
        if k < count:
            items.extend(ops.prefetches.get(k, ()))
            items.extend(Wait(w) for w in ops.waits.get(k, ()))
            items.append(Compute(k))
            items.extend(Evict(w) for w in ops.evicts.get(k, ()))
    return tuple(items)
