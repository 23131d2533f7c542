"""Reads the exact bits of a call's small inputs on the host, with as few transfers from device memory as possible."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# The bits of an input: the dtype, shape and bytes of a tensor, or the type and value of any other input.  If two of these
# tuples are equal, the two inputs have equal bits.
Bits: TypeAlias = tuple[Any, ...]

# If the base of a view has at most this many bytes, the whole base is read, so that the bits of all its views are known.  For
# example, the timesteps of a generation are views of one tensor, which has at most 4 KB.
MOST_BASE_BYTES = 64 << 10

# The alignment in bytes of tensors that are made from bits.  Vectorized kernels expect this alignment.
_ALIGNMENT = 64


@dataclass
class BitSources:
    """Counters of an :class:`InputBits`.

    The first four fields count the inputs of calls by the way in which their bits were found.  ``same_object``: the same
    tensor object had been read before.  ``view_of_base``: the tensor is a view, and its base had been read before.
    ``on_host``: the input is in host memory.  ``read``: the tensor was read in a transfer.  ``transfers``: the number of
    transfers to the host.

    If a call also reads the timesteps of a scheduler (:class:`ExpectedSchedule`), the timesteps count as inputs of the call.
    """

    same_object: int = 0
    view_of_base: int = 0
    on_host: int = 0
    read: int = 0
    transfers: int = 0


class InputBits:
    """Finds the bits of inputs.  Not thread-safe: the caller holds the arena's lock.

    Values in host memory are read directly.  A device tensor needs no transfer if the same tensor object was read before and
    its ``_version`` and layout have not changed.  A view of a small base tensor needs no transfer if the base was read
    before and has not changed.  All other device tensors of a call are read in one transfer.  The object keeps only weak
    references to the tensors that it has read.  Writes that do not increase ``_version``, such as writes through ``.data`` or
    by a user's kernel, are not noticed.  Inference tensors have no version counter, so they are read in every call.

    ``on_host``: a function that returns whether a tensor is in host memory; tests replace it to run without a device.
    """

    def __init__(self, on_host: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cpu) -> None:
        self._on_host = on_host
        # tensor -> a pair: its state when it was read, and its bytes
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.sources = BitSources()

    def find(self, values: Sequence[Any]) -> list[Bits]:
        """Return the bits of each value.  Makes at most one transfer."""
        found = [self._without_transfer(value) for value in values]
        unknown = [i for i, bits in enumerate(found) if bits is None]
        if unknown:
            for i, content in zip(unknown, self._read([values[i] for i in unknown]), strict=True):
                found[i] = values[i].dtype, values[i].shape, content
        return found  # type: ignore[return-value]

    def elements_of_base(self, view: Any) -> tuple[list[bytes], int] | None:
        """If ``view`` shows only one element of a small base tensor (once, or repeated by expand), return all elements of
        the base and the index of the element that ``view`` shows.

        Returns None for all other inputs, and for a device tensor whose base has not been read by :meth:`find`.
        """
        if not isinstance(view, torch.Tensor) or not _repeats_one(view) or (base := _small_base(view)) is None:
            return None
        content = _host_bytes(base) if self._on_host(base) else self._same(base)
        return None if content is None else (split(content, base.element_size()), _first_element(base, view))

    def _without_transfer(self, value: Any) -> Bits | None:
        if not isinstance(value, torch.Tensor):
            self.sources.on_host += 1
            return _number(value)
        if self._on_host(value):
            self.sources.on_host += 1
            content: bytes | None = _host_bytes(value)
        elif (content := self._same(value)) is not None:
            self.sources.same_object += 1
        elif (base := _small_base(value)) is not None and (whole := self._same(base)) is not None:
            self.sources.view_of_base += 1
            content = _cut(whole, base, value)
            self._known[value] = _state(value), content
        return None if content is None else (value.dtype, value.shape, content)

    def _same(self, tensor: torch.Tensor) -> bytes | None:
        known: tuple[object, bytes] | None = self._known.get(tensor)
        return known[1] if known is not None and known[0] == _state(tensor) else None

    def _read(self, tensors: list[torch.Tensor]) -> list[bytes]:
        """Return the bytes of each tensor, read in one transfer.  For a view of a small base, the whole base is read."""
        bases = [_small_base(tensor) for tensor in tensors]
        wanted = {id(t): t for t in (t if base is None else base for t, base in zip(tensors, bases, strict=True))}
        # the bytes of an inference tensor are not remembered, because the tensor has no version counter
        states = [None if t.is_inference() else _state(t) for t in (*wanted.values(), *tensors)]
        whole = dict(zip(wanted, self._transfer(list(wanted.values())), strict=True))
        contents = [
            whole[id(tensor)] if base is None else _cut(whole[id(base)], base, tensor)
            for tensor, base in zip(tensors, bases, strict=True)
        ]
        read = zip((*wanted.values(), *tensors), states, (*whole.values(), *contents), strict=True)
        for tensor, state, content in read:
            if state is not None:
                self._known[tensor] = state, content
        self.sources.read += len(tensors)
        return contents

    def _transfer(self, tensors: list[torch.Tensor]) -> list[bytes]:
        self.sources.transfers += 1
        # as_strided comes first because view(torch.uint8) fails for a contiguous tensor of one element with stride 0
        dense = [_dense(tensor) for tensor in tensors]
        flat = [t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in dense]
        content = _host_bytes((flat[0] if len(flat) == 1 else torch.cat(flat)).cpu())
        ends = [0]
        for tensor in flat:
            ends.append(ends[-1] + tensor.numel())
        return [content[start:end] for start, end in pairwise(ends)]


def split(content: bytes, nbytes: int) -> list[bytes]:
    """Split bytes into elements with ``nbytes`` bytes each."""
    return [content[i : i + nbytes] for i in range(0, len(content), nbytes)]


def values_like(like: Any, wanted: Sequence[Bits]) -> list[Any]:
    """Return one input for each entry in ``wanted``, with exactly the bits of this entry.

    The returned tensors have the layout and the device of ``like``; a single copy moves all of them to the device.  If the
    layout of ``like`` repeats an element (stride 0), but an entry has different values for the repeated elements, the result
    contains None for this entry.
    """
    if not isinstance(like, torch.Tensor):
        return [_number_of(bits) for bits in wanted]
    item, layout = like.element_size(), (like.size(), like.stride())
    span = 1 + sum((size - 1) * stride for size, stride in zip(*layout, strict=True))
    places = torch.arange(span).as_strided(*layout).reshape(-1)
    contents = torch.frombuffer(bytearray(b"".join(bits[-1] for bits in wanted)), dtype=torch.uint8)
    contents = contents.reshape(len(wanted), -1, item)
    host = torch.zeros(len(wanted), -(-span * item // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
    spans = host[:, : span * item].unflatten(1, (span, item))
    spans[:, places] = contents
    held = (spans[:, places] == contents).flatten(1).all(1).tolist()
    moved = host.to(like.device).view(like.dtype)
    return [row.as_strided(*layout) if fits else None for row, fits in zip(moved, held, strict=True)]


def _number(value: Any) -> Bits:
    # floats are compared by their bits, because 0.0 == -0.0 is True, and a NaN does not equal itself
    if isinstance(value, float):
        return float, struct.pack("d", value)
    if isinstance(value, complex):
        return complex, struct.pack("dd", value.real, value.imag)
    return type(value), value


def _number_of(bits: Bits) -> Any:
    kind, content = bits
    if kind is float:
        return struct.unpack("d", content)[0]
    return complex(*struct.unpack("dd", content)) if kind is complex else content


def _state(tensor: torch.Tensor) -> object:
    """Return a value that changes when the tensor is written, or when it gets other memory (for example by an assignment to
    ``.data``)."""
    return tensor._version, tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _host_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    dense = tensor if plain else _dense(tensor)  # a call of _dense takes half of this function's time
    return ctypes.string_at(dense.data_ptr(), dense.nbytes)


def _repeats_one(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a tensor are at the same place in memory."""
    return tensor.numel() > 0 and not any(
        size > 1 and stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _small_base(view: torch.Tensor) -> torch.Tensor | None:
    """Return the base of a view if the base is small enough to be read as a whole and contains all elements of the view;
    otherwise None."""
    base = view._base
    if base is None or base.nbytes > MOST_BASE_BYTES or not base.is_contiguous():
        return None
    if view.is_inference() or any(t.is_conj() or t.is_neg() for t in (base, view)) or not view.numel():
        return None
    first = _first_element(base, view)
    last = first + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return base if first >= 0 and last < base.numel() else None  # a view that as_strided made may reach beyond its base


def _first_element(base: torch.Tensor, view: torch.Tensor) -> int:
    return int(view.storage_offset() - base.storage_offset())


def _cut(whole: bytes, base: torch.Tensor, view: torch.Tensor) -> bytes:
    """Return the bytes of ``view``.  ``whole``: the bytes of ``base``, the base of the view."""
    item, first = base.element_size(), _first_element(base, view)
    if _repeats_one(view):
        return whole[first * item : (first + 1) * item] * view.numel()
    if view.is_contiguous():
        return whole[first * item : (first + view.numel()) * item]
    copy = torch.frombuffer(bytearray(whole), dtype=base.dtype)
    return _host_bytes(copy.as_strided(view.shape, view.stride(), first))
