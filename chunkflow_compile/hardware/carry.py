"""Copies by kernels, as those of NCCL between GPUs without peer access: they write pinned host memory, and read it.

Imports Triton, so it is imported where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 1024
# Programs of a kernel: NCCL moves bytes with 2 to 32 of them, its channels.
PROGRAMS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _carry(target, source, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    step = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, n, step):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def carry(target: torch.Tensor, source: torch.Tensor, programs: int = PROGRAMS) -> None:
    """Copy a contiguous tensor to another of its size and dtype, on the current stream.

    Each of the two may lie in pinned host memory.
    """
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (target, source)]
    if all(t.numel() % 8 == 0 and t.data_ptr() % 8 == 0 for t in flat):
        flat = [t.view(torch.int64) for t in flat]
    into, out = flat
    _carry[(programs,)](into, out, out.numel(), BLOCK=_BLOCK_BYTES, num_warps=8)
