"""The difference between two plans: weights that changed home or window, and the change in time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tabulate import tabulate

from chunkflow_compile.passes.graph.labels import weight_label
from chunkflow_compile.passes.plan import Plan, WeightPlan
from chunkflow_compile.units import size

from .record import seconds

# Names as chunkflow plan prints them -> fields of a prediction.
_TIMES = {
    "a call of the model": "step_s",
    "with all weights resident": "resident_step_s",
    "compute": "compute_s",
    "waiting for weights": "exposed_s",
    "collectives": "collective_s",
    "of it by copies": "inflation_s",
    "copies, beside the rest": "copy_s",
}


@dataclass(frozen=True, kw_only=True)
class Move:
    """A weight of both plans; pairs are (before, after).

    ``streamed``: how many of its ``chunks`` are copied.  ``ahead``: windows from the start of its first copy to its
    first reader.  ``elsewhere``: how many chunks changed window, None if the plans differ in windows or chunk size.
    """

    name: str
    block: str
    label: str
    home: tuple[str, str]
    streamed: tuple[int, int]
    chunks: tuple[int, int]
    ahead: tuple[int, int]
    elsewhere: int | None
    slot: tuple[int | None, int | None]

    @property
    def homes_differ(self) -> bool:
        return self.home[0] != self.home[1] or self.streamed[0] * self.chunks[1] != self.streamed[1] * self.chunks[0]


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """The difference between two plans; pairs are (before, after).

    ``figures``: seconds and bytes by name.  ``settings``: those that differ.  ``only``: weights that one plan lacks.
    """

    digests: tuple[str, str]
    settings: dict[str, tuple[str, str]]
    figures: dict[str, tuple[float, float]]
    homes: tuple[Move, ...]
    windows: tuple[Move, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def equal(self) -> bool:
        return self.digests[0] == self.digests[1]

    def __str__(self) -> str:
        if self.equal:
            return f"the plans are the same ({self.digests[0]})"
        parts = [f"{name}: {a} -> {b}" for name, (a, b) in self.settings.items()]
        rows = [(n, *(_amount_text(n, v) for v in pair), _change(n, *pair)) for n, pair in self.figures.items()]
        parts.append(tabulate(rows, headers=("", "before", "after", "change"), disable_numparse=True))
        for weights, which in zip(self.only, ("before", "after"), strict=True):
            if weights:
                parts.append(f"only {which}: {', '.join(weights[:8])}{' ...' * (len(weights) > 8)}")
        parts.append(_moves("changed home", self.homes, _home_change))
        parts.append(_moves("changed window", self.windows, _window_change))
        return "\n\n".join(parts)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans, which may be of different models."""
    old, new = ({w.name: w for w in plan.weights} for plan in (before, after))
    moves = [_weight_move(before, after, old[n], new[n]) for n in old if n in new]
    settings = {
        n: (str(getattr(before, n)), str(getattr(after, n))) for n in ("policy", "hardware", "chunk_bytes", "problem")
    }
    return PlanDiff(
        digests=(before.digest, after.digest),
        settings={n: pair for n, pair in settings.items() if pair[0] != pair[1]},
        figures={name: (a, b) for (name, a), (_, b) in zip(_plan_figures(before), _plan_figures(after), strict=True)},
        homes=tuple(m for m in moves if m.homes_differ),
        windows=tuple(m for m in moves if not m.homes_differ and (m.ahead[0] != m.ahead[1] or m.elsewhere)),
        only=(tuple(n for n in old if n not in new), tuple(n for n in new if n not in old)),
    )


def _plan_figures(plan: Plan) -> Iterator[tuple[str, float]]:
    for name, field in _TIMES.items():
        yield name, getattr(plan.predicted, field) if plan.predicted is not None else 0.0
    yield "weights on the device", plan.device_bytes
    yield "arena", plan.arena_bytes
    yield "copied", plan.moved_bytes


def _weight_move(before: Plan, after: Plan, old: WeightPlan, new: WeightPlan) -> Move:
    block = after.regions[new.first_use].block if new.first_use >= 0 else ""
    return Move(
        name=old.name,
        block=block,
        label=weight_label(old.name, block),
        home=(old.home, new.home),
        streamed=(old.streamed_chunks, new.streamed_chunks),
        chunks=(max(1, len(old.windows)), max(1, len(new.windows))),
        ahead=(old.ahead(len(before.regions)), new.ahead(len(after.regions))),
        elsewhere=_elsewhere(before, old, after, new),
        slot=(old.offset, new.offset),
    )


def _moves(title: str, moves: tuple[Move, ...], text: Callable[[Move], str]) -> str:
    """A table with one row for all weights of the same label and the same change, such as one weight in many blocks."""
    if not moves:
        return f"{title}: none"
    found: dict[tuple[str, str], list[str]] = {}
    for move in moves:
        found.setdefault((move.label, text(move)), []).append(move.block)
    rows = [
        (*key, len(blocks), ", ".join(blocks[:4]) + " ..." * (len(blocks) > 4))
        for key, blocks in sorted(found.items(), key=lambda item: item[0])
    ]
    return f"{title}: {len(moves)} weights\n\n" + tabulate(
        rows, headers=("weight", "what", "times", "blocks"), disable_numparse=True
    )


def _home_change(move: Move) -> str:
    return " -> ".join(
        "device" if home == "device" else "host" if n == of else f"host, {of - n} of {of} chunks stay"
        for home, n, of in zip(move.home, move.streamed, move.chunks, strict=True)
    )


def _window_change(move: Move) -> str:
    if move.ahead[0] != move.ahead[1]:
        return f"{move.ahead[0]} -> {move.ahead[1]} windows ahead"
    return f"{move.elsewhere} of {move.chunks[1]} chunks in another window"


def _elsewhere(before: Plan, old: WeightPlan, after: Plan, new: WeightPlan) -> int | None:
    sizes = [(plan.chunk_bytes, len(plan.regions), len(w.windows)) for plan, w in ((before, old), (after, new))]
    if sizes[0] != sizes[1]:
        return None
    return sum(a != b for a, b in zip(old.windows, new.windows, strict=True))


def _amount_text(name: str, value: float) -> str:
    return size(int(value)) if name in ("weights on the device", "arena", "copied") else seconds(value)


def _change(name: str, before: float, after: float) -> str:
    if before == after:
        return ""
    if not before:
        return f"+{_amount_text(name, after)}"
    return f"{100 * (after / before - 1):+.1f} %"
