"""Copies made by kernels that read and write pinned host memory.  NCCL copies in this way between GPUs without peer access.

This module imports Triton, so it is imported only where it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 1024
# Number of Triton programs (thread blocks) per kernel.  NCCL copies with 2 to 32 thread blocks, which it calls
# channels.
PROGRAMS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(target, source, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    step = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, n, step):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def copy_by_kernel(target: torch.Tensor, source: torch.Tensor, programs: int = PROGRAMS) -> None:
    """Copy a contiguous tensor to another one of the same size and dtype, on the current stream.

    Either tensor may be in pinned host memory.
    """
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (target, source)]
    if all(t.numel() % 8 == 0 and t.data_ptr() % 8 == 0 for t in flat):
        flat = [t.view(torch.int64) for t in flat]
    into, out = flat
    _copy_kernel[(programs,)](into, out, out.numel(), BLOCK=_BLOCK_BYTES, num_warps=8)
