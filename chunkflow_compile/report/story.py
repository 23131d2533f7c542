"""The story of one weight in a plan: when the weight is copied and read, and how other settings would change its plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan, WeightPlan, chunk_count, runs, span_chunks, span_name
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Problem, Source, Weight
from chunkflow_compile.units import size

from .lanes import Bar, lanes_of
from .plan_tables import weights_table
from .record import fine, fitted, region_title, seconds

# The maximum number of candidates that are listed for an ambiguous name, so that the list fits on a screen.
_CANDIDATES = 12


@dataclass(frozen=True, kw_only=True)
class Change:
    """The effect that another setting would have on a weight.  If there is no plan for the setting, all figures are None.

    ``what``: a description of the setting.  ``streamed``: the share of the weight's chunks that are streamed, from 0 to 1.
    ``impossible``: the reason why there is no plan; empty if there is a plan.
    """

    what: str
    streamed: float | None = None
    slack_s: float | None = None
    step_s: float | None = None
    device_bytes: int | None = None
    impossible: str = ""

    def row(self) -> tuple[str, ...]:
        if self.step_s is None:
            return self.what, self.impossible, "", "", ""
        slack = "" if self.slack_s is None else f"{'waits ' * (self.slack_s < 0)}{fine(abs(self.slack_s))}"
        return self.what, f"{100 * (self.streamed or 0.0):.0f} %", slack, seconds(self.step_s), size(self.device_bytes)


@dataclass(frozen=True, kw_only=True)
class Story:
    """The story of one weight in a plan.

    ``facts``: where the weight is stored and when it is read, as pairs of a title and a text.  ``copies``: the rows of a
    table of copies; each row describes one copy of consecutive chunks.
    """

    title: str
    planned: WeightPlan
    packed: bool
    facts: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, str, int, str, str], ...]
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        parts = [
            self.title,
            weights_table([self.planned], [self.planned.name] * self.packed),
            fitted(self.facts, tablefmt="plain"),
        ]
        if self.copies:
            columns = ("chunks", "bytes", "window", "copied from", "to")
            parts.append(fitted(self.copies, columns))
        if self.changes:
            headers = ("with", "streamed", "slack", "forward", "weights on the GPU")
            table = fitted([change.row() for change in self.changes], headers)
            parts.append(f"what would change it:\n\n{table}")
        return "\n\n".join(parts)


def story_of(weight: Weight, plan: Plan, changes: Iterable[Change]) -> Story:
    """Return the story of a weight.  The weight must be part of the plan."""
    planned = next(w for w in plan.weights if w.name == weight.name)
    lanes, uses = lanes_of(plan), weight.uses
    compute = lanes.lane("compute")
    reads = [b for b in lanes.lane("read") if span_chunks(b.name)[0] == weight.name]
    facts = [("read by", ", ".join(f"region_{k} ({region_title(*plan.regions[k])})" for k in uses) or "nothing")]
    if uses:
        facts.append(("", f"from {fine(compute[uses[0]].start)} to {fine(compute[uses[-1]].end)} of a call"))
    if planned.offset is not None:
        facts.append(("slot", f"{size(planned.offset)} to {size(planned.offset + planned.nbytes)} of the arena"))
    if reads:
        begin, end = fine(min(b.start for b in reads)), fine(max(b.end for b in reads))
        facts.append(("SSD", f"reads it from {begin} to {end} of a call"))
    return Story(
        title=f"{weight.name}: {weight.dtype}{list(weight.shape)}, {size(weight.source.values or weight.nbytes)}",
        planned=planned,
        packed=weight.source.compressed,
        facts=tuple(facts),
        copies=tuple(_copies(plan, planned, lanes.lane(plan.lane(weight.name)))),
        changes=tuple(changes),
    )


def _copies(plan: Plan, weight: WeightPlan, copies: Iterable[Bar]) -> Iterator[tuple[str, str, int, str, str]]:
    bars = {b.name: b for b in copies}
    for run in runs(weight.windows):
        if run.window is not None and (bar := bars.get(span_name(weight.name, run.first, run.end))) is not None:
            chunks = f"{run.first}" if run.end == run.first + 1 else f"{run.first} to {run.end - 1}"
            yield chunks, size(plan.nbytes(weight, run.first, run.end)), run.window, fine(bar.start), fine(bar.end)


def find_weight(problem: Problem, part: str) -> Weight:
    """Return the weight with the name ``part``, or else the only weight whose name contains ``part``.

    Raises ChunkflowError if no name or several names match.
    """
    weights = {w.name: w for w in problem.weights}
    aliases = {alias: w.name for w in problem.weights for alias in w.names}
    matches = list(dict.fromkeys(name for alias, name in aliases.items() if part in alias))
    if part in aliases or len(matches) == 1:
        return weights[aliases.get(part) or matches[0]]
    if matches:
        shown = "\n".join(f"  {n}" for n in matches[:_CANDIDATES])
        more = f"\n  and {len(matches) - _CANDIDATES} more" if len(matches) > _CANDIDATES else ""
        raise ChunkflowError(f"{part!r} is part of {len(matches)} names; use a longer part:\n{shown}{more}")
    if not weights:
        raise ChunkflowError("A call of this model reads no weights.")
    close = difflib.get_close_matches(part, list(weights), n=3, cutoff=0.0)
    raise ChunkflowError(f"No weight has {part!r} in its name; the nearest are {', '.join(close)}.")


def changes(weight: Weight, ranks: int, settings: Settings, plan_for: Callable[[Settings], Plan]) -> Iterator[Change]:
    """Yield the effects that other settings would have on a weight.  One setting is changed at a time.

    Yields nothing if the weight cannot be streamed.
    ``ranks``: the number of ranks in the problem.  ``plan_for``: a function that makes a plan for the given settings.
    """
    for what, other in _alternatives(settings, ranks, weight.source) if weight.keep is None else ():
        try:
            plan = plan_for(other)
        except ChunkflowError as error:
            yield Change(what=what, impossible=f"no such plan: {str(error).partition(':')[0]}")
            continue
        planned = next(w for w in plan.weights if w.name == weight.name)
        yield Change(
            what=what,
            streamed=planned.streamed_chunks / max(1, chunk_count(weight.nbytes, plan.chunk_bytes)),
            slack_s=planned.slack_s,
            step_s=plan.predicted.step_s if plan.predicted is not None else None,
            device_bytes=plan.device_bytes,
        )


def _alternatives(settings: Settings, ranks: int, source: Source) -> Iterator[tuple[str, Settings]]:
    """Yield pairs: a description of a change, and the changed settings.  ``source``: the source of the weight."""
    goal = settings.goal
    if goal.memory is not None:
        for factor in (0.75, 1.25):
            memory = int(goal.memory * factor)
            yield f"memory {size(memory)}", replace(settings, goal=replace(goal, memory=memory))
    else:
        for slowdown in (s for s in (1.0, 1.1) if s != goal.longest):
            yield f"slowdown {slowdown:g}", replace(settings, goal=replace(goal, slowdown=slowdown))
    machine = settings.hardware
    for factor, said in ((2.0, "PCIe twice as fast"), (0.5, "PCIe half as fast")):
        yield said, replace(settings, hardware=replace(machine, h2d_bandwidth=machine.h2d_bandwidth * factor))
    if machine.shared_by(ranks) is not machine:
        faster = replace(machine, host_bandwidth=2 * machine.host_bandwidth)
        yield "host memory twice as fast", replace(settings, hardware=faster)
    if source.file:
        faster = replace(machine, drive_bandwidth=2 * machine.drive_bandwidth)
        yield "an SSD twice as fast", replace(settings, hardware=faster)
    if settings.chunk_bytes >= 4 * 256:
        quarter = settings.chunk_bytes // 4 // 256 * 256
        yield f"chunks of {size(quarter)}", replace(settings, chunk_bytes=quarter)
