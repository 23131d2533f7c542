"""Coarsen: merges neighbouring regions of a block, so that the graph is cut at fewer places.

The finest cut has about one region per 64 MiB of weights.  If there are many regions, copies can start at many points, and
slots become free at many points.  However, each region costs a host call, and Inductor fuses no ops of different regions.

Contract
    On entry: a Cut, which is not changed.
    On exit: groups of neighbouring regions, each of which can become one region.  The regions of a group are in one block,
    and there is no collective or completion between them.  Equal sequences of regions are grouped in the same way, so equal
    blocks are still lowered only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from chunkflow_compile.passes.cost.live import live_of
from chunkflow_compile.passes.problem import Problem, Region, RegionCost

from .regions import Cut, CutRegion

# For each group, the indices of its regions.
Groups = tuple[tuple[int, ...], ...]


def grouped(cut: Cut, most: int | None) -> Groups:
    """Divide the regions into groups.  ``most``: bytes of streamed weights that a group should not exceed, or None for no
    limit.

    Regions that may be merged (:func:`_runs`) and that read n bytes of streamed weights become at most n / ``most`` groups,
    rounded up.  The largest group is as small as possible, but it can exceed ``most``.
    """
    nbytes = streamed_bytes(cut.problem)
    groups = list[tuple[int, ...]]()
    for run in _runs(cut):
        sizes = [nbytes[region.index] for region in run]
        count = 1 if most is None else max(1, -(-sum(sizes) // most))
        groups += [tuple(run[i].index for i in members) for members in divided(sizes, count)]
    return tuple(groups)


def apart(cut: Cut) -> Groups:
    """Return one group per region."""
    return tuple((region.index,) for region in cut.problem.regions)


def merged(cut: Cut, groups: Groups) -> Problem:
    """Return the problem of a cut in which each group is one region.  The cost of a group is the sum of the costs of its
    regions.  The time that fusion between these regions would save is not known."""
    problem, live = cut.problem, live_of(cut.storages, cut.sequence, groups)
    number = {old: new for new, group in enumerate(groups) for old in group}
    end = len(groups)
    joined = (_concatenated([problem.regions[i] for i in group], new) for new, group in enumerate(groups))
    regions = tuple(replace(region, live=peak) for region, peak in zip(joined, live.peaks, strict=True))
    weights = tuple(replace(w, uses=tuple(sorted({number[use] for use in w.uses}))) for w in problem.weights)
    collectives = tuple(
        replace(c, before=number.get(c.before, end), until=number.get(c.until, end)) for c in problem.collectives
    )
    return replace(problem, regions=regions, collectives=collectives, weights=weights)


def repeated(problem: Problem, count: int) -> Problem:
    """Return a problem that consists of ``count`` repetitions of ``problem``, each with its own weights, like the
    blocks of one block type."""
    size, turns = len(problem.regions), range(count)
    of = [{w.name: f"{w.name} ({turn})" for w in problem.weights} for turn in turns]
    return replace(
        problem,
        regions=tuple(
            replace(
                r,
                index=turn * size + r.index,
                name=f"region_{turn * size + r.index}",
                block=f"{r.block} ({turn})",
                weights=tuple(of[turn][name] for name in r.weights),
            )
            for turn in turns
            for r in problem.regions
        ),
        collectives=tuple(
            replace(c, name=f"{c.name} ({turn})", before=turn * size + c.before, until=turn * size + c.until)
            for turn in turns
            for c in problem.collectives
        ),
        weights=tuple(
            replace(w, name=of[turn][w.name], uses=tuple(turn * size + use for use in w.uses))
            for turn in turns
            for w in problem.weights
        ),
    )


def before_repeating(name: str) -> str:
    """Return the name that a weight of a :func:`repeated` problem has in the original problem."""
    return name.rpartition(" (")[0]


def streamed_bytes(problem: Problem) -> list[int]:
    """Return, for each region, the bytes of the streamed weights that it reads."""
    nbytes = {w.name: w.nbytes for w in problem.weights if w.keep is None}
    return [sum(nbytes.get(name, 0) for name in region.weights) for region in problem.regions]


def _runs(cut: Cut) -> Iterator[list[Region]]:
    """Yield the sequences of regions that may be merged: neighbouring regions in the same block, without a collective or a
    completion between them.  Each sequence is as long as possible."""
    run = list[Region]()
    for item in cut.sequence:
        region = item.info if isinstance(item, CutRegion) else None
        if run and (region is None or region.block != run[-1].block):
            yield run
            run = []
        if region is not None:
            run.append(region)
    if run:
        yield run


def divided(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide the positions of ``sizes`` into at most ``count`` consecutive groups, so that the largest sum of a group is as
    small as possible."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, middle)) <= count else (middle + 1, high)
    return _filled(sizes, low)


def _filled(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divide the positions of ``sizes`` into consecutive groups with sums of at most ``most``.  Each group is as full
    as possible."""
    groups, held = list[list[int]](), 0
    for i, size in enumerate(sizes):
        if not groups or held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += size
    return groups


def _concatenated(regions: Sequence[Region], index: int) -> Region:
    return replace(
        regions[0],
        index=index,
        name=f"region_{index}",
        key="+".join(r.key for r in regions),
        nodes=sum(r.nodes for r in regions),
        weights=tuple(dict.fromkeys(name for r in regions for name in r.weights)),
        cost=_sum(r.cost for r in regions),
        groups=max(r.groups for r in regions),
    )


def _sum(costs: Iterable[RegionCost]) -> RegionCost:
    costs = list(costs)
    most, traffic = max(costs, key=lambda cost: cost.flops), Counter[int]()
    for cost in costs:
        traffic.update(dict(cost.traffic))
    return replace(
        most,
        flops=sum(c.flops for c in costs),
        attention=sum(c.attention for c in costs),
        masked=sum(c.masked for c in costs),
        operands=sum(c.operands for c in costs),
        traffic=tuple(sorted(traffic.items())),
        kernels=sum(c.kernels for c in costs),
        tiles=tuple(tile for c in costs for tile in c.tiles),
        attention_tiles=tuple(tile for c in costs for tile in c.attention_tiles),
    )
