"""Peers: marks selected weights as sharded over the devices of the ranks.

Contract
    On entry: a Cut, and names of weights that :func:`streamable` returns for this Cut.  The Cut is not changed.
    Preserved: the regions and their sequence.
    On exit: ``source.ranks`` of the selected weights, in the Discovery and in the Problem, is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .regions import Cut


def streamable(cut: Cut) -> frozenset[str]:
    """Return the names of the weights that can be sharded: all weights that may be streamed and that some region reads."""
    return frozenset(w.name for w in cut.problem.weights if w.keep is None and w.uses and w.nbytes)


def on_peers(cut: Cut, names: Collection[str], ranks: int) -> Cut:
    """Return the cut in which exactly the weights ``names`` are sharded over the devices of ``ranks`` ranks."""
    sharded = dict.fromkeys(names, ranks)
    if {w.name: w.source.ranks for w in cut.problem.weights if w.source.sharded} == sharded:
        return cut
    found = tuple(w.with_source(ranks=sharded.get(w.parameter.name, 0)) for w in cut.discovery.weights)
    weights = tuple(replace(w, source=replace(w.source, ranks=sharded.get(w.name, 0))) for w in cut.problem.weights)
    return replace(
        cut,
        discovery=replace(cut.discovery, weights=found),
        problem=replace(cut.problem, weights=weights),
        raw=None if cut.raw is None else on_peers(cut.raw, names, ranks),
    )
