"""The protocol by which weights know the placed model that they are in; ``host_store.py`` fulfils it."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .counts import Counts
from .limits import Room


@dataclass(frozen=True, eq=False)
class Export:
    """A tensor of a state_dict, or its storage, that has the memory of a HostBuffer."""

    user: weakref.ref[Any]
    buffer: weakref.ref[Any]


class Store(Protocol):
    """A placed model, as its weights know it.  ``buffer``: a HostBuffer, and ``peers``: Peers, whose
    modules import this one."""

    device: torch.device
    pins: bool
    turn: tuple[int, int] | None
    counts: Counts
    peers: Any
    exported: dict[Export, None]

    def quiet(self) -> AbstractContextManager[object]: ...

    def end_programs(self) -> None: ...

    def warn_of_raw(self, buffer: Any) -> None: ...

    def mark_exported_dirty(self) -> None: ...

    @property
    def root(self) -> Any: ...

    def room(self, budget: int | None) -> Room: ...

    def disable_pinning(self, buffer: Any, cause: str) -> None: ...

    def warn_over_bound(self, name: str, how: str, more: int = 0) -> None: ...

    def first_call(self) -> AbstractContextManager[None]: ...

    def warn_of_compiler(self, name: str, backend: str) -> None: ...

    def count(self, name: str, nbytes: int) -> None: ...
