"""Choice: which weights are packed, and which lie in pieces on the devices of the ranks, by the predicted step.

Contract
    On entry: a Cut at its finest, and how its problems are planned, within a byte budget or for a step.
    On exit: all weights that can take the form, or a share of them, or none.  None unless the predicted step,
    or for a step the bytes on the device, is less than 1 / ``AS_GOOD`` of that with none.

Packing pays where the link is the bound: it has three quarters of the bytes to copy, and more of the weights fit the device.
Where copies are hidden anyway, unpacking only takes time.  A share of the weights is best in between: by position in the
block, so equal blocks stay equal.

Pieces take memory of the device whatever the plan does, so a weight that stays there whole should have none: all weights get
pieces, and then those that the plan keeps lose theirs, which leaves room for more to stay.  Where copies from host memory
have a link of their own, so many weights lose them, too, as that link can bring in a step, spread over it: these take no
memory, and nothing of the peers' link.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.coarsen import before_repeating
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.peers import on_peers, streamable
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem

from .coarsest import AS_GOOD

# Shares of the weights that are packed: half and a quarter gain up to 5 % of a step where the link is about to be hidden.
_SHARES = (1.0, 0.5, 0.25)
# Each round, what more can stay is the bytes of the pieces lost before: after this many, less than 1 % of the weights.
_ROUNDS = 4
# A share of the weights in pieces, by which these are fewer in each try.
_SHARE_STEP = 1 / 32
# If pieces of all weights have no room, the largest share of which they have is found to one part in 2 to this power.
_HALVINGS = 4
# Of what the host's link could bring in a step, how much it gets to bring beside pulls: the more, the fewer bytes for those,
# but the last tenth leaves it no slack (predicted for FLUX.1-dev on four H100 in 9.5 GiB: 1.092 of a resident step with a
# half, 1.083 with nine tenths).
_HOST_SHARE = 0.9

_Item = TypeVar("_Item", bound=Hashable)


def to_pack(cut: Cut, plan: Callable[[Problem], Plan]) -> frozenset[str]:
    """The names of the weights to pack.  Raises ChunkflowError if the budget of ``plan`` has room for none of the sets."""
    tries = _Tries(cut, plan, packed)
    if not tries.hidden:
        for names in _positioned(cut):
            tries.add(names)
    return tries.best


def to_peers(
    cut: Cut, plan: Callable[[Problem], Plan], ranks: int, budget: bool = True, host_rate: float = 0.0
) -> frozenset[str]:
    """The names of the weights that are to lie in pieces on the devices of so many ranks.

    ``budget``: whether there is one; without, a plan is the smallest for its step, and bytes on the device are compared.
    ``host_rate``: bytes/s that copies from host memory bring beside pulls, 0 if they share a link.
    Raises as :func:`to_pack`.
    """
    tries = _Tries(cut, plan, lambda of, names: on_peers(of, names, ranks), budget)
    if tries.hidden:
        return tries.best
    names = streamable(cut)
    tried = tries.add(names)
    if tried is None:
        names = _with_room(cut, names, tries)
        tried = tries.add(names)
    names, tried = _without_kept(names, tried, tries)
    if tried is not None and host_rate and (beside := _beside(cut, names, tried, host_rate)):
        _without_kept(names - beside, tries.add(names - beside), tries)
    return tries.best


def to_fewer_peers(cut: Cut, plan: Callable[[Problem], Plan], ranks: int, budget: bool = True) -> frozenset[str]:
    """The names of those weights in pieces that keep them in a cut coarser than that for which they were chosen.

    There each gap has to bring more, and what fit it no longer does.  Without its pieces, a weight takes no time of the
    peers' link: it stays on the device as long as there is memory.  Arguments as in to_peers.
    """
    names = frozenset(w.name for w in cut.problem.weights if w.source.sharded)
    tries = _Tries(cut, plan, lambda of, names: on_peers(of, names, ranks), budget, names)
    share = 0.0
    while names and not tries.hidden and tries.best == names and share < 1:
        share += _SHARE_STEP
        fewer = frozenset(_spread(*_by_use(cut, names), _SHARE_STEP / (1 - share + _SHARE_STEP)))
        names -= fewer
        tries.add(names)
    return tries.best


def _without_kept(names: frozenset[str], tried: Plan | None, tries: _Tries) -> tuple[frozenset[str], Plan | None]:
    """The weights without those that their plan keeps, and the plan that has no pieces of these."""
    for _ in range(_ROUNDS):
        kept = _kept(tried, names) if tried is not None else frozenset[str]()
        if not kept:
            break
        names -= kept
        tried = tries.add(names)
    return names, tried


def _beside(cut: Cut, names: frozenset[str], plan: Plan, rate: float) -> frozenset[str]:
    """Of the weights those that the host's link brings beside the pulls of the others, spread over the order of reading.

    Of a block in turns, its share stands for that of all turns.
    """
    assert plan.predicted is not None
    streamed = sum(plan.streamed_bytes(weight) for weight in plan.weights if weight.home == "peers")
    share = _HOST_SHARE * rate * plan.predicted.resident_step_s / streamed if streamed else 0.0
    return frozenset(_spread(*_by_use(cut, names), min(1.0, share)))


def _by_use(cut: Cut, names: frozenset[str]) -> tuple[list[str], dict[str, int]]:
    """The weights in the order in which they are read, and their bytes."""
    weights = sorted((w for w in cut.problem.weights if w.name in names), key=lambda w: (w.uses[0], w.name))
    return [w.name for w in weights], {w.name: w.nbytes for w in weights}


def _kept(plan: Plan, names: frozenset[str]) -> frozenset[str]:
    """Those of the weights that stay on the device whole, of blocks in turns in most of the turns."""
    turns, kept = Counter[str](), Counter[str]()
    for weight in plan.weights:
        name = weight.name if weight.name in names else before_repeating(weight.name)
        turns[name] += 1
        kept[name] += not weight.streamed_chunks
    return frozenset(name for name in names if 2 * kept[name] > turns[name])


def _with_room(cut: Cut, able: frozenset[str], tries: _Tries) -> frozenset[str]:
    """The largest share of the weights whose pieces have room, spread over the order in which they are read."""
    order, nbytes = _by_use(cut, able)
    fits, low, high = frozenset[str](), 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        names = frozenset(_spread(order, nbytes, share))
        if tries.add(names) is None:
            high = share
        else:
            fits, low = names, share
    return fits


class _Tries:
    """Sets of weights in a form, the best of which is kept.  ``hidden``: whether the cut as it is needs no other."""

    def __init__(
        self,
        cut: Cut,
        plan: Callable[[Problem], Plan],
        form: Callable[[Cut, Collection[str]], Cut],
        budget: bool = True,
        names: frozenset[str] = frozenset(),
    ) -> None:
        """``budget``: see :func:`to_peers`.  ``names``: those in the form in the cut."""
        self.best, self.hidden, self._least = names, False, math.inf
        self._cut, self._plan, self._form, self._budget = cut, plan, form, budget
        with contextlib.suppress(ChunkflowError):  # packed, the regions may find room
            given = plan(cut.problem)
            assert given.predicted is not None
            self.hidden = budget and given.predicted.step_s <= AS_GOOD * given.predicted.resident_step_s
            self._least = self._measure(given) / AS_GOOD

    def add(self, names: frozenset[str]) -> Plan | None:
        """The plan with these weights in the form; None if there is none within the budget."""
        with contextlib.suppress(ChunkflowError):
            plan = self._plan(self._form(self._cut, names).problem)
            if (measured := self._measure(plan)) < self._least:
                self.best, self._least = names, measured
            return plan
        return None

    def _measure(self, plan: Plan) -> float:
        assert plan.predicted is not None
        return plan.predicted.step_s if self._budget else plan.device_bytes


def peers_of(cut: Cut, plan: Plan) -> frozenset[str]:
    """The weights that lie in pieces in a plan for this cut."""
    return streamable(cut) & {w.name for w in plan.weights if w.source.sharded}


def planned_for(cut: Cut, plan: Plan) -> frozenset[str]:
    """The weights that are packed in a plan for this cut."""
    nbytes = {w.name: w.nbytes for w in cut.problem.weights}
    return frozenset(w.name for w in plan.weights if w.name in packable(cut) and w.nbytes != nbytes[w.name])


def _positioned(cut: Cut) -> Iterator[frozenset[str]]:
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


def _spread(order: Sequence[_Item], nbytes: Mapping[_Item, int], share: float) -> Iterator[_Item]:
    """Those that have about this share of the bytes of all, spread over their order."""
    due = 0.0
    for item in order:
        due += share * nbytes[item]
        if due >= nbytes[item] / 2:
            due -= nbytes[item]
            yield item
