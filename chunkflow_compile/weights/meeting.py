"""Meetings: the process groups whose ranks can find each other."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Backends of process groups of real ranks, whose store all of them can reach.
_REAL = ("gloo", "nccl")


@dataclass(frozen=True)
class Meeting:
    """A process group of several ranks: its store, this rank of it, all of its ranks, and how long it waits for one."""

    store: Any
    rank: int
    ranks: tuple[int, ...]
    timeout: timedelta

    @property
    def key(self) -> str:
        """The same on all of its ranks, for what they keep in the store: torch's names of groups may differ."""
        return hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]


def meeting(group: Any = None) -> Meeting | None:
    """The meeting of a process group, the default one if none is given; None unless it has several real ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    found = group or dist.distributed_c10d._get_default_group()
    ranks = tuple(dist.get_process_group_ranks(found))
    if len(ranks) < 2 or dist.get_rank() not in ranks or (backend := _real_backend(found)) is None:
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return Meeting(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks, timeout)


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of the process group of this name."""
    return tuple(dist.get_process_group_ranks(group_named(name)))


def group_named(name: str) -> Any:
    """The process group of this name."""
    # it exists in every release, but not in __all__
    resolve: Any = dist.distributed_c10d.__dict__["_resolve_process_group"]
    return resolve(name)


def _real_backend(group: Any) -> Any:
    """The backend of a group for one of its devices, None if it has no real one.  A group may have one for each device."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # none for this device
            backend = group._get_backend(torch.device(device))
            if backend.name() in _REAL:
                return backend
    return None
