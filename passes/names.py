"""Choices that users make by name, and default sizes.  This module imports nothing heavy, so that ``--help`` is fast."""

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

# Methods with which other systems shard weights over ranks.  The step times of these methods are only predicted, for
# comparison (simulate/sharded.py).
Sharded = Literal["distributed-layerwise", "fsdp"]
SHARDED: tuple[Sharded, ...] = get_args(Sharded)

# diffusers' enable_group_offload (simulate/group_offload.py).  The step times of this method are only predicted.
GroupOffload = Literal["group-offload"]
GROUP_OFFLOAD: GroupOffload = "group-offload"
# The method of the ChunkFlow paper (arXiv 2605.11335).  The step times of this method are predicted like the step times of
# the policy "layerwise" (cli/simulate.py).
HostYield = Literal["host-yield"]
HOST_YIELD: HostYield = "host-yield"
OnlyPredicted = GroupOffload | HostYield | Sharded
ONLY_PREDICTED: tuple[OnlyPredicted, ...] = (HOST_YIELD, GROUP_OFFLOAD, *SHARDED)

# How copies avoid overlap with collectives.  "soft": a window contains only chunks that are predicted to arrive before the
# next collective.  "hard": in addition, compute waits before each collective for all copies issued so far, so that no copy
# overlaps with the collective.  "auto": whichever of "soft" and "hard" has the shorter simulated step.
Yield = Literal["auto", "soft", "hard"]

# Whether weights are packed without loss (packing.py).  "auto" packs the weights whose packing is predicted to shorten a
# step.
Pack = Literal[False, True, "auto"]

# Whether weights are sharded over the devices of the ranks (pieces.py).  "auto" shards the weights whose sharding is
# predicted to shorten a step.
OnPeers = Literal[False, True, "auto"]

# Whether matrix products that depend only on slow inputs, such as the timestep, are computed once for many steps
# (graph/hoist.py).  "auto" hoists if this is predicted to be faster.
Hoist = Literal[False, True, "auto"]

# The number of slices into which the tokens of a block are split (graph/split.py).  "auto" takes the minimum that fits in
# the budget.
Split = int | Literal["auto"]

# The number of groups of heads into which the exchanges (all-to-alls) around attention are divided (graph/head_groups.py).
# "auto" takes the number with the shortest predicted step.
ExchangeGroups = Literal[False, "auto"] | int

# A lane is a stream of the device (such as a CUDA stream) that copies weights to the device.  Lane "copy" copies from host
# memory, and lane "pull" copies from the devices of the ranks.
Lane = Literal["copy", "pull"]
LANES: tuple[Lane, ...] = get_args(Lane)

StageName = Literal["traced", "regions", "planned", "rewritten", "verified"]
STAGES: tuple[StageName, ...] = get_args(StageName)

# The passes that users can disable, to find out whether one of them causes a fault.  All other passes are required, because
# later passes use their results.
OPTIONAL_PASSES: Mapping[str, str] = {
    "rotary": "complex rotary embeddings are computed in real arithmetic",
    "recompute": "values that are cheaper to compute again are not handed over between regions",
    "views": "pieces that hold only views are moved into the regions around them",
    "sharing": "equal regions are lowered once",
    "cycle": "programs that run in turns are planned as one",
    "verify": "the program is proved safe before it runs",
}

# The minimum size of streamed weights.  Starting a copy takes 5 to 10 us, and moving 1 MiB takes 35 us at 30 GB/s, so
# smaller copies would waste much of the bandwidth.  Smaller parameters (biases, norms, modulation tables) make up less than
# 1 % of a DiT.
DEFAULT_MIN_BYTES = 1 << 20
# The size of a chunk.  In the ChunkFlow paper (arXiv 2605.11335), 16 MiB is the best of 4, 16, 64 and 256 MiB.  A collective
# waits for at most one chunk, which takes 0.6 ms over PCIe 5.
DEFAULT_CHUNK_BYTES = 16 << 20
# The size of the groups of weights between which the graph is cut.  Copies start and slots become free only at cuts, so
# smaller groups permit better plans.  But each cut costs a host call (about 0.2 ms on a slow CPU core) and prevents fusion
# across it.  At 30 GB/s, copying 64 MiB of weights takes 2 ms, so the host calls take a tenth of the copy time.
DEFAULT_GROUP_BYTES = 64 << 20

# Namespaces of ops from torch and from libraries for quantised weights.  The passes know what these ops compute, and whether
# they communicate.  For a user's custom op, the passes know neither.
KNOWN_NAMESPACES = frozenset(
    (
        *("aten", "prim", "prims", "inductor", "inductor_prims", "higher_order", "quantized", "quantized_decomposed"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem"),
        *("bitsandbytes", "quanto", "torchao", "chunkflow"),
    )
)
