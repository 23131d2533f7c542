"""Alternatives to ChunkFlow on a model with the same weights: plain torch.compile, and diffusers' group offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chunkflow_compile.passes.errors import ChunkflowError

if TYPE_CHECKING:
    import torch
    from torch import nn

INDUCTOR = "inductor"
GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED = "diffusers-group-offload", "diffusers-group-offload-compiled"
PEER_ARMS = (INDUCTOR, GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED)


def make_peer(name: str, model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The model as a callable, with its weights on ``device`` or on the host, as the peer needs them.

    Raises ChunkflowError if the peer is group offload and the model has none.
    """
    import torch  # --help shows the names of the peers

    if name == INDUCTOR:
        return torch.compile(model, fullgraph=True, dynamic=False)
    if not hasattr(model, "enable_group_offload"):
        raise ChunkflowError(f"--arms {name}: {type(model).__name__} is not a model of diffusers. Leave this arm out.")
    model.to("cpu")
    offload: Any = model.enable_group_offload
    offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",
    )
    if name == GROUP_OFFLOAD_COMPILED:  # its hooks would break a full graph, so diffusers compiles each block
        compile_blocks: Any = model.compile_repeated_blocks
        compile_blocks(dynamic=False)
    return model
