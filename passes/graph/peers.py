"""Peers: chosen weights lie in pieces on the devices of the ranks, from which they are copied.

Contract
    On entry: a Cut, and names of weights that :func:`streamable` returns for it.  The Cut is not changed.
    Preserved: the regions and their sequence.
    On exit: the parameters of these weights, and their weights in the problem, say on the devices of how many ranks they lie.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .regions import Cut


def streamable(cut: Cut) -> frozenset[str]:
    """The weights that can lie in pieces: all that may stream."""
    return frozenset(w.name for w in cut.problem.weights if w.keep is None and w.uses and w.nbytes)


def on_peers(cut: Cut, names: Collection[str], ranks: int) -> Cut:
    """The cut with pieces of these weights on the devices of so many ranks, and of no others."""
    known = {w.name for w in cut.problem.weights if w.peers}
    if set(names) == known and all(w.peers == ranks for w in cut.problem.weights if w.peers):
        return cut
    peers = dict.fromkeys(names, ranks)
    found = tuple(
        replace(w, parameter=replace(w.parameter, peers=peers.get(w.parameter.name, 0))) for w in cut.discovery.weights
    )
    weights = tuple(replace(w, peers=peers.get(w.name, 0)) for w in cut.problem.weights)
    return replace(
        cut,
        discovery=replace(cut.discovery, weights=found),
        problem=replace(cut.problem, weights=weights),
        raw=None if cut.raw is None else on_peers(cut.raw, names, ranks),
    )
