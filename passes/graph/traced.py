"""Traced: a traced graph, which is the input of the first pass.  A Traced is immutable.  Passes access neither the
model nor a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from chunkflow_compile.passes.goal import DEFAULT_GOAL, Goal
from chunkflow_compile.passes.problem import Parameter


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Blocks of the same structure that run one after the other, and for which a single graph is compiled.

    ``count``: number of blocks.  ``goal``: goal for the whole model.  ``share``: share (0 to 1) of the model's weights
    that belongs to these blocks.  ``tables``: bytes of GPU memory for the tables that cache the results of the blocks'
    hoisted products (hoist.py)."""

    count: int
    goal: Goal = DEFAULT_GOAL
    share: float = 1.0
    tables: int = 0

    def weights(self, live_bytes: int = 0) -> int:
        """Return how many bytes of the budget the weights of these blocks may use.  ``live_bytes``: bytes of activations."""
        assert self.goal.memory is not None, "there is a budget"
        return int(self.share * (self.goal.memory - self.goal.counted(live_bytes))) - self.tables


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An ATen inference graph from AOTAutograd, and facts that are not stored in its nodes.

    ``parameters``: parameters among the inputs of the graph.  ``blocks``: names of the blocks, by the keys of their modules
    in ``nn_module_stack``.  ``ranks``: sizes of the process groups that collectives use, by the names of the groups.
    ``sizes``: values of the symbols in the metadata (symbolic_sizes.py).  ``unknown``: upper bounds of the symbols that
    depend on data.  ``large``: names and bytes of the offloaded weights, in the order of the model, including weights that
    the graph does not use; empty if the model is not known.  ``fused``: whether Inductor will fuse the graph's ops.
    ``repeats``: if the graph is compiled for blocks of one structure, these blocks, otherwise None.  ``together``: number of
    ranks that run the graph at the same time, see :class:`Problem`.  ``slow``: indices of the slow inputs of the Dynamo graph
    (hoist.py), or None if hoist.py is to find the slow inputs.  ``exchange_groups``: number of groups of heads into which the
    exchanges of the graph are divided (head_groups.py); 1 if the exchanges are not divided.
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
