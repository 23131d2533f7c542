"""Helpers that treat tensors as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from chunkflow_compile.private_torch import core

# torch casts a tensor of up to this many elements on the calling thread alone, and a larger tensor on several threads.
_SERIAL = 1 << 15
# Element size in bytes -> an integer dtype of this size, for bitwise comparisons.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_host_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between host tensors (uint8, equal sizes) on the calling thread alone.

    Tensor.copy_ would also use torch's intra-op threads, and so take them away from compute.  The copy releases the GIL.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def cast_on_this_thread(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the flat host tensor ``source`` into ``target``, cast to the dtype of ``target``, on the calling thread
    alone."""
    for cast, value in zip(target.split(_SERIAL), source.split(_SERIAL), strict=True):
        cast.copy_(value)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense host tensor in memory order, as a writable memoryview."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_weight(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View uint8 ``data`` with the dtype, shape and strides of ``like``."""
    return data.view(like.dtype).as_strided(like.shape, like.stride())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its bytes in memory order (uint8), whatever the order of its strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()`` without recording a profiler event.  The result shares memory and version counter with
    ``tensor``."""
    with core.unprofiled():
        return tensor.detach()


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    same = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return same and one.data_ptr() == other.data_ptr()


def as_array(host: torch.Tensor) -> Any:
    """Return the memory of a dense, non-empty host tensor as a ctypes array that keeps the tensor alive."""
    place: Any = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    place.host = host
    return place


def part_of(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """View the contiguous tensor ``whole`` with the dtype, shape, strides and offset of ``view``.

    ``view`` is a view of another tensor, which has as many bytes as ``whole``.
    """
    if view.dtype == whole.dtype and view.shape == whole.shape and view.stride() == whole.stride():
        return whole
    with torch.inference_mode(False), torch.no_grad():
        part = torch.empty(0, dtype=view.dtype, device="cpu")
        return part.set_(whole.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and non-overlapping, so that copying its memory range copies the tensor."""
    with core.unprofiled():
        return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def ordinary(tensor: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """Return ``tensor``, or a contiguous copy if ``tensor`` is not dense or is an inference tensor.  Inference tensors
    have no version counter.

    ``read``: a function that returns the values of ``tensor``; None if ``tensor`` itself contains its values.
    """
    if is_dense(tensor) and not tensor.is_inference():
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return (tensor if read is None else read(tensor)).clone(memory_format=torch.contiguous_format)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype and shape are bitwise equal."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return torch.equal(*(t.view(_BITS[t.itemsize]) for t in (one, other)))
