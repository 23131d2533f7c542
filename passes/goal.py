"""Goal: what plans are made for.  It is made once, from what the user gives, and is passed on whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import ExchangeGroups, Hoist, OnPeers, Pack, Policy, Split, Yield
from chunkflow_compile.units import Size, parse_bytes

# The longest step where the user gives neither a budget nor a slowdown.
DEFAULT_SLOWDOWN = 1.02


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What plans are made for: the fastest plan within a budget, or the smallest whose step is short enough.

    ``memory``: the budget, most bytes on the device: of weights and activations if ``activations`` is set, else of weights
    alone.  ``slowdown``: the longest predicted step, as a multiple of the step with all weights resident; see
    :attr:`longest`.  ``policy``: places the weights.  ``yields``: how copies avoid collectives.
    ``pack``: the names of the weights that are packed; True for all that can be, "auto" for those with which the step is
    predicted to be shorter within ``memory``.
    ``peers``: the same for those that lie in pieces on the devices of the ranks.  "auto" also chooses without ``memory``, for
    fewer bytes on the device.
    ``hoist``: whether products that no latent reaches are computed once for many steps (graph/hoist.py), so that their
    weights need not be streamed in each; "auto" where a step is then predicted to be shorter.
    ``split``: into how many slices the tokens of each block are split (graph/split.py), so that fewer bytes of activations
    are alive; "auto" for as few as a budget of weights and activations needs.
    ``exchange_groups``: into how many groups of heads the all-to-alls around attention are divided (graph/head_groups.py), so
    that one group is exchanged while another computes; False for none, "auto" for the number with which the step is predicted
    to be shortest.
    Raises ChunkflowError if both ``memory`` and ``slowdown`` are set, if ``slowdown`` is below 1, or if the policy ignores a
    field.
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
        """The goal that a user gives.  Raises ChunkflowError also if both budgets are given, or if one is not a size."""
        if memory is not None and weight_memory is not None:
            raise ChunkflowError(
                "Give memory, for weights and activations, or weight_memory, for weights alone, not both."
            )
        given = weight_memory if memory is None else memory
        budget = None if given is None else 0  # what excludes each other is reported before a missing unit
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
        """Of so many bytes of activations, those that count against the budget."""
        return live_bytes if self.activations else 0

    @property
    def longest(self) -> float:
        """The longest step without a budget, as a multiple of the step with all weights resident."""
        return self.slowdown or DEFAULT_SLOWDOWN

    def aimed_at(self, other: Goal | None) -> Goal:
        """This goal for the budget or the step of ``other``, and for its policy; the same goal for None.

        ``yields`` and ``hoist`` are kept where the policy depends on them.  Which weights are packed and sharded is kept.
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
