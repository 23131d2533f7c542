"""Reasons: explains the placement of a weight in a sentence, for readers of a plan."""

from __future__ import annotations

from chunkflow_compile.passes.plan import Windows
from chunkflow_compile.passes.problem import Weight

from .search import Planner


def reason(planner: Planner, weight: Weight, windows: Windows, slack: float | None, barrier: str | None = None) -> str:
    """Return the reason for the placement of ``weight``.

    ``slack``: predicted seconds from the arrival of the weight to its first reader; negative if the reader waits.
    ``barrier``: collective that a barrier delays until the weight has arrived, or None.
    """
    if weight.keep is not None:
        return weight.keep
    if not weight.nbytes:
        return "empty"
    if not weight.uses:
        return "no region reads it"
    policy = planner.goal.policy
    if policy == "resident":
        return "policy resident: nothing is streamed"
    kept = sum(w is None for w in windows)
    first = weight.uses[0]
    if kept == len(windows) and policy == "layerwise-prefix":
        return "policy layerwise-prefix keeps the first blocks, as many as the budget holds, and what is in no block"
    if kept == len(windows) and policy != "chunkflow":
        return f"policy {policy} streams whole blocks, and this weight is not inside one"
    if not kept:
        held = f"; {barrier} waits until it is there" if barrier else ""
        return _streamed(planner, windows, first, slack) + held
    seconds = planner.simulator.copy_seconds(weight.name, 0, kept)
    before = (first - 1) % planner.count
    text = f"kept because window {before} is full: streaming it would expose up to {_ms(seconds)}"
    if kept == len(windows):
        return text
    return f"{kept} of {len(windows)} chunks {text}; the others {_streamed(planner, windows, first, slack)}"


def _streamed(planner: Planner, windows: Windows, first: int, slack: float | None) -> str:
    starts = [(first - w) % planner.count for w in windows if w is not None]
    begin, ahead = (first - max(starts)) % planner.count, max(starts)
    where = (
        f"window {begin}, {ahead} window{'s' * (ahead != 1)} ahead of region {first}"
        if ahead
        else "its reader's window"
    )
    if slack is None or slack >= 0:
        return f"hidden: copied from {where}, there {_ms(slack or 0.0)} before it is read"
    cause = (
        "an earlier start would take more memory" if ahead <= 1 else "the link is busy with other weights until then"
    )
    return f"exposed by {_ms(-slack)} because copying starts in {where}: {cause}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
