"""Traced: the input of the first pass.  Frozen; after tracing, no pass queries the model or a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from chunkflow_compile.passes.goal import DEFAULT_GOAL, Goal
from chunkflow_compile.passes.problem import Parameter


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The blocks of one structure, whose programs run in turns: ``count`` of them.  ``goal``: of the model.  ``share``:
    their share of the model's weights.  ``tables``: bytes on the device of what is hoisted of them."""

    count: int
    goal: Goal = DEFAULT_GOAL
    share: float = 1.0
    tables: int = 0

    def weights(self, live_bytes: int = 0) -> int:
        """Bytes of the budget for their weights, next to ``live_bytes`` of activations."""
        assert self.goal.memory is not None, "there is a budget"
        return int(self.share * (self.goal.memory - self.goal.counted(live_bytes))) - self.tables


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An ATen inference graph from AOTAutograd, and the facts that its nodes do not carry.

    ``blocks``: module key in ``nn_module_stack`` -> name of the block, for modules that are blocks.  ``ranks``: name of
    a process group that the graph's collectives use -> its size.  ``sizes``: of the symbols in its metadata (sizes.py);
    ``unknown``: the bounds of those among them that no call gives.  ``large``: names and bytes of the weights that are
    offloaded, in the order of the model, used or not; empty if the model is not known.  ``fused``: whether Inductor will
    fuse its ops.  ``repeats``: of a graph of one block of a model; None for any other.  ``together``: the ranks that run it
    at the same time, see :class:`Problem`.  ``slow``: the indices of the inputs of the Dynamo graph that take few values
    (hoist.py); None if they are to be found.
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
