"""The protocol through which weights access the placed model that they belong to; ``host_store.py`` implements it."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .counts import Counts
from .limits import PinAllowance


@dataclass(frozen=True, eq=False)
class Export:
    """A tensor of a state_dict, or its storage, that shares the memory of a HostBuffer."""

    user: weakref.ref[Any]
    buffer: weakref.ref[Any]


class Store(Protocol):
    """The parts of a placed model that its weights use.

    Parameters that are called ``buffer`` are HostBuffers, and ``peers`` is a Peers object.  Their types here are Any,
    because the modules that define these classes import this module.
    """

    device: torch.device
    pins: bool
    rank_and_count: tuple[int, int] | None
    counts: Counts
    peers: Any
    exported: dict[Export, None]

    def quiet(self) -> AbstractContextManager[object]: ...

    def end_programs(self) -> None: ...

    def warn_of_raw(self, buffer: Any) -> None: ...

    def sync_external_writes(self) -> None: ...

    @property
    def root(self) -> Any: ...

    def pin_allowance(self, budget: int | None) -> PinAllowance: ...

    def disable_pinning(self, buffer: Any, cause: str) -> None: ...

    def warn_over_bound(self, name: str, how: str, more: int = 0) -> None: ...

    def first_call(self) -> AbstractContextManager[None]: ...

    def warn_of_compiler(self, name: str, backend: str) -> None: ...

    def count(self, name: str, nbytes: int) -> None: ...
