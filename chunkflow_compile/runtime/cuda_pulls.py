"""Pulls on a GPU: the parts of a chunk come from the GPUs of the other ranks in one call.

torch has no such call, so it goes to the CUDA runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from chunkflow_compile.weights.pieces import Pieces

# The first version of CUDA whose cudaMemcpyBatchAsync has this form; that of 12.8 has one argument more.
_SINCE = 13
# cudaMemcpySrcAccessOrderStream: the bytes are read in the order of the stream, as by any copy.
_IN_ORDER = 1


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes; ``hints`` are for managed memory."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


# Addresses of targets and of sources, bytes, and a stream.
Batch = Callable[[list[int], list[int], list[int], int], None]


def pull(target: torch.Tensor, source: Pieces) -> None:
    """Enqueue the copies of pieces into ``target`` (uint8, of as many bytes) on the current stream.

    Those from other GPUs are one call, which starts them on several copy engines at once; what this GPU has itself comes by
    torch's own copy, because a copy engine takes longer for it than for a pull (87 against 354 GiB/s, NCCL issue 2177).
    Raises RuntimeError if the call fails.
    """
    stream = torch.cuda.current_stream().cuda_stream
    # a graph cannot record the call before CUDA 13.5, and the default stream cannot take it
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
    """cudaMemcpyBatchAsync of torch's runtime; None if it has none, or torch is linked with it in another way."""
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
