"""What users choose by name, and the defaults of sizes.  Imports nothing, so that ``--help`` answers at once."""

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

# How other systems split the weights among the ranks; predicted beside the policies (simulate/sharded.py), never run.
Sharded = Literal["distributed-layerwise", "fsdp"]
SHARDED: tuple[Sharded, ...] = get_args(Sharded)

# diffusers' enable_group_offload (simulate/group_offload.py).  That and the sharded ones are predicted, never run.
GroupOffload = Literal["group-offload"]
GROUP_OFFLOAD: GroupOffload = "group-offload"
# The published method of the paper, predicted as layerwise (cli/simulate.py).
HostYield = Literal["host-yield"]
HOST_YIELD: HostYield = "host-yield"
OnlyPredicted = GroupOffload | HostYield | Sharded
ONLY_PREDICTED: tuple[OnlyPredicted, ...] = (HOST_YIELD, GROUP_OFFLOAD, *SHARDED)

# How copies avoid collectives.  "soft": a window holds only the chunks that the model expects to finish before the next
# collective; "hard": compute also waits, before a collective, for the copies issued earlier, so none runs beside it;
# "auto": the better one on the timeline.
Yield = Literal["auto", "soft", "hard"]

# Whether weights are packed without loss (packing.py): "auto" packs those with which a step is predicted to be shorter.
Pack = Literal[False, True, "auto"]

# Whether weights lie in pieces on the devices of the ranks (pieces.py): "auto" has those there with which a step is predicted
# to be shorter.
OnPeers = Literal[False, True, "auto"]

# Whether products of slow inputs are computed once for many steps (graph/hoist.py): "auto" where that is predicted to pay.
Hoist = Literal[False, True, "auto"]

# Into how many slices the tokens of a block are split (graph/split.py): "auto" for as few as the budget needs.
Split = int | Literal["auto"]

# Into how many groups of heads the exchanges around attention are divided (graph/head_groups.py): "auto" for as many as make
# the predicted step shortest.
ExchangeGroups = Literal[False, "auto"] | int

# How a prefetch moves its bytes, each kind in a lane of its own, which is in order: "copy" from host memory, "pull" from the
# devices of the ranks.
Lane = Literal["copy", "pull"]
LANES: tuple[Lane, ...] = get_args(Lane)

StageName = Literal["traced", "regions", "planned", "rewritten", "verified"]
STAGES: tuple[StageName, ...] = get_args(StageName)

# Passes that can be left out, to see whether one of them causes a fault.  Later passes need all others.
OPTIONAL_PASSES: Mapping[str, str] = {
    "rotary": "complex rotary embeddings are computed in real arithmetic",
    "recompute": "values that are cheaper to compute again are not handed over between regions",
    "views": "pieces that hold only views are moved into the regions around them",
    "sharing": "equal regions are lowered once",
    "cycle": "programs that run in turns are planned as one",
    "verify": "the program is proved safe before it runs",
}

# Starting a copy takes 5 to 10 us and moving 1 MiB 35 us at 30 GB/s, so smaller copies waste much of the link.  Smaller
# parameters (biases, norms, modulation tables) make up less than 1 % of a DiT.
DEFAULT_MIN_BYTES = 1 << 20
# The best of 4, 16, 64 and 256 MiB in the paper: a collective waits for one chunk at most, which is 0.6 ms on PCIe 5.
DEFAULT_CHUNK_BYTES = 16 << 20
# A cut lets copies start and slots free up at a finer grain.  It costs a host call (about 0.2 ms on a slow CPU core)
# and the fusion across it.  At 30 GB/s, 64 MiB of weights take 2 ms: a cut every 64 MiB costs a tenth of their copy.
DEFAULT_GROUP_BYTES = 64 << 20

# Namespaces whose ops are torch's own, or of quantised weights: what they compute and whether they communicate is known.
KNOWN_NAMESPACES = frozenset(
    (
        *("aten", "prim", "prims", "inductor", "inductor_prims", "higher_order", "quantized", "quantized_decomposed"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem"),
        *("bitsandbytes", "quanto", "torchao", "chunkflow"),
    )
)
