"""Pack choice: which weights are packed, by the predicted step.

Contract
    On entry: a Cut at its finest, and how its problems are planned within a byte budget.
    On exit: all weights that can be packed, or a share of them, or none.  None unless the predicted step is less than
    1 / ``AS_GOOD`` of that with none.  The choice is by position in the block, so equal blocks stay equal.

Packing pays where the link is the bound: it has three quarters of the bytes to copy, and more of the weights fit the device.
Where copies are hidden anyway, unpacking only takes time.  A share of the weights is best in between.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem

from .coarsest import AS_GOOD

# Shares of the weights that are tried: half and a quarter gain up to 5 % of a step where the link is about to be hidden.
_SHARES = (1.0, 0.5, 0.25)


def chosen(cut: Cut, plan: Callable[[Problem], Plan]) -> frozenset[str]:
    """The names of the weights to pack.  Raises ChunkflowError if the budget of ``plan`` has room for none of the sets."""
    best, least = frozenset[str](), math.inf
    with contextlib.suppress(ChunkflowError):  # packed, the regions may find room
        raw = plan(cut.problem).predicted
        assert raw is not None
        if raw.step_s <= AS_GOOD * raw.resident_step_s:
            return best
        least = raw.step_s / AS_GOOD
    for names in _candidates(cut):
        with contextlib.suppress(ChunkflowError):
            predicted = plan(packed(cut, names).problem).predicted
            assert predicted is not None
            if predicted.step_s < least:
                best, least = names, predicted.step_s
    return best


def planned_for(cut: Cut, plan: Plan) -> frozenset[str]:
    """The weights that are packed in a plan for this cut."""
    nbytes = {w.name: w.nbytes for w in cut.problem.weights}
    return frozenset(w.name for w in plan.weights if w.name in packable(cut) and w.nbytes != nbytes[w.name])


def _candidates(cut: Cut) -> Iterator[frozenset[str]]:
    """Sets of weights: all, and shares of them that are spread over each block."""
    able = packable(cut)
    positions = _positions(cut.problem)
    order = list(dict.fromkeys(positions[w.name] for w in cut.problem.weights if w.name in able))
    nbytes = {positions[w.name]: w.nbytes for w in cut.problem.weights}
    for share in _SHARES if able else ():
        taken = set(_spread(order, nbytes, share))
        yield frozenset(name for name in able if positions[name] in taken)


def _positions(problem: Problem) -> dict[str, tuple[str, str]]:
    """The name of a weight -> its block's list, and its name in the block."""
    positions = dict[str, tuple[str, str]]()
    for region in problem.regions:
        for name in region.weights:
            inside = bool(region.block) and name.startswith(f"{region.block}.")
            blocks = region.block.rpartition(".")[0]
            positions.setdefault(name, (blocks, name.removeprefix(region.block)) if inside else ("", name))
    return {w.name: positions.get(w.name, ("", w.name)) for w in problem.weights}


def _spread(order: Sequence[tuple[str, str]], nbytes: dict[tuple[str, str], int], share: float) -> Iterator[object]:
    """Positions that have about this share of the bytes of all, spread over their order."""
    due = 0.0
    for position in order:
        due += share * nbytes[position]
        if due >= nbytes[position] / 2:
            due -= nbytes[position]
            yield position
