"""Splitting: chooses, by the predicted step time, the number of slices into which the tokens of each block type are
split.

Contract
    On entry: a Cut in which each block without collectives is one region, and a function that plans its problems.
    On exit: the Cut with some of its blocks split into slices of their tokens.  The number of slices is the minimum
    with which weights and activations fit in the budget.  More slices are used only if they make the predicted step shorter
    by a factor of more than ``AS_GOOD``.  This is possible because smaller activations leave more memory for weights.  If no
    number of slices is enough, the result is the Cut that needs the smallest budget.

Block types with smaller activations get fewer slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.split import split, why_whole
from chunkflow_compile.passes.plan import Plan

from .coarsest import AS_GOOD

# The numbers of slices to try.  With 16 slices, each slice of the longest videos still has thousands of tokens, and the
# activations of a block are little more than its residual stream, K and V.
REPEATS = (1, 2, 4, 8, 16)

# A block type, identified by the keys of a block's regions, in program order.
BlockType = tuple[str, ...]


def best_split(cuts: Iterable[Cut], plan: Callable[[Cut], Plan], least: Callable[[Cut], int]) -> Cut:
    """Return the cut with the best plan within a budget.  If the budget is too small for all cuts, return the cut that
    needs the smallest budget, so that the error states the minimum.

    ``cuts``: cuts of a graph, each with smaller activations than the one before.  ``plan``: function that plans a cut; it
    raises ChunkflowError if the budget is too small.  ``least``: function that returns the minimum budget of a cut in
    bytes.
    """
    best: Cut | None = None
    least_s, refused = math.inf, list[Cut]()
    for tried in cuts:
        try:
            found = plan(tried).predicted
        except ChunkflowError:
            refused.append(tried)
            continue
        assert found is not None
        if found.step_s < least_s / AS_GOOD:
            best, least_s = tried, found.step_s
        if found.step_s <= AS_GOOD * found.resident_step_s:
            break
    return best or min(refused, key=least)


def split_into(cut: Cut, repeat: int) -> Cut:
    """Split each block of a cut into ``repeat`` slices, or into as many as possible if that is fewer."""
    return _split(cut, dict.fromkeys(_types(cut).values(), repeat), _Able(cut))


def splits(cut: Cut) -> Iterator[Cut]:
    """Yield cuts with increasing numbers of slices.  Each cut has smaller activations than the one before."""
    able, types, least = _Able(cut), _types(cut), cut.problem.live_bytes
    peaks: dict[BlockType, dict[int, int]] = {kind: {} for kind in types.values()}
    for repeat in REPEATS:
        alike = dict.fromkeys(peaks, repeat)
        tried = cut if repeat == 1 else _split(cut, alike, able)
        outside = 0
        for region in tried.problem.regions:
            kind = types.get(region.block)
            if kind is None:
                outside = max(outside, region.live)
            else:
                peaks[kind][repeat] = max(peaks[kind].get(repeat, 0), region.live)
        level = max([outside, *(min(of.values()) for of in peaks.values())])
        if level < least:
            least = level
            enough = {kind: next(k for k in of if of[k] <= level) for kind, of in peaks.items()}
            yield tried if enough == alike else _split(cut, enough, able)


def _types(cut: Cut) -> dict[str, BlockType]:
    """Return the type of each block, by the name of the block.  If the graph itself is a block that is compiled separately,
    the name of this block is empty."""
    types: dict[str, BlockType] = {}
    for region in cut.problem.regions:
        if region.block or cut.traced.repeats is not None:
            types[region.block] = (*types.get(region.block, ()), region.key)
    return types


class _Able:
    """Finds out into how many slices regions can be split."""

    def __init__(self, cut: Cut) -> None:
        self._regions = {region.info.key: region for region in cut.regions}
        self._known: dict[tuple[str, int], bool] = {}

    def most(self, key: str, repeat: int) -> int:
        """Return the maximum number of slices, at most ``repeat``, into which a region can be split."""
        return next(k for k in reversed(REPEATS) if k <= repeat and (k == 1 or self._can(key, k)))

    def _can(self, key: str, repeat: int) -> bool:
        if (key, repeat) not in self._known:
            self._known[key, repeat] = not why_whole(self._regions[key], repeat)
        return self._known[key, repeat]


def _split(cut: Cut, repeats: Mapping[BlockType, int], able: _Able) -> Cut:
    return split(cut, {key: able.most(key, repeat) for kind, repeat in repeats.items() for key in kind})
