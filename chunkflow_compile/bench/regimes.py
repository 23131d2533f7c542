"""Regimes: named configurations in which the link decides, or does not.

Requests to one model differ in tokens, and F* (the paper's critical workload) lies between them.  Where one core computes
60 GFLOP/s, the link carries a block's weights in 0.15 (``compute-rich``), 0.7 (``contention``) and 2 (``compute-poor``) of
the time that the block computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from chunkflow_compile.models.small import Size

from .peers import PEER_ARMS

PEERS = ("resident", "layerwise", "layerwise-barrier", "chunkflow")
# On a GPU: what people use today beside what we make of it.
GPU_ARMS = ("resident", "layerwise", "chunkflow", *PEER_ARMS)
BUDGETS = (0, 20, 40, 60)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """``family``: of small models.  ``bandwidth``: bytes/s into a rank.  ``arms``: what is measured by default.

    ``most``: share of all weight bytes that chunkflow is given at most, where layerwise has more.
    """

    family: str
    size: Size
    bandwidth: float
    chunk_bytes: int
    arms: tuple[str, ...]
    shows: str
    most: float = 1.0


# 512 wide: a projection is 1 MiB in float32, so that it is streamed, and is cut into chunks.
_WAN = {"heads": 8, "head_dim": 64, "text": 64}
_CHUNK = 1 << 20
_LINK = 120e6

REGIMES: Mapping[str, Regime] = {
    "compute-rich": Regime(
        family="wan",
        size=Size(layers=3, frames=28, height=32, width=32, **_WAN),
        bandwidth=_LINK,
        chunk_bytes=_CHUNK,
        arms=PEERS,
        shows="many tokens: every copy hides",
        most=0.5,  # of three blocks layerwise holds two and fetches the third: all bytes
    ),
    "contention": Regime(
        family="wan",
        size=Size(layers=4, frames=10, height=32, width=32, **_WAN),
        bandwidth=_LINK,
        chunk_bytes=_CHUNK,
        arms=("resident", "layerwise", "layerwise-barrier", "host-yield", "chunkflow", "misjudged", "replanned"),
        shows="the link is nearly full, and four all-to-alls a block cross it",
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
        size=Size(layers=8, frames=5, height=32, width=32, **_WAN),
        bandwidth=80e6,
        chunk_bytes=_CHUNK,
        arms=("resident", *(f"{p}@{b}%" for b in BUDGETS for p in ("layerwise-prefix", "chunkflow"))),
        shows="few tokens: copies cannot hide, and memory buys speed",
    ),
}

# The regime of ``chunkflow demo``: a minute of steps in which policies differ.
DEMO = replace(REGIMES["contention"], arms=("resident", "layerwise", "chunkflow"))
