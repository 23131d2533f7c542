"""CFG parallelism: each of two ranks computes one branch of classifier-free guidance, and the ranks exchange their
predictions."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkflow_compile.passes.errors import ChunkflowError

# The number of branches in classifier-free guidance: one with the prompt, one without it.
BRANCHES = 2


def exchange_branches(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Make each call of ``model`` return the predictions of both ranks in ``group``.  Return ``model``.

    Each rank calls the model with the inputs of its branch.  Every tensor that the call returns is the concatenation of
    both ranks' outputs along dimension 0, in rank order.  The exchange is an all-gather in the model's forward, so it is
    traced into the graph, and copies are planned around it.  Call this function after ``enable_ulysses`` and before the
    model is compiled.  ``group``: the process group of two ranks that compute the same part of the sequence.  Raises
    ChunkflowError if the group does not have two ranks.
    """
    ranks, name = dist.get_world_size(group), group.group_name
    if ranks != BRANCHES:
        raise ChunkflowError(
            f"exchange_branches needs a group of {BRANCHES} ranks, one for each branch of classifier-free guidance; group "
            f"{name!r} has {ranks}. Make a group of each two ranks that have the same part of the sequence."
        )
    forward = model.forward
    # call the ops behind torch.distributed._functional_collectives, because the names of its functions depend on the
    # release
    ops: Any = torch.ops._c10d_functional

    def exchanged(predicted: torch.Tensor) -> torch.Tensor:
        both: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(predicted.contiguous(), ranks, name))
        return both

    # replace forward instead of adding a hook, because Dynamo does not trace hooks of the compiled module itself
    @functools.wraps(forward)
    def with_exchange(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, exchanged, forward(*args, **kwargs))

    model.__dict__["forward"] = with_exchange
    return model
