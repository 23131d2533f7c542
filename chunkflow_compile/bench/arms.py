"""Arms: the policies and settings that a measurement compares, with their names on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.shard import streamable
from chunkflow_compile.passes.names import ONLY_PREDICTED, POLICIES, OnPeers, Pack, Policy
from chunkflow_compile.passes.pieces import piece_bytes
from chunkflow_compile.passes.placement.choice import to_pack, to_peers
from chunkflow_compile.passes.placement.exchanging import MOST_GROUPS
from chunkflow_compile.passes.placement.place import BUDGETED
from chunkflow_compile.passes.placement.policies import block_regions
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.runtime.variants import Variant

from .alternatives import ALTERNATIVES

# Two arms with policy chunkflow whose first plan is wrong: it is made as if compute took twice as long and as if the
# emulated link were twice as fast.  The arm ``replanned`` is replanned after two steps.
MISJUDGED, REPLANNED = "misjudged", "replanned"
WRONG_BY = 2.0
REPLAN_AFTER = 2


class ArmForm(NamedTuple):
    """The form in which the regions of an arm are lowered.  ``packed``: the names of packed weights.  ``hoisted``:
    whether products are hoisted.  ``groups``: the number of groups of heads in which exchanges run."""

    packed: frozenset[str] = frozenset()
    hoisted: bool = False
    groups: int = 1


RAW, HOISTED = ArmForm(), ArmForm(hoisted=True)
# For each form, the variant of the resident step and the measured times of this step.
Measured = Mapping[ArmForm, tuple[Variant, Timings]]
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "pack": {"pack": True},
    "auto": {"pack": "auto"},
    "peers": {"peers": True},
    "mix": {"peers": "auto"},
    "hoist": {"hoist": True},
    **{f"groups{count}": {"groups": count} for count in range(2, MOST_GROUPS + 1)},
}


@dataclass(frozen=True)
class Arm:
    """One arm of a measurement.  ``policy``: a policy of ChunkFlow, or None for an alternative.

    ``residency``: the share of the blocks, 0 to 1, whose bytes are added to the budget; None to add nothing.  ``pack``:
    whether weights are packed.  ``peers``: whether weights are sharded over the devices of the ranks; the bytes of the
    shards are added to the budget.  For both, "auto" means that the faster form is chosen, as predicted from measured
    times.  ``hoist``: whether products are hoisted.  ``groups``: the number of groups of heads in which exchanges run.
    """

    name: str
    policy: Policy | None
    residency: float | None = None
    pack: Pack = False
    peers: OnPeers = False
    hoist: bool = False
    groups: int = 1


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return the arms with the given names.  Raises ChunkflowError for an unknown or repeated name."""
    if len(set(names)) < len(names):
        raise ChunkflowError(f"--arms {','.join(names)} names an arm twice: name each arm once.")
    return tuple(_parse(name) for name in names)


def _parse(name: str) -> Arm:
    if name in ALTERNATIVES:
        return Arm(name, None)
    planned, _, form = name.partition("+")
    grouped = planned == "resident" and "groups" in _FORMS.get(form, {})  # only this suffix changes a resident step
    if form in _FORMS and (planned.partition("@")[0] == "chunkflow" or grouped):
        return replace(_parse(planned), name=name, **_FORMS[form])
    policy, at, share = name.partition("@")
    if policy in ONLY_PREDICTED:
        raise ChunkflowError(
            f"--arms: {policy} is only predicted, by chunkflow simulate; it does not run. Leave it out."
        )
    if policy in (MISJUDGED, REPLANNED) and not at:
        return Arm(name, "chunkflow")
    parsed = next((p for p in POLICIES if p == policy), None)
    budgeted = parsed in BUDGETED
    if parsed is None or (at and not budgeted) or (parsed == "layerwise-prefix" and not at):
        raise ChunkflowError(
            f"--arms: there is no arm {name!r}. Use {', '.join(p for p in POLICIES if p != 'layerwise-prefix')}, "
            f"{MISJUDGED}, {REPLANNED}; chunkflow@40% or layerwise-prefix@40% to add the bytes of any share of the "
            f"blocks; chunkflow+pack or chunkflow+auto for packed weights, chunkflow+peers or chunkflow+mix for weights on "
            f"the devices of the ranks, chunkflow+hoist for hoisted weights, chunkflow+groups2 or resident+groups2 for "
            f"exchanges in groups of heads, with or without a share; with --device cuda "
            f"also {', '.join(ALTERNATIVES)}."
        )
    if not at:
        return Arm(name, parsed)
    percent = share.removesuffix("%")
    if not percent.isdigit() or int(percent) > 100:
        raise ChunkflowError(f"--arms {name}: {share!r} is not a share of the blocks; write {policy}@40%.")
    return Arm(name, parsed, int(percent) / 100)


def goal_of(
    arm: Arm, layerwise: Plan, problem: Problem, timings: Timings, rate: float, most: float = 1.0
) -> tuple[Goal, Timings]:
    """Return the goal of an arm that is not an alternative, and the times from which its plan is made.

    ``layerwise``: the plan of policy layerwise, whose device bytes are the budget of all arms.  ``rate``: the bandwidth
    from host to device in bytes/s.  ``most``: the maximum budget as a share of all weight bytes, before bytes are added
    for ``arm.residency`` and ``arm.peers``.
    """
    assert arm.policy is not None
    if arm.policy not in BUDGETED:
        return Goal(policy=arm.policy), timings
    memory = min(layerwise.device_bytes, round(most * problem.total_bytes))
    if arm.residency:
        memory += round(arm.residency * len(block_regions(problem))) * block_bytes(problem)
    if arm.peers:
        memory += sum(piece_bytes(w.nbytes, problem.ranks) for w in problem.weights if w.keep is None)
    if arm.name in (MISJUDGED, REPLANNED):
        slower = tuple(WRONG_BY * s for s in timings.compute_s)
        timings = replace(timings, compute_s=slower, copy_rate=WRONG_BY * rate)
    return Goal(policy=arm.policy, memory=memory), timings


def form_of(arm: Arm, measured: Measured, goal: Goal) -> ArmForm:
    """Return the form that an arm runs.  With ``pack="auto"``, ``to_pack`` chooses the weights to pack."""
    if arm.hoist:
        return HOISTED
    if arm.groups > 1:
        return ArmForm(groups=arm.groups)
    packed = next((form for form in measured if form.packed), RAW)
    if arm.pack != "auto":
        return packed if arm.pack else RAW
    (raw, raw_times), (_, packed_times) = measured[RAW], measured[packed]

    def plan(problem: Problem) -> Plan:
        # no step was measured in which only some weights are packed, so take the times with all of them packed
        times = raw_times if problem.digest == raw.program.problem.digest else packed_times
        return make_plan(problem, replace(raw.settings, goal=goal, timings=times, likes=()))

    return ArmForm(to_pack(raw.cut, plan))


def on_peers_of(arm: Arm, variant: Variant, goal: Goal, timings: Timings) -> frozenset[str]:
    """Return the names of the weights that an arm shards over the devices of the ranks.  With ``peers="auto"``,
    ``to_peers`` chooses them."""
    if arm.peers != "auto":
        return streamable(variant.cut) if arm.peers else frozenset()

    def plan(problem: Problem) -> Plan:
        times = replace(timings, problem=problem.digest)
        return make_plan(problem, replace(variant.settings, goal=goal, timings=times, likes=()))

    ranks = variant.settings.ranks
    return to_peers(variant.cut, plan, ranks, host_rate=variant.settings.hardware.rate_during_pulls(ranks))


def block_bytes(problem: Problem) -> int:
    """Return the weight bytes of the largest block."""
    used = [w for w in problem.weights if w.uses]
    blocks = (sum(w.nbytes for w in used if begin <= w.uses[0] <= end) for begin, end in block_regions(problem))
    return max(blocks, default=0)
