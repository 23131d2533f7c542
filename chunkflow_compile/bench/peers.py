"""Alternatives to ChunkFlow on a model with the same weights: plain torch.compile, and diffusers' group offload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from chunkflow_compile.passes.errors import ChunkflowError

if TYPE_CHECKING:
    import torch
    from torch import nn

# The second is the first, measured as an arm of its own: how far the two differ is the noise of a page.
INDUCTOR, INDUCTOR_AGAIN = "inductor", "inductor-again"
GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED = "diffusers-group-offload", "diffusers-group-offload-compiled"
PEER_ARMS = (INDUCTOR, INDUCTOR_AGAIN, GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED)
# Those whose weights lie in host memory.
OFFLOADED = (GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED)
# Recompilations that Dynamo allows of one function.  The hooks of group offload are one function for all blocks, and the
# documentation of diffusers raises the limit to this.
RECOMPILE_LIMIT = 1000


def peer_of(arm: str) -> str:
    """The peer that an arm runs."""
    return INDUCTOR if arm == INDUCTOR_AGAIN else arm


def make_peer(name: str, model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The model as a callable.  That of plain torch.compile is on ``device``, that of group offload in host memory.

    Raises ChunkflowError if the peer is group offload and the model has none.
    """
    import torch  # --help shows the names of the peers

    if name == INDUCTOR:
        return torch.compile(model, fullgraph=True, dynamic=False)
    if not hasattr(model, "enable_group_offload"):
        raise ChunkflowError(f"--arms {name}: {type(model).__name__} is not a model of diffusers. Leave this arm out.")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    offload: Any = model.enable_group_offload
    offload(onload_device=device, offload_device=torch.device("cpu"), **_group_offload(device.type == "cuda"))
    if name == GROUP_OFFLOAD_COMPILED:  # its hooks would break a full graph, so diffusers compiles each block
        compile_blocks: Any = model.compile_repeated_blocks
        compile_blocks(dynamic=False)
    return model


def peer_settings(name: str, on_gpu: bool) -> str:
    """What a peer is, as a user would call it."""
    if peer_of(name) == INDUCTOR:
        return "torch.compile(model, fullgraph=True, dynamic=False), all weights on the device"
    given = ", ".join(f"{key}={value!r}" for key, value in _group_offload(on_gpu).items())
    more = ", then compile_repeated_blocks(dynamic=False)" if name == GROUP_OFFLOAD_COMPILED else ""
    return f"enable_group_offload({given}){more}, torch._dynamo.config.recompile_limit = {RECOMPILE_LIMIT}"


def _group_offload(on_gpu: bool) -> Mapping[str, Any]:
    """What the documentation of diffusers recommends where speed counts: copies beside compute, and no wait of the host."""
    return {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": on_gpu, "record_stream": on_gpu}
