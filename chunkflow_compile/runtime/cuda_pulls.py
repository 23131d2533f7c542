"""Pulls on a GPU: one call of the CUDA runtime copies the pieces of a chunk from the GPUs of the other ranks.

This module calls cudaMemcpyBatchAsync through ctypes, from the CUDA runtime library that torch has loaded, because torch
does not expose this function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from chunkflow_compile.weights.peer_pieces import Pieces

# The first CUDA version whose cudaMemcpyBatchAsync has the signature that this module uses.  In CUDA 12.8, the function has
# one more argument than in CUDA 13.
_SINCE = 13
# cudaMemcpySrcAccessOrderStream: the source is read in stream order, as in an ordinary copy.
_IN_ORDER = 1


class _Attributes(ctypes.Structure):
    """The C struct cudaMemcpyAttributes.  The ``hints`` apply to managed memory only."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


# A function that takes the target addresses, the source addresses, the sizes in bytes, and a stream.
Batch = Callable[[list[int], list[int], list[int], int], None]


def pull(target: torch.Tensor, source: Pieces) -> None:
    """Enqueue the copies of all pieces of ``source`` into ``target`` (uint8, with the same total bytes) on the current
    stream.

    A single call of the CUDA runtime copies the pieces from all other GPUs.  The runtime distributes these copies over
    several copy engines, which run at the same time.  The piece on this GPU is copied by torch, because a copy engine is
    slower within a GPU (87 GiB/s) than between GPUs (354 GiB/s; NCCL issue 2177).  Raises RuntimeError if the call fails.
    """
    stream = torch.cuda.current_stream().cuda_stream
    # before CUDA 13.5, CUDA graphs cannot record cudaMemcpyBatchAsync; the default stream does not support this function in
    # any version of CUDA
    batch = _batch() if stream and not torch.cuda.is_current_stream_capturing() else None
    if batch is None:
        for part, values in source.copies(target):
            part.copy_(values, non_blocking=True)
        return
    for part, values in source.own(target):
        part.copy_(values, non_blocking=True)
    begin, (offsets, addresses, sizes) = target.data_ptr(), source.pulls
    batch([begin + offset for offset in offsets], addresses, sizes, stream)


@cache
def _batch() -> Batch | None:
    """Return a function that calls cudaMemcpyBatchAsync; None if torch's CUDA runtime does not contain cudaMemcpyBatchAsync
    or cannot be loaded."""
    version = int((torch.version.cuda or "0").split(".")[0])
    if version < _SINCE:
        return None
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{version}")
        start, said = runtime.cudaMemcpyBatchAsync, runtime.cudaGetErrorString
    except (OSError, AttributeError):
        return None
    said.restype = ctypes.c_char_p
    many, one = ctypes.c_void_p, ctypes.c_size_t
    start.argtypes = [many, many, many, one, many, many, one, ctypes.c_void_p]
    attributes, first = _Attributes(_IN_ORDER), ctypes.c_size_t(0)

    def batch(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
        if not sizes:
            return
        words = ctypes.c_size_t * len(sizes)
        error = start(
            words(*targets),
            words(*sources),
            words(*sizes),
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            stream,
        )
        if error:
            raise RuntimeError(f"Pulls from the GPUs of other ranks failed: CUDA error {error}, {said(error).decode()}")

    return batch
