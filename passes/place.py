"""Place: Problem -> Plan.  The seam that the cost model fills; here a weight starts a fixed number of windows ahead.

Contract
    On entry: a Problem.  Nothing else is looked at: no tensors, no clock, no device.
    On exit: every weight has a home and a reason; streamed ones have a slot and a window, and no two weights that are
    alive in the same window share bytes.  The same Problem and options give the same Plan, byte for byte.
    Errors rather than exceeds ``arena_bytes``, and says how small the arena may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .errors import ChunkflowError
from .plan import Plan, WeightPlan, align
from .problem import Problem, Weight
from .slots import Lifetime, assign_slots

Policy = Literal["chunkflow", "resident"]


def place(
    problem: Problem,
    *,
    policy: Policy = "chunkflow",
    chunk_bytes: int = 16 << 20,
    lookahead: int = 1,
    arena_bytes: int | None = None,
) -> Plan:
    """Decides the home, slot and window of every weight.

    ``policy``: ``"resident"`` keeps all weights on the device.  ``lookahead``: windows between the start of a weight's
    copy and its first use.  ``arena_bytes``: a hard limit; the lookahead shrinks until the arena fits.  Raises
    ChunkflowError when even without lookahead it does not.
    """
    windows = len(problem.regions)
    streamed = [w for w in problem.weights if w.keep is None and w.uses and policy == "chunkflow"]
    ahead = lookahead
    while True:
        lifetimes = [_lifetime(w, ahead, windows) for w in streamed]
        offsets, needed = assign_slots(lifetimes, windows) if streamed else ((), 0)
        if arena_bytes is None or needed <= arena_bytes:
            break
        if ahead == 0:
            raise _too_small(streamed, arena_bytes, needed)
        ahead -= 1
    placed = {
        w.name: WeightPlan(
            name=w.name,
            home="host",
            nbytes=w.nbytes,
            why=_why_streamed(w, life, windows),
            offset=offset,
            window=life.start,
            first_use=w.uses[0],
            last_use=w.uses[-1],
        )
        for w, life, offset in zip(streamed, lifetimes, offsets, strict=True)
    }
    weights = tuple(
        placed.get(w.name)
        or WeightPlan(name=w.name, home="device", nbytes=w.nbytes, why=w.keep or "policy resident: nothing is streamed")
        for w in problem.weights
    )
    return Plan(policy=policy, chunk_bytes=chunk_bytes, arena_bytes=needed, windows=windows, weights=weights)


def _lifetime(weight: Weight, ahead: int, windows: int) -> Lifetime:
    """From the opening of its window to the end of its last reader; never so long that it would meet itself."""
    first, last = weight.uses[0], weight.uses[-1]
    ahead = min(ahead, windows - (last - first) - 1)
    return Lifetime(start=(first - ahead) % windows, length=ahead + last - first + 1, nbytes=weight.nbytes)


def _why_streamed(weight: Weight, life: Lifetime, windows: int) -> str:
    ahead = (weight.uses[0] - life.start) % windows
    return f"streamed, starts {ahead} window{'s' * (ahead != 1)} ahead of region {weight.uses[0]}"


def _too_small(streamed: Sequence[Weight], arena_bytes: int, floor: int) -> ChunkflowError:
    largest = max(streamed, key=lambda w: w.nbytes)
    return ChunkflowError(
        f"An arena of {arena_bytes} bytes is too small: the weights read by one region need {floor} bytes at once "
        f"(the largest weight, {largest.name}, takes {align(largest.nbytes)}). Give arena_bytes={floor} or more, or cut "
        "finer regions with a smaller group_bytes."
    )
