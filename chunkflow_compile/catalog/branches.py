"""CFG parallelism: each of two ranks computes one branch of classifier-free guidance, and they exchange what they predict."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkflow_compile.passes.errors import ChunkflowError

# The branches of classifier-free guidance: with the prompt and without it.
BRANCHES = 2


def exchange_branches(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Let calls of ``model`` return the predictions of both ranks of ``group``; return ``model``.

    Each rank calls the model with the inputs of its own branch, and gets every tensor that it returns joined with the
    other rank's along dimension 0, in the order of the ranks.  The exchange is an all-gather in the model's forward, so
    it is traced into the graph, and copies are planned around it.  ``group``: two ranks with the same part of the
    sequence.  Call it before the model is compiled, after ``enable_ulysses``.
    Raises ChunkflowError if the group has another number of ranks.
    """
    ranks, name = dist.get_world_size(group), group.group_name
    if ranks != BRANCHES:
        raise ChunkflowError(
            f"exchange_branches needs a group of {BRANCHES} ranks, one for each branch of classifier-free guidance; group "
            f"{name!r} has {ranks}. Make a group of each two ranks that have the same part of the sequence."
        )
    forward = model.forward
    # What torch.distributed._functional_collectives calls; the name of its function depends on the release.
    ops: Any = torch.ops._c10d_functional

    def exchanged(predicted: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(predicted.contiguous(), ranks, name))
        return both

    # Not a hook: Dynamo leaves the hooks of the module that is compiled out of the graph.
    @functools.wraps(forward)
    def with_exchange(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, exchanged, forward(*args, **kwargs))

    model.__dict__["forward"] = with_exchange
    return model
