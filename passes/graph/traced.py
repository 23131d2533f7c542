"""Traced: what the first pass is given.  Frozen; after tracing nothing asks a process group or a model any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from chunkflow_compile.passes.problem import Parameter


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An ATen inference graph of AOTAutograd, and what its nodes do not say themselves.

    ``blocks``: module key of ``nn_module_stack`` -> name of the block, for the modules that are blocks.  ``ranks``: name
    of a process group that the graph's collectives use -> its size.
    """

    graph: GraphModule
    parameters: tuple[Parameter, ...]
    blocks: Mapping[str, str]
    ranks: Mapping[str, int]
