"""Policies: the placements of other systems, expressed as windows, for comparison.

``layerwise`` prefetches all weights of the next block while a block computes, like SGLang.  (diffusers' group offload
also copies the weights outside blocks in each call, see simulate/group_offload.py.)  With ``layerwise-barrier``, compute also
waits for the copies of the next block before the first collective of the current block.  Then no copy overlaps with a
collective.  The reference code of the ChunkFlow paper (arXiv 2605.11335) calls this policy the baseline.
``layerwise-prefix`` is layerwise with the first blocks resident, as many as fit in the budget.  Under all of these policies,
weights outside blocks are resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from chunkflow_compile.passes.plan import Barrier
from chunkflow_compile.passes.problem import Problem, Weight

from .windows import Chunk


def block_regions(problem: Problem) -> list[tuple[int, int]]:
    """Return the first and the last region of each block, in order."""
    bounds = []
    for name, group in groupby(problem.regions, key=lambda r: r.block):
        members = [r.index for r in group]
        if name:
            bounds.append((members[0], members[-1]))
    return bounds


def weights_of_blocks(problem: Problem, blocks: Sequence[tuple[int, int]]) -> list[list[Weight]]:
    """Return, for each block, the weights that only this block reads.  ``blocks``: first and last region of each block."""
    home = {k: b for b, (first, last) in enumerate(blocks) for k in range(first, last + 1)}
    found: list[list[Weight]] = [[] for _ in blocks]
    for weight in problem.weights:
        readers = {home.get(k, -1) for k in weight.uses}
        if len(readers) == 1 and (block := readers.pop()) >= 0:
            found[block].append(weight)
    return found


def layerwise(problem: Problem, chunks: Sequence[Chunk]) -> list[int | None]:
    """Return a window for each chunk: the first window of the block before the block that reads the chunk.  A chunk of the
    first block in a step gets the first window of the last block in the previous step.  A chunk whose readers are not all in
    one block gets None instead of a window.
    """
    blocks = block_regions(problem)
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
    # if there is only one block, its copies are for the next step, and cannot start before the last reader in this step has
    # finished
    return [None if w is None else max(w, c.last + 1 - count) for w, c in zip(placed, chunks, strict=True)]


def next_block_barriers(problem: Problem, streamed: Sequence[Weight]) -> tuple[Barrier, ...]:
    """Return one barrier per block, at the block's first collective: there, compute waits for the weights of the next
    block."""
    blocks = block_regions(problem)
    barriers = []
    for b, (first, last) in enumerate(blocks):
        begin, end = blocks[(b + 1) % len(blocks)]
        names = tuple(w.name for w in streamed if begin <= w.uses[0] <= end)
        inside = next((c for c in problem.collectives if first < c.before <= last), None)
        if inside is not None and names:
            barriers.append(Barrier(collective=inside.name, weights=names))
    return tuple(barriers)
