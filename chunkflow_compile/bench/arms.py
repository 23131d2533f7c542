"""Arms: what a name on the command line stands for, as settings of the passes.  They share everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.place import BUDGETED, POLICIES, Policy
from chunkflow_compile.passes.placement.policies import blocks_of
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem

from .peers import PEER_ARMS

# Policy chunkflow planned with compute and link taken for twice as slow and twice as fast as they are, and the same with a
# new plan after two steps.
MISJUDGED, REPLANNED = "misjudged", "replanned"
WRONG_BY = 2.0
REPLAN_AFTER = 2


@dataclass(frozen=True)
class Arm:
    """``policy``, None for a peer, which is no program of ours; and the share of the blocks that a budget has room to keep,
    None for no more than layerwise takes."""

    name: str
    policy: Policy | None
    residency: float | None = None


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Raises ChunkflowError for a name that stands for nothing, or that comes twice."""
    if len(set(names)) < len(names):
        raise ChunkflowError(f"--arms {','.join(names)}: an arm comes twice.")
    return tuple(_parse(name) for name in names)


def _parse(name: str) -> Arm:
    if name in PEER_ARMS:
        return Arm(name, None)
    policy, at, share = name.partition("@")
    if policy in (MISJUDGED, REPLANNED) and not at:
        return Arm(name, "chunkflow")
    found = next((p for p in POLICIES if p == policy), None)
    budgeted = found in BUDGETED
    if found is None or (at and not budgeted) or (found == "layerwise-prefix" and not at):
        raise ChunkflowError(
            f"--arms: there is no arm {name!r}. There are {', '.join(p for p in POLICIES if p != 'layerwise-prefix')}, "
            f"{MISJUDGED}, {REPLANNED}, chunkflow@40% and layerwise-prefix@40% for the bytes of any share of the blocks; "
            f"and, on --device cuda, {', '.join(PEER_ARMS)}."
        )
    if not at:
        return Arm(name, found)
    percent = share.removesuffix("%")
    if not percent.isdigit() or int(percent) > 100:
        raise ChunkflowError(f"--arms {name}: {share!r} is no share of the blocks; write {policy}@40%.")
    return Arm(name, found, int(percent) / 100)


def settings_of(
    arm: Arm, layerwise: Plan, problem: Problem, timings: Timings, rate: float, most: float = 1.0
) -> Mapping[str, Any]:
    """What the passes are told for an arm of ours.

    ``layerwise``: that plan, whose bytes are everyone's budget; ``rate``: of the link; ``most``: share of all bytes that the
    budget is cut to.
    """
    if arm.policy not in BUDGETED:
        return {"policy": arm.policy, "timings": timings}
    memory = min(layerwise.device_bytes, round(most * problem.total_bytes))
    if arm.residency:
        memory += round(arm.residency * len(blocks_of(problem))) * block_bytes(problem)
    if arm.name in (MISJUDGED, REPLANNED):
        slower = tuple(WRONG_BY * s for s in timings.compute_s)
        timings = replace(timings, compute_s=slower, copy_rate=WRONG_BY * rate)
    return {"policy": arm.policy, "memory": memory, "timings": timings}


def block_bytes(problem: Problem) -> int:
    """Bytes of the weights of the largest block."""
    return max(
        (
            sum(w.nbytes for w in problem.weights if w.uses and begin <= w.uses[0] <= end)
            for begin, end in blocks_of(problem)
        ),
        default=0,
    )
