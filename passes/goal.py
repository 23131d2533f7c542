"""Goal: the objective for which plans are made.  The goal is created once from the user's options, and passed on as a
whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import ExchangeGroups, Hoist, OnPeers, Pack, Policy, Split, Yield
from chunkflow_compile.units import Size, parse_bytes

# The maximum step time, as a multiple of the baseline, if the user gives neither a budget nor a slowdown.
DEFAULT_SLOWDOWN = 1.02


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The objective of plans: the fastest plan within a budget, or the smallest plan whose step is short enough.

    ``memory``: budget, the maximum bytes on the device.  The budget covers weights and activations if ``activations`` is set,
    otherwise weights alone.  ``slowdown``: maximum predicted step time, as a multiple of the step time with all weights
    resident; see :attr:`longest`.  ``policy``: policy that places the weights.  ``yields``: how copies avoid overlap with
    collectives.  ``pack``: names of the packed weights, or True for all weights that can be packed.  "auto" packs the weights
    whose packing is predicted to shorten the step within ``memory``.  ``peers``: names of the weights that are sharded over
    the devices of the ranks, or True for all weights that can be streamed.  "auto" shards the weights whose sharding is
    predicted to shorten the step within ``memory``.  Without ``memory``, "auto" shards weights to minimize the bytes on the
    device.  ``hoist``: whether products that do not depend on the latent are computed once for many steps (graph/hoist.py),
    so that their weights need not be streamed in every step.  "auto" hoists if this is predicted to shorten a step.
    ``split``: number of slices into which the tokens of each block are split (graph/split.py), to reduce the activation
    memory.  "auto" takes the smallest number with which weights and activations fit in the budget.  ``exchange_groups``:
    number of groups of heads into which the all-to-alls around attention are divided (graph/head_groups.py), so that one
    group is exchanged while another is computed.  False divides nothing, and "auto" takes the number with the shortest
    predicted step.

    Raises ChunkflowError if both ``memory`` and ``slowdown`` are set, if ``slowdown`` is below 1, or if a field is set
    that the policy ignores.
    """

    memory: int | None = None
    activations: bool = False
    slowdown: float | None = None
    policy: Policy = "chunkflow"
    yields: Yield = "auto"
    pack: Pack | frozenset[str] = False
    peers: OnPeers | frozenset[str] = False
    hoist: Hoist = False
    split: Split = "auto"
    exchange_groups: ExchangeGroups = False

    def __post_init__(self) -> None:
        if self.memory is not None and self.slowdown is not None:
            raise ChunkflowError(f"Give {self.option} or slowdown, not both: each determines the other.")
        if self.slowdown is not None and not self.slowdown >= 1:
            raise ChunkflowError(
                f"Option slowdown={self.slowdown} is below 1: no plan beats all weights on the device."
            )
        ignored = f"yield={self.yields}" if self.yields != "auto" else ""
        if self.slowdown is not None:
            ignored = f"slowdown={self.slowdown}"
        if self.hoist is True:
            ignored = "hoist=True"
        if ignored and self.policy != "chunkflow":
            raise ChunkflowError(
                f"Policy {self.policy} has one plan only: {ignored} would change nothing; leave it out."
            )

    @staticmethod
    def given(
        memory: Size | None,
        weight_memory: Size | None,
        slowdown: float | None,
        policy: Policy,
        yields: Yield,
        pack: Pack,
        hoist: Hoist = False,
        split: Split = "auto",
        exchange_groups: ExchangeGroups = False,
    ) -> Goal:
        """Make the goal from the user's options.  Raises ChunkflowError as :class:`Goal` does, and also if both
        budgets are given or a budget is not a size."""
        if memory is not None and weight_memory is not None:
            raise ChunkflowError(
                "Give memory, for weights and activations, or weight_memory, for weights alone, not both."
            )
        given = weight_memory if memory is None else memory
        budget = None if given is None else 0  # so that conflicting options are reported before a missing unit
        goal = Goal(
            memory=budget,
            activations=memory is not None,
            slowdown=slowdown,
            policy=policy,
            yields=yields,
            pack=pack,
            hoist=hoist,
            split=split,
            exchange_groups=exchange_groups,
        )
        return goal if given is None else replace(goal, memory=parse_bytes(given, goal.option))

    @property
    def option(self) -> str:
        """The name of the option that sets the budget."""
        return "memory" if self.activations else "weight_memory"

    def counted(self, live_bytes: int) -> int:
        """Return the bytes of activations that count against the budget.  ``live_bytes``: bytes of live activations."""
        return live_bytes if self.activations else 0

    @property
    def longest(self) -> float:
        """The maximum step time if there is no budget, as a multiple of the step time with all weights resident."""
        return self.slowdown or DEFAULT_SLOWDOWN

    def aimed_at(self, other: Goal | None) -> Goal:
        """Return this goal with the policy and the budget or slowdown of ``other``.  If ``other`` is None, return this goal
        unchanged.

        This goal's ``yields`` and ``hoist`` are kept only if the policy of ``other`` uses them.  All other fields of
        this goal, such as ``pack`` and ``peers``, are kept.
        """
        if other is None:
            return self
        yields, hoist = (self.yields, self.hoist) if other.policy == "chunkflow" else (other.yields, False)
        return replace(
            self,
            memory=other.memory,
            activations=other.activations,
            slowdown=other.slowdown,
            policy=other.policy,
            yields=yields,
            hoist=hoist,
        )


DEFAULT_GOAL = Goal()
