"""Choices that users make by name, and default sizes.  Does not import anything heavy, so that ``--help`` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Policy = Literal["chunkflow", "layerwise", "layerwise-barrier", "layerwise-prefix", "resident"]
POLICIES: tuple[Policy, ...] = (
    "resident",
    "layerwise",
    "layerwise-barrier",
    "layerwise-prefix",
    "chunkflow",
)

# Methods with which other systems shard weights over ranks.  Their step times are only predicted, for comparison
# (simulate/sharded.py).
Sharded = Literal["distributed-layerwise", "fsdp"]
SHARDED: tuple[Sharded, ...] = get_args(Sharded)

# diffusers' enable_group_offload (simulate/group_offload.py).  Its step time is only predicted, too.
GroupOffload = Literal["group-offload"]
GROUP_OFFLOAD: GroupOffload = "group-offload"
# The published method of the paper, predicted as layerwise (cli/simulate.py).
HostYield = Literal["host-yield"]
HOST_YIELD: HostYield = "host-yield"
OnlyPredicted = GroupOffload | HostYield | Sharded
ONLY_PREDICTED: tuple[OnlyPredicted, ...] = (HOST_YIELD, GROUP_OFFLOAD, *SHARDED)

# How copies avoid collectives.  "soft": a window contains only chunks that are predicted to arrive before the next
# collective.  "hard": in addition, compute waits before a collective for the copies issued earlier, so that none overlaps
# with it.  "auto": the better of the two in simulation.
Yield = Literal["auto", "soft", "hard"]

# Whether weights are packed without loss (packing.py).  "auto" packs the weights for which this is predicted to shorten a
# step.
Pack = Literal[False, True, "auto"]

# Whether weights are sharded over the devices of the ranks (pieces.py).  "auto" shards the weights for which this is
# predicted to shorten a step.
OnPeers = Literal[False, True, "auto"]

# Whether products of slow inputs, such as the timestep, are computed once for many steps (graph/hoist.py).  "auto"
# hoists if this is predicted to be faster.
Hoist = Literal[False, True, "auto"]

# The number of slices into which the tokens of a block are split (graph/split.py).  "auto" takes the minimum that fits in
# the budget.
Split = int | Literal["auto"]

# The number of groups of heads into which the exchanges around attention are divided (graph/head_groups.py).  "auto" takes
# the number with the shortest predicted step.
ExchangeGroups = Literal[False, "auto"] | int

# The lane of a prefetch: "copy" from host memory, "pull" from the devices of the ranks.  Each lane runs its copies in
# order.
Lane = Literal["copy", "pull"]
LANES: tuple[Lane, ...] = get_args(Lane)

StageName = Literal["traced", "regions", "planned", "rewritten", "verified"]
STAGES: tuple[StageName, ...] = get_args(StageName)

# Passes that can be disabled, to find out whether one of them causes a fault.  Later passes depend on all other passes.
OPTIONAL_PASSES: Mapping[str, str] = {
    "rotary": "complex rotary embeddings are computed in real arithmetic",
    "recompute": "values that are cheaper to compute again are not handed over between regions",
    "views": "pieces that hold only views are moved into the regions around them",
    "sharing": "equal regions are lowered once",
    "cycle": "programs that run in turns are planned as one",
    "verify": "the program is proved safe before it runs",
}

# Starting a copy takes 5 to 10 us, and moving 1 MiB takes 35 us at 30 GB/s, so smaller copies waste much of the bandwidth.
# Smaller parameters (biases, norms, modulation tables) make up less than 1 % of a DiT.
DEFAULT_MIN_BYTES = 1 << 20
# The best of 4, 16, 64 and 256 MiB in the paper.  A collective waits for at most one chunk, which takes 0.6 ms over PCIe 5.
DEFAULT_CHUNK_BYTES = 16 << 20
# With more cuts, copies can start and slots become free at a finer granularity.  Each cut costs a host call (about 0.2 ms
# on a slow CPU core) and prevents fusion across it.  At 30 GB/s, copying 64 MiB of weights takes 2 ms, so a cut every 64
# MiB costs a tenth of the copy time.
DEFAULT_GROUP_BYTES = 64 << 20

# Namespaces of ops from torch and from libraries for quantised weights.  The passes know what these ops compute, and
# whether they communicate.
KNOWN_NAMESPACES = frozenset(
    (
        *("aten", "prim", "prims", "inductor", "inductor_prims", "higher_order", "quantized", "quantized_decomposed"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem"),
        *("bitsandbytes", "quanto", "torchao", "chunkflow"),
    )
)
