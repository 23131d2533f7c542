"""Detection of the users of a weight's memory: programs, views, arrays, and ops of other threads."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from chunkflow_compile.private_torch import core

from .bytes import as_array


class MemoryUses:
    """Detects whether anything except a HostBuffer and its weight uses the memory of the buffer's ``host`` tensor."""

    def __init__(self) -> None:
        # the arrays from which programs copy
        self._lent = weakref.WeakValueDictionary[int, Any]()
        self._own = 0  # the number of references that the buffer and its weight hold to the storage

    def count_own(self, host: torch.Tensor, view: torch.Tensor) -> None:
        """Count the references to the storage from a buffer and from its weight, whose host tensor is ``view``."""
        self._own = _own(host, view)

    def lend(self, host: torch.Tensor) -> torch.Tensor:
        """Return the bytes of ``host`` (uint8), for programs to copy from.  The result has a separate storage, so that it
        does not count as a view of the memory."""
        place = as_array(host)
        self._lent[id(place)] = place
        return torch.frombuffer(place, dtype=torch.uint8)

    def any(self, host: torch.Tensor) -> bool:
        """Whether a program, a view, or an op of another thread uses the memory.  If so, its pages must be kept."""
        return core.storage_uses(host) > self._own or bool(self._lent)

    def has_views(self, host: torch.Tensor) -> bool:
        """Whether a view of the memory is in use.  Always False if the memory is only a part of its storage."""
        return _is_whole(host) and core.storage_uses(host) > self._own

    def is_only(self, host: torch.Tensor, view: torch.Tensor) -> bool:
        """Whether the memory is a whole storage that nothing uses except the buffer and the weight whose host tensor is
        ``view``."""
        return _is_whole(host) and core.storage_uses(host) <= _own(host, view) and not self._lent


def _is_whole(host: torch.Tensor) -> bool:
    return host.untyped_storage().nbytes() == host.nbytes


def _own(host: torch.Tensor, view: torch.Tensor) -> int:
    """Return how many of the references that ``core.storage_uses`` counts do not show another use of the memory.

    These references come from the host tensors of the buffer and of its weight, from the bases of these tensors if they
    are views, and from the storage object that ``core.storage_uses`` itself creates.
    """
    tensors = (host, view, host._base, view._base)
    return 1 + len({id(tensor) for tensor in tensors if tensor is not None})
