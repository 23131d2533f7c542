"""Regimes: named configurations, some of which are limited by the emulated link.

Each regime sets the load of its emulated link: the share of the resident step in which this link would be busy if every
weight were streamed once per step.  The bandwidth is derived from this load and from the measured compute time, so a
regime means the same on faster and slower machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chunkflow_compile.catalog.sizes import Size

from .alternatives import ALTERNATIVES

OWN_ARMS = ("resident", "layerwise", "layerwise-barrier", "chunkflow")
# The arms on a GPU, which include the alternatives to ChunkFlow.
GPU_ARMS = ("resident", "layerwise", "chunkflow", *ALTERNATIVES)
BUDGETS = (0, 20, 40, 60)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A configuration: a small model, the load of its emulated link (``share`` in :class:`LinkLoad`), and the default
    arms.

    ``family``: the family of the model; empty if the :class:`Job` names a model.  ``ranks``: the number of ranks on an
    emulated link.  ``one_port``: whether all ranks share a port.  ``peers``: the bandwidth of a second port for pulls
    from other ranks and for collectives, as a multiple of the first port's bandwidth; 0 if one port is used for
    everything.  ``shows``: the purpose of the measurement, as text.  ``most``: a limit for the budget of chunkflow, as a
    share of all weight bytes; below this limit, the budget is the device bytes of layerwise.  ``dtype``: the dtype of the
    model.  ``group_bytes``: the option of this name.
    """

    family: str = ""
    size: Size = field(default_factory=Size)
    load: float = 0.0
    chunk_bytes: int
    arms: tuple[str, ...]
    shows: str
    most: float = 1.0
    dtype: str = "float32"
    group_bytes: int | None = None
    ranks: int = 2
    one_port: bool = False
    peers: float = 0.0


# With a width of 512, a projection takes 1 MiB in float32.  This is large enough for streaming, and larger weights have
# several chunks.
_WAN_WIDTH: Mapping[str, Any] = {"heads": 8, "head_dim": 64, "text": 64}
_CHUNK = 1 << 20
# With a width of 768, a projection takes 1.1 MiB in bfloat16.  ``group_bytes=1`` cuts the model so that each region reads
# one weight, as in models with larger weights.
_PACKED_WIDTH: Mapping[str, Any] = {"heads": 12, "head_dim": 64, "text": 64}
_PACKED: Mapping[str, Any] = {
    "family": "wan",
    "dtype": "bfloat16",
    "chunk_bytes": _CHUNK // 4,
    "group_bytes": 1,
    "most": 0.06,
}

REGIMES: Mapping[str, Regime] = {
    "compute-rich": Regime(
        family="wan",
        size=Size(layers=6, frames=8, height=32, width=32, **_WAN_WIDTH),
        load=0.2,
        chunk_bytes=_CHUNK,
        arms=OWN_ARMS,
        shows="the link has time to spare: all copies are hidden, in a quarter of the weight memory",
        most=0.25,  # layerwise needs more than this: it keeps two of six blocks and the weights outside blocks
    ),
    "contention": Regime(
        family="wan",
        size=Size(layers=4, frames=7, height=32, width=32, **_WAN_WIDTH),
        load=0.7,
        chunk_bytes=_CHUNK,
        arms=("resident", "layerwise", "layerwise-barrier", "chunkflow", "misjudged", "replanned"),
        shows="the link is nearly full, and carries four all-to-alls per block",
    ),
    "contention-flux": Regime(
        family="flux",
        size=Size(layers=2, singles=4, heads=8, head_dim=64, height=48, width=48, text=64),
        load=0.88,
        chunk_bytes=_CHUNK,
        arms=OWN_ARMS,
        shows="like contention, with double and single blocks",
    ),
    "compute-poor": Regime(
        family="wan",
        size=Size(layers=8, frames=5, height=32, width=32, **_WAN_WIDTH),
        load=1.6,
        chunk_bytes=_CHUNK,
        arms=("resident", *(f"{p}@{b}%" for b in BUDGETS for p in ("layerwise-prefix", "chunkflow"))),
        shows="few tokens: copies cannot be hidden, and more memory means more speed",
    ),
    "shared-port": Regime(
        family="wan",
        size=Size(layers=4, frames=4, height=16, width=16, **_WAN_WIDTH),
        load=3.0,
        chunk_bytes=_CHUNK,
        arms=("resident", "layerwise", "chunkflow"),
        shows="four ranks read host memory through one port: the port is the bound, and each has a quarter of it",
        ranks=4,
        one_port=True,
    ),
    "peers": Regime(
        family="wan",
        size=Size(layers=8, frames=8, height=32, width=16, **_WAN_WIDTH),
        load=6.7,
        chunk_bytes=_CHUNK,
        arms=("resident", "chunkflow", "chunkflow@65%", "chunkflow+peers", "chunkflow+mix"),
        shows="weights on the devices of four ranks, which pull from each other six times as fast as from the host",
        most=0.25,
        ranks=4,
        peers=6.0,
    ),
    "packed": Regime(
        size=Size(layers=12, frames=1, height=8, width=8, **_PACKED_WIDTH),
        load=4.0,
        arms=("resident", "chunkflow", "chunkflow+pack", "chunkflow@44%", "chunkflow@44%+pack"),
        shows="the link is the bound: weights that are packed, in 6 % and 50 % of the weight memory",
        **_PACKED,
    ),
    "packed-hidden": Regime(
        size=Size(layers=12, frames=1, height=16, width=8, **_PACKED_WIDTH),
        load=0.5,
        arms=("resident", "chunkflow", "chunkflow+auto", "chunkflow+pack"),
        shows="compute is the bound: no weight is packed unless it is asked for",
        **_PACKED,
    ),
    "hoisted": Regime(
        family="qwen-image",
        # with 128 tokens, text is not a slow input, and its products are not hoisted
        size=Size(layers=12, heads=8, head_dim=64, height=16, width=16, text=128),
        load=4.0,
        chunk_bytes=_CHUNK,
        arms=("resident", "chunkflow", "chunkflow+hoist"),
        shows="the link is the bound: a third of the weights is read by modulations, which are hoisted",
        group_bytes=1,
        most=0.06,
        ranks=1,
    ),
    "exchange-groups": Regime(
        family="wan",
        # with a width of 256, attention takes longer than its exchanges, and only the weights of MLPs are streamed
        size=Size(layers=4, frames=8, height=32, width=32, heads=8, head_dim=32, text=64),
        load=0.5,
        chunk_bytes=_CHUNK // 4,
        arms=(
            "resident",
            "resident+groups2",
            "resident+groups4",
            "chunkflow",
            "chunkflow+groups2",
            "chunkflow+groups4",
        ),
        shows="all-to-alls are a quarter of the step: exchanges in groups of heads, resident and streamed",
        most=0.75,
    ),
}

# The regimes of ``chunkflow demo``: contention shows speed, and compute-rich shows memory.  Both have the same number of
# frames, so that Inductor's cache contains the regions when the second regime is compiled.
DEMO: Mapping[str, Regime] = {
    name: replace(
        REGIMES[name], size=replace(REGIMES[name].size, frames=5), arms=("resident", "layerwise", "chunkflow")
    )
    for name in ("contention", "compute-rich")
}
