"""Regimes: named configurations in which the link decides, or does not.

All have one link, and differ in tokens, as requests to one server do: F* (the paper's critical workload) lies between
``compute-rich`` and ``compute-poor``.  The link carries a block's weights in 0.4 (rich), 0.8 (contention) and 1.9 (poor) of
the time that one core of 50 GFLOP/s computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chunkflow_compile.models.small import Size

PEERS = ("resident", "layerwise", "layerwise-barrier", "chunkflow")
BUDGETS = (0, 20, 40, 60)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """``family``: of small models.  ``bandwidth``: bytes/s into a rank.  ``arms``: what is measured by default."""

    family: str
    size: Size
    bandwidth: float
    chunk_bytes: int
    arms: tuple[str, ...]
    shows: str


# 512 wide: a projection is 1 MiB in float32, so that it is streamed, and is cut into chunks.
_WAN = {"heads": 8, "head_dim": 64, "text": 64}
_CHUNK = 1 << 20
_LINK = 120e6

REGIMES: Mapping[str, Regime] = {
    "compute-rich": Regime(
        family="wan",
        size=Size(layers=3, frames=16, height=32, width=32, **_WAN),
        bandwidth=_LINK,
        chunk_bytes=_CHUNK,
        arms=PEERS,
        shows="many tokens: every copy hides",
    ),
    "contention": Regime(
        family="wan",
        size=Size(layers=4, frames=10, height=32, width=32, **_WAN),
        bandwidth=_LINK,
        chunk_bytes=_CHUNK,
        arms=("resident", "layerwise", "layerwise-barrier", "host-yield", "chunkflow", "misjudged", "replanned"),
        shows="the link is nearly full, and eight collectives a block cross it",
    ),
    "contention-flux": Regime(
        family="flux",
        size=Size(layers=2, singles=4, heads=8, head_dim=64, height=48, width=48, text=64),
        bandwidth=_LINK,
        chunk_bytes=_CHUNK,
        arms=PEERS,
        shows="the same with double and single blocks",
    ),
    "compute-poor": Regime(
        family="wan",
        size=Size(layers=5, heads=12, head_dim=64, frames=6, height=32, width=32, text=64),
        bandwidth=_LINK,
        chunk_bytes=_CHUNK,
        arms=("resident", *(f"{p}@{b}%" for b in BUDGETS for p in ("layerwise-prefix", "chunkflow"))),
        shows="few tokens: copies cannot hide, and memory buys speed",
    ),
}
