"""The device arena: one allocation, slots at fixed offsets, each seen as the tensor of the weight it holds."""

from __future__ import annotations

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import ALIGNMENT, Plan


def allocate_arena(plan: Plan, device: torch.device) -> torch.Tensor:
    """``plan.arena_bytes`` of uint8 on ``device``, starting at a multiple of 256 bytes.  Raises ChunkflowError."""
    try:
        raw = torch.empty(plan.arena_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ChunkflowError(
            f"The device {device} has no room for an arena of {plan.arena_bytes} bytes ({error}). Free memory, or "
            "give less as memory=."
        ) from error
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + plan.arena_bytes]


def slot_bytes(arena: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """The bytes of one slot, uint8."""
    return arena[offset : offset + nbytes]


def as_weight(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """uint8 ``data`` seen with the dtype, shape and strides of ``like``."""
    return data.view(like.dtype).as_strided(like.shape, like.stride())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in memory order, uint8, whatever the order of its strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one run of memory, each once, so that a copy of bytes is a copy of it."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: p[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
