"""Policies: the placements that others use, as windows on the same machinery, to compare with.

``layerwise``: the whole next block is fetched while a block computes (SGLang).  ``layerwise-barrier``: moreover, compute
waits for that block before the first collective of this one, and so before each (the paper's reference code, as its
baseline).  ``layerwise-prefix``: the first blocks stay on the device, as many as a budget holds.  ``host-yield``: layerwise,
and no chunk starts while a flag is set that the host holds over each collective (what the paper publishes; the runtime's
part).  Weights outside blocks stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from chunkflow_compile.passes.plan import Barrier
from chunkflow_compile.passes.problem import Problem, Weight

from .windows import Chunk


def blocks_of(problem: Problem) -> list[tuple[int, int]]:
    """First and last region of each block, in order."""
    found = []
    for name, group in groupby(problem.regions, key=lambda r: r.block):
        members = [r.index for r in group]
        if name:
            found.append((members[0], members[-1]))
    return found


def layerwise(problem: Problem, chunks: Sequence[Chunk]) -> list[int | None]:
    """A window for each chunk: the first region of the block before its own, the last block's for the first block."""
    blocks = blocks_of(problem)
    home = {k: b for b, (first, last) in enumerate(blocks) for k in range(first, last + 1)}
    count = len(problem.regions)
    placed: list[int | None] = []
    for chunk in chunks:
        block = home.get(chunk.first)
        if block is None or home.get(chunk.last) != block:
            placed.append(None)
            continue
        before = blocks[block - 1][0]
        placed.append(before if block else before - count)
    # With a single block the next one is itself: its copy cannot start before its own last reader is done.
    return [None if w is None else max(w, c.last + 1 - count) for w, c in zip(placed, chunks, strict=True)]


def next_block_barriers(problem: Problem, streamed: Sequence[Weight]) -> tuple[Barrier, ...]:
    """At the first collective of each block: the weights of the block behind it."""
    blocks = blocks_of(problem)
    barriers = []
    for b, (first, last) in enumerate(blocks):
        begin, end = blocks[(b + 1) % len(blocks)]
        names = tuple(w.name for w in streamed if begin <= w.uses[0] <= end)
        inside = next((c for c in problem.collectives if first < c.before <= last), None)
        if inside is not None and names:
            barriers.append(Barrier(collective=inside.name, weights=names))
    return tuple(barriers)
