"""Choice: decides, by the predicted step time, which weights are packed and which are sharded over the devices of the
ranks.

Contract
    On entry: the finest Cut, and a function that plans problems of this cut, within a budget or for a step time.
    On exit: the names of the weights to pack or to shard.  These are all suitable weights, a share of them, or none.  Weights
    are chosen only if packing or sharding them makes the predicted step shorter by a factor of more than ``AS_GOOD``.  If
    plans are made for a step time, their bytes on the device are compared instead of their step times.

Packing helps if copies are the bottleneck: only three quarters of the bytes are copied, and more weights fit on the
device.  If copies are hidden anyway, unpacking only costs time.  If copies are nearly hidden, it is best to pack a share of
the weights.  In each block, the same weights are packed, so that the regions of equal blocks stay equal, and are lowered
once.

Shards occupy device memory under every plan, so a weight that stays on the device as a whole should not be sharded.  Which
weights stay is known only when there is a plan.  Therefore the first plan is made with all weights sharded.  Then the
weights that this plan keeps on the device are unsharded, which frees memory in which more weights can stay.  If copies from
host memory do not share an interconnect with pulls, more weights are unsharded: as many as can be copied from host memory
during a step.  The unsharded weights are spread evenly over the step.  They need no memory for shards and do not use the
interconnect of the pulls.
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
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers, streamable
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem

from .coarsest import AS_GOOD

# The shares of the weights that are tried for packing.  If copies are nearly hidden, packing a half or a quarter of the
# weights saves up to 5 % of a step, compared with packing all of them or none.
_SHARES = (1.0, 0.5, 0.25)
# The maximum number of rounds in which weights are unsharded.  In each round, the freed memory lets more weights stay on the
# device, and these are unsharded in the next round.  After this number of rounds, less than 1 % of the weights remain to be
# unsharded.
_ROUNDS = 4
# The share of the sharded weights that to_fewer_peers unshards in each try.
_SHARE_STEP = 1 / 32
# If not all weights can be sharded within the budget, the largest possible share is found by this number of bisections.
_HALVINGS = 4
# The share of the copy bandwidth of host memory that is used while other weights are pulled.  The last tenth is left free in
# case a copy is late.  (Predicted step of FLUX.1-dev on four H100 in 9.5 GiB: 1.092 times the baseline if this share is one
# half, 1.083 times if it is nine tenths.)
_HOST_SHARE = 0.9

_Item = TypeVar("_Item", bound=Hashable)


def to_pack(cut: Cut, plan: Callable[[Problem], Plan]) -> frozenset[str]:
    """Return the names of the weights to pack.  ``plan``: function that plans a problem; it raises ChunkflowError if no
    plan fits in the budget."""
    tries = _Tries(cut, plan, packed)
    if not tries.hidden:
        for names in _positioned(cut):
            tries.add(names)
    return tries.best


def to_peers(
    cut: Cut, plan: Callable[[Problem], Plan], ranks: int, budget: bool = True, host_rate: float = 0.0
) -> frozenset[str]:
    """Return the names of the weights to shard over the devices of ``ranks`` ranks.

    ``plan``: see :func:`to_pack`.  ``budget``: True if plans are made for a budget, so that their step times are compared;
    False if plans are made for a step time, so that their bytes on the device are compared.  ``host_rate``: bytes/s of
    copies from host memory during pulls, or 0 if copies and pulls share an interconnect.
    """
    tries = _Tries(cut, plan, lambda of, names: on_peers(of, names, ranks), budget)
    if tries.hidden:
        return tries.best
    names = streamable(cut)
    tried = tries.add(names)
    if tried is None:
        names = _largest_share(cut, names, tries)
        tried = tries.add(names)
    names, tried = _without_kept(names, tried, tries)
    if tried is not None and host_rate and (copied := _from_host(cut, names, tried, host_rate)):
        _without_kept(names - copied, tries.add(names - copied), tries)
    return tries.best


def to_fewer_peers(cut: Cut, plan: Callable[[Problem], Plan], ranks: int, budget: bool = True) -> frozenset[str]:
    """Return the names of the weights of ``cut`` to keep sharded.  ``cut`` is coarser than the cut for which its sharded
    weights were chosen.

    In a coarser cut, more bytes must be pulled between two collectives, and there may be too little time for these pulls.  So
    some of the weights are unsharded: they are no longer pulled, and stay on the device if they fit there.  The arguments are
    the same as for :func:`to_peers`.
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
    """Remove from ``names`` (the weights to shard) the weights that the plan keeps on the device.  Return the remaining
    weights to shard and their plan.  ``tried``: plan for ``names``, or None if there is none."""
    for _ in range(_ROUNDS):
        kept = _kept(tried, names) if tried is not None else frozenset[str]()
        if not kept:
            break
        names -= kept
        tried = tries.add(names)
    return names, tried


def _from_host(cut: Cut, names: frozenset[str], plan: Plan, rate: float) -> frozenset[str]:
    """Choose the weights of ``names`` to copy from host memory while the other weights are pulled.  The chosen weights are
    spread evenly over the order in which regions read weights.  ``rate``: bytes/s of the copies from host memory.

    If ``plan`` covers several repetitions of a block, the share of the weights to choose is computed over all repetitions.
    """
    assert plan.predicted is not None
    streamed = sum(plan.streamed_bytes(weight) for weight in plan.weights if weight.home == "peers")
    share = _HOST_SHARE * rate * plan.predicted.resident_step_s / streamed if streamed else 0.0
    return frozenset(_spread(*_by_use(cut, names), min(1.0, share)))


def _by_use(cut: Cut, names: frozenset[str]) -> tuple[list[str], dict[str, int]]:
    """Return the weights ``names`` in the order in which regions read them, and the size of each in bytes."""
    weights = sorted((w for w in cut.problem.weights if w.name in names), key=lambda w: (w.uses[0], w.name))
    return [w.name for w in weights], {w.name: w.nbytes for w in weights}


def _kept(plan: Plan, names: frozenset[str]) -> frozenset[str]:
    """Return the weights among ``names`` that the plan keeps on the device as a whole.  If the plan covers several
    repetitions of a block, a weight counts as kept if the plan keeps it in most repetitions."""
    turns, kept = Counter[str](), Counter[str]()
    for weight in plan.weights:
        name = weight.name if weight.name in names else before_repeating(weight.name)
        turns[name] += 1
        kept[name] += not weight.streamed_chunks
    return frozenset(name for name in names if 2 * kept[name] > turns[name])


def _largest_share(cut: Cut, able: frozenset[str], tries: _Tries) -> frozenset[str]:
    """Return the largest set of weights whose shards fit in the budget: a share of the weights ``able``, spread evenly
    over the order in which regions read them."""
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
    """Tries sets of weights to pack or shard, and keeps the best set in ``best``.  ``hidden``: whether the plan of the
    unchanged cut already hides all copies, so that nothing has to be tried."""

    def __init__(
        self,
        cut: Cut,
        plan: Callable[[Problem], Plan],
        form: Callable[[Cut, Collection[str]], Cut],
        budget: bool = True,
        names: frozenset[str] = frozenset(),
    ) -> None:
        """``form``: function that packs or shards a set of weights of a cut.  ``budget``: see :func:`to_peers`.  ``names``:
        weights that are already packed or sharded in the cut."""
        self.best, self.hidden, self._least = names, False, math.inf
        self._cut, self._plan, self._form, self._budget = cut, plan, form, budget
        with contextlib.suppress(ChunkflowError):  # there may be no plan before weights are packed or sharded
            given = plan(cut.problem)
            assert given.predicted is not None
            self.hidden = budget and given.predicted.step_s <= AS_GOOD * given.predicted.resident_step_s
            self._least = self._measure(given) / AS_GOOD

    def add(self, names: frozenset[str]) -> Plan | None:
        """Plan a set of weights, and keep the set if its plan is the best so far: with a budget, the plan with the shortest
        step, and otherwise the plan that takes the fewest bytes.  Return the plan, or None if no plan fits the budget."""
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
    """Return the weights that are sharded in a plan for this cut."""
    return streamable(cut) & {w.name for w in plan.weights if w.source.sharded}


def planned_for(cut: Cut, plan: Plan) -> frozenset[str]:
    """Return the weights that are packed in a plan for this cut."""
    nbytes = {w.name: w.nbytes for w in cut.problem.weights}
    return frozenset(w.name for w in plan.weights if w.name in packable(cut) and w.nbytes != nbytes[w.name])


def _positioned(cut: Cut) -> Iterator[frozenset[str]]:
    """Yield sets of weights to pack: first all weights that can be packed, then half of them, then a quarter.  The
    smaller sets contain the same weights of each block, spread evenly over the block."""
    able = packable(cut)
    positions = _positions(cut.problem)
    order = list(dict.fromkeys(positions[w.name] for w in cut.problem.weights if w.name in able))
    nbytes = {positions[w.name]: w.nbytes for w in cut.problem.weights}
    for share in _SHARES if able else ():
        taken = set(_spread(order, nbytes, share))
        yield frozenset(name for name in able if positions[name] in taken)


def _positions(problem: Problem) -> dict[str, tuple[str, str]]:
    """Map the name of each weight to a pair: the name of the module list that contains its block, and its name inside
    the block."""
    positions = dict[str, tuple[str, str]]()
    for region in problem.regions:
        for name in region.weights:
            inside = bool(region.block) and name.startswith(f"{region.block}.")
            blocks = region.block.rpartition(".")[0]
            positions.setdefault(name, (blocks, name.removeprefix(region.block)) if inside else ("", name))
    return {w.name: positions.get(w.name, ("", w.name)) for w in problem.weights}


def _spread(order: Sequence[_Item], nbytes: Mapping[_Item, int], share: float) -> Iterator[_Item]:
    """Yield items, evenly spread over ``order``, whose bytes are about ``share`` times the bytes of all items."""
    due = 0.0
    for item in order:
        due += share * nbytes[item]
        if due >= nbytes[item] / 2:
            due -= nbytes[item]
            yield item
