"""Traced: the input of the first pass.  Frozen.  After tracing, no pass accesses the model or a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from chunkflow_compile.passes.goal import DEFAULT_GOAL, Goal
from chunkflow_compile.passes.problem import Parameter


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """``count`` blocks of the same structure, whose programs run one after the other.  ``goal``: goal for the whole
    model.  ``share``: the blocks' share (0 to 1) of the model's weights.  ``tables``: bytes on the device for the
    tables of the blocks' hoisted products."""

    count: int
    goal: Goal = DEFAULT_GOAL
    share: float = 1.0
    tables: int = 0

    def weights(self, live_bytes: int = 0) -> int:
        """Return the part of the budget, in bytes, for the weights of these blocks if there are ``live_bytes`` bytes of
        activations."""
        assert self.goal.memory is not None, "there is a budget"
        return int(self.share * (self.goal.memory - self.goal.counted(live_bytes))) - self.tables


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An ATen inference graph from AOTAutograd, and facts that are not stored in its nodes.

    ``blocks``: names of blocks by their module key in ``nn_module_stack``.  ``ranks``: sizes of the process groups that
    the graph's collectives use, by name.  ``sizes``: values of the symbols in its metadata (sizes.py); ``unknown``:
    bounds of the symbols whose values a call does not give.  ``large``: names and bytes of the offloaded weights, in
    the order of the model, including weights that the graph does not use; empty if the model is not known.  ``fused``:
    whether Inductor will fuse the graph's ops.  ``repeats``: blocks with the same structure if the graph is a block of
    a model, otherwise None.  ``together``: number of ranks that run the graph at the same time, see :class:`Problem`.
    ``slow``: indices of the slow inputs of the Dynamo graph, which take few values (hoist.py); None if they are to be
    found.  ``exchange_groups``: number of groups of heads into which the graph's exchanges have been divided
    (head_groups.py); 1 if they are whole.
    """

    graph: GraphModule
    parameters: tuple[Parameter, ...]
    blocks: Mapping[str, str]
    ranks: Mapping[str, int]
    sizes: Mapping[str, int] = field(default_factory=dict)
    unknown: Mapping[str, int | None] = field(default_factory=dict)
    large: tuple[tuple[str, int], ...] = ()
    fused: bool = True
    repeats: Repeats | None = None
    together: int = 1
    slow: frozenset[int] | None = None
    exchange_groups: int = 1
