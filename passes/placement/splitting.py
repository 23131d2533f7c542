"""Splitting: into how many slices the tokens of each type of block are split, by the predicted step.

Contract
    On entry: a Cut with one region for each run of regions in a block, and how its problems are planned.
    On exit: the Cut with some of its blocks split into slices of their tokens: as few as it takes until weights and
    activations fit the budget, or more of them if the predicted step is then less than 1 / ``AS_GOOD`` of that, because
    fewer bytes of activations leave more for weights.  If none fits, the Cut that needs least.

Types of blocks need not be split alike: one whose activations are below those of others anyway has fewer slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.split import split, why_whole
from chunkflow_compile.passes.plan import Plan

from .coarsest import AS_GOOD

# Numbers of slices.  With 16, slices of the longest videos still have thousands of tokens, and what is left of a block is its
# residual stream with K and V.
REPEATS = (1, 2, 4, 8, 16)

# Keys of the regions of a block, in program order.
BlockType = tuple[str, ...]


def best_split(cuts: Iterable[Cut], plan: Callable[[Cut], Plan], least: Callable[[Cut], int]) -> Cut:
    """Of the cuts of a graph, with fewer and fewer bytes of activations, the one with the best plan within a budget.

    ``plan``: raises ChunkflowError if the budget is too little.  If it is for all of them, the one that needs ``least``: the
    error then states the minimum.
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
    """The cut with its blocks in so many slices, or in fewer where they cannot be split into so many."""
    return _split(cut, dict.fromkeys(_types(cut).values(), repeat), _Able(cut))


def splits(cut: Cut) -> Iterator[Cut]:
    """The cuts with more and more slices, each with fewer bytes of activations than those before."""
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
    """The type of each block.  A graph of one block, which is compiled by itself, is one without a name."""
    types: dict[str, BlockType] = {}
    for region in cut.problem.regions:
        if region.block or cut.traced.repeats is not None:
            types[region.block] = (*types.get(region.block, ()), region.key)
    return types


class _Able:
    """Into how many slices regions can be split."""

    def __init__(self, cut: Cut) -> None:
        self._regions = {region.info.key: region for region in cut.regions}
        self._known: dict[tuple[str, int], bool] = {}

    def most(self, key: str, repeat: int) -> int:
        """The most slices, at most ``repeat``, into which a region can be split."""
        return next(k for k in reversed(REPEATS) if k <= repeat and (k == 1 or self._can(key, k)))

    def _can(self, key: str, repeat: int) -> bool:
        if (key, repeat) not in self._known:
            self._known[key, repeat] = not why_whole(self._regions[key], repeat)
        return self._known[key, repeat]


def _split(cut: Cut, repeats: Mapping[BlockType, int], able: _Able) -> Cut:
    return split(cut, {key: able.most(key, repeat) for kind, repeat in repeats.items() for key in kind})
