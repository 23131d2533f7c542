"""Story: one weight, from its home to its last reader, and what other settings would change."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tabulate import tabulate

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.placement.place import DEFAULT_SLOWDOWN
from chunkflow_compile.passes.plan import Plan, WeightPlan, chunk_count, runs, span_name
from chunkflow_compile.passes.problem import Problem, Weight
from chunkflow_compile.units import size

from .lanes import Lanes, around, lanes_of
from .record import fine, region_title, seconds

# Most candidates listed for an ambiguous name: they fit on a screen.
_CANDIDATES = 12


@dataclass(frozen=True, kw_only=True)
class ChunkCopy:
    """A copy of chunks ``[first, end)``, started in ``window``.

    Seconds from the start of a call; negative ones are in the call before.
    """

    first: int
    end: int
    nbytes: int
    window: int
    opens_s: float
    starts_s: float
    arrives_s: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """The effect of another setting.  ``streamed``: share of the weight's chunks.  Without a plan, figures are None."""

    what: str
    streamed: float | None = None
    slack_s: float | None = None
    step_s: float | None = None
    device_bytes: int | None = None
    impossible: str = ""


@dataclass(frozen=True, kw_only=True)
class Story:
    """One weight under a plan.  Times are seconds of one call of the model; ``readers``: region -> its label; ``reads_s``:
    when they run; ``drive_s``: when the drive reads the weight, None if it does not."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    home: str
    chunks: int
    streamed_chunks: int
    slot: tuple[int, int] | None
    copies: tuple[ChunkCopy, ...]
    readers: dict[int, str]
    reads_s: tuple[float, float] | None
    drive_s: tuple[float, float] | None
    slack_s: float | None
    why: str
    limit: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        parts = [
            f"{self.name}: {self.dtype}{list(self.shape)}, {size(self.nbytes)}",
            tabulate(self._facts(), tablefmt="plain"),
        ]
        if self.copies:
            columns = {
                "chunks": [f"{c.first}" if c.end == c.first + 1 else f"{c.first} to {c.end - 1}" for c in self.copies],
                "bytes": [size(c.nbytes) for c in self.copies],
                "window": [c.window for c in self.copies],
                "opens at": [fine(c.opens_s) for c in self.copies],
                "copied from": [fine(c.starts_s) for c in self.copies],
                "to": [fine(c.arrives_s) for c in self.copies],
            }
            parts.append(tabulate(columns, headers="keys", disable_numparse=True))
            if any(c.opens_s < 0 for c in self.copies):
                parts[-1] += "\n(negative: in the call before)"
        if self.changes:
            parts.append(f"what would change it:\n\n{self._changes()}")
        return "\n\n".join(parts)

    def _facts(self) -> list[tuple[str, str]]:
        readers = ", ".join(f"region_{k} ({what})" for k, what in self.readers.items()) or "nothing"
        rows = [("home", self.home), ("read by", readers)]
        if self.reads_s is not None:
            rows.append(("", f"from {fine(self.reads_s[0])} to {fine(self.reads_s[1])} of a call"))
        if self.slot is not None:
            rows.append(("slot", f"{size(self.slot[0])} to {size(self.slot[1])} of the arena"))
        if self.drive_s is not None:
            rows.append(("drive", f"reads it from {fine(self.drive_s[0])} to {fine(self.drive_s[1])} of a call"))
        if self.slack_s is not None:
            there = f"arrives {fine(self.slack_s)} before its first reader"
            rows.append(("slack", there if self.slack_s >= 0 else f"its first reader waits {fine(-self.slack_s)}"))
        return [*rows, ("why", self.why), ("limited by", self.limit)]

    def _changes(self) -> str:
        rows = []
        for change in self.changes:
            if change.step_s is None:
                rows.append((change.what, change.impossible, "", "", ""))
                continue
            kept = f"{100 * (change.streamed or 0.0):.0f} %"
            slack = "" if change.slack_s is None else f"{'waits ' * (change.slack_s < 0)}{fine(abs(change.slack_s))}"
            rows.append((change.what, kept, slack, seconds(change.step_s), size(change.device_bytes)))
        headers = ("with", "streamed", "slack", "a call", "weights on the device")
        return tabulate(rows, headers=headers, disable_numparse=True)


def tell(known: Weight, plan: Plan, changes: Iterable[Change]) -> Story:
    """The story of a weight, which must be in the plan."""
    name = known.name
    weight = next(w for w in plan.weights if w.name == name)
    lanes = lanes_of(plan)
    compute, reads, uses = lanes.lane("compute"), lanes.of("read", name), known.uses
    return Story(
        name=name,
        shape=known.shape,
        dtype=known.dtype,
        nbytes=weight.nbytes,
        home=_home_sentence(weight, known.drive),
        chunks=chunk_count(weight.nbytes, plan.chunk_bytes),
        streamed_chunks=weight.streamed_chunks,
        slot=None if weight.offset is None else (weight.offset, weight.offset + weight.nbytes),
        copies=tuple(_copies(plan, weight, lanes)),
        readers={k: region_title(*plan.regions[k]) for k in uses},
        reads_s=(compute[uses[0]].start, compute[uses[-1]].end) if uses else None,
        drive_s=(min(b.start for b in reads), max(b.end for b in reads)) if reads else None,
        slack_s=weight.slack_s,
        why=weight.why,
        limit=_what_limits(plan, weight, known.keep, lanes),
        changes=tuple(changes),
    )


def find_weight(problem: Problem, part: str) -> Weight:
    """The only weight whose name is or contains ``part``.  Raises ChunkflowError if none or several match."""
    weights = {w.name: w for w in problem.weights}
    aliases = {alias: w.name for w in problem.weights for alias in w.names}
    found = list(dict.fromkeys(name for alias, name in aliases.items() if part in alias))
    if part in aliases or len(found) == 1:
        return weights[aliases.get(part) or found[0]]
    if found:
        shown = "\n".join(f"  {n}" for n in found[:_CANDIDATES])
        more = f"\n  and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
        raise ChunkflowError(f"{part!r} is part of {len(found)} names; use a longer part:\n{shown}{more}")
    if not weights:
        raise ChunkflowError("A call of this model reads no weights.")
    close = difflib.get_close_matches(part, list(weights), n=3, cutoff=0.0)
    raise ChunkflowError(f"No weight has {part!r} in its name; the nearest are {', '.join(close)}.")


def changes(weight: Weight, settings: Settings, plan_for: Callable[[Settings], Plan]) -> Iterator[Change]:
    """The effect of other settings on a weight, with one thing changed in each; none if no plan moves it."""
    for what, other in _alternatives(settings, weight.drive) if weight.keep is None else ():
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


def _alternatives(settings: Settings, drive: bool) -> Iterator[tuple[str, Settings]]:
    """What is changed, and the settings.  ``drive``: whether the weight is there."""
    if settings.memory is not None:
        for factor in (0.75, 1.25):
            memory = int(settings.memory * factor)
            yield f"memory {size(memory)}", replace(settings, memory=memory)
    else:
        now = settings.slowdown or DEFAULT_SLOWDOWN
        for slowdown in (s for s in (1.0, 1.1) if s != now):
            yield f"slowdown {slowdown:g}", replace(settings, slowdown=slowdown)
    machine = settings.hardware
    for factor, said in ((2.0, "a link twice as fast"), (0.5, "a link half as fast")):
        yield said, replace(settings, hardware=replace(machine, h2d_bandwidth=machine.h2d_bandwidth * factor))
    if drive:
        faster = replace(machine, drive_bandwidth=2 * machine.drive_bandwidth)
        yield "a drive twice as fast", replace(settings, hardware=faster)
    if settings.chunk_bytes >= 4 * 256:
        quarter = settings.chunk_bytes // 4 // 256 * 256
        yield f"chunks of {size(quarter)}", replace(settings, chunk_bytes=quarter)


def _home_sentence(weight: WeightPlan, drive: bool) -> str:
    if weight.home == "device":
        return "device: it stays there"
    if drive:
        return f"drive, {weight.streamed_chunks} of {len(weight.windows)} chunks read and streamed in every call"
    kept = sum(w is None for w in weight.windows)
    if kept:
        return f"host, {len(weight.windows) - kept} of {len(weight.windows)} chunks streamed in every call, the others stay"
    return f"host, streamed in every call in {len(weight.windows)} chunk{'s' * (len(weight.windows) != 1)}"


def _what_limits(plan: Plan, weight: WeightPlan, keep: str | None, lanes: Lanes) -> str:
    if keep is not None or not weight.nbytes or weight.first_use < 0:
        small = (keep or "").startswith("small")
        return "min_bytes: smaller weights stay" if small else "the weight itself: no plan moves it"
    if weight.slack_s is not None and weight.slack_s < 0:
        if _waits_for_the_drive(weight, lanes):
            return "the drive: its copy waits until it is read"
        return "memory" if weight.ahead(len(plan.regions)) <= 1 else "the link"
    if weight.streamed_chunks < chunk_count(weight.nbytes, plan.chunk_bytes):
        return "the goal: streaming more of it would save no memory, or make the step longer than the goal allows"
    if held := [b.collective for b in plan.barriers if weight.name in b.weights]:
        return f"its barrier: {', '.join(held)} waits for this weight, so that no copy runs beside the collective"
    if beside := _collectives_beside(weight, lanes):
        return f"the link: its copy runs beside {', '.join(beside)}, and each slows the other where they share the link"
    return "nothing: it costs the call no time"


def _waits_for_the_drive(weight: WeightPlan, lanes: Lanes) -> bool:
    """Whether a copy of a weight starts at the moment at which its bytes are read."""
    read = {b.name: b.end for b in lanes.of("read", weight.name)}
    copies = lanes.of("copy", weight.name)
    return any(abs(b.start - read.get(b.name, -1.0)) < 1e-8 for b in copies)


def _collectives_beside(weight: WeightPlan, lanes: Lanes) -> list[str]:
    """The collectives that run while the weight is copied."""
    copies = lanes.of("copy", weight.name)
    times = [t for b in copies for t in around(b.start, b.end, lanes.step_s)]
    return [
        c.name
        for c in lanes.lane("collective")
        if any(min(end, c.end) - max(start, c.start) > 1e-9 for start, end in times)
    ]


def _copies(plan: Plan, weight: WeightPlan, lanes: Lanes) -> Iterator[ChunkCopy]:
    predicted = plan.predicted
    assert predicted is not None
    compute, waited = lanes.lane("compute"), {s.before: s.end - s.start for s in lanes.stalls}
    spans = {s.name: s for s in predicted.spans if s.lane == "copy"}
    starts = {slot.begin: slot.start for slot in lanes.slots if slot.weight == weight.name}
    for run in runs(weight.windows):
        if run.window is None:
            continue
        begin, stop = plan.span(weight, run.first, run.end)
        start = starts[(weight.offset or 0) + begin]
        span = spans.get(span_name(weight.name, run.first, run.end))
        before = weight.wraps(run.window) * predicted.step_s
        yield ChunkCopy(
            first=run.first,
            end=run.end,
            nbytes=stop - begin,
            window=run.window,
            # The window opens before the waits of its region.
            opens_s=compute[run.window].start - waited.get(compute[run.window].name, 0.0) - before,
            starts_s=start,
            arrives_s=start + (span.end - span.start if span is not None else 0.0),
        )
