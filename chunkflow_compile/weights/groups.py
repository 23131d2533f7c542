"""Process groups: their ranks, and those that weights can be shared in."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError, first_line

from .limits import local_ranks

_log = logging.getLogger(__name__)

# Between two looks for what a rank posts, which may take it minutes.  While TCPStore.wait waits, no other thread can use the
# store, and Ctrl-C has no effect.
_PAUSE_S = 0.02
# A rank that is waited for is named in the log after so long, and it is asked why it does not come.
LOGGED_S = 5.0
# In JSON, in the place of a value that a rank has posted for nothing.
_WITHDRAWN = "null"

# Backends of process groups of real ranks, whose store all of them can reach.
_REAL = ("gloo", "nccl")


class StoreEnded(ChunkflowError):
    """Raised where the store of a process group cannot be reached."""


@dataclass(frozen=True)
class Group:
    """A process group of several ranks: its store, this rank of it, all of its ranks, and how long it waits for one."""

    store: Any
    rank: int
    ranks: tuple[int, ...]
    timeout: timedelta

    @property
    def key(self) -> str:
        """The same on all of its ranks, for what they keep in the store: torch's names of groups may differ."""
        return f"chunkflow/{hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]}"

    def post(self, what: str, value: Any) -> str:
        """Let the other ranks read a value, such that JSON can hold.  Returns its key, for :meth:`posted`.

        Each rank posts the same as ``what`` in the same order; the n-th values belong together.
        Raises ChunkflowError if the store cannot be reached.
        """
        with reached():
            place = f"{self.key}/{hashlib.sha256(what.encode()).hexdigest()[:16]}"
            key = f"{place}/{self.store.add(f'{place}/count/{self.rank}', 1)}"
            self.store.set(f"{key}/{self.rank}", json.dumps(value))
            self.store.check([f"{key}/{self.rank}"])  # answered when the store has the value, as ``set`` is not
        return key

    def posted(
        self, key: str, seconds: float = 0.0, absent: Callable[[list[int]], bool] = lambda missing: False
    ) -> dict[int, Any]:
        """Rank -> the value that it has posted, of all that have; None if it has withdrawn it.

        Waits at most ``seconds`` for the others, or, after LOGGED_S, until ``absent`` finds that one of the missing ranks is
        not going to post.
        Without one of them, this occasion does not count: this rank's value is withdrawn, and the next that it posts belongs
        to it.  Raises as :meth:`post`.
        """
        keys, began, logged = {rank: f"{key}/{rank}" for rank in self.ranks}, time.monotonic(), False
        with reached():
            while missing := self.missing(values := self._values(keys)):
                if (waited := time.monotonic() - began) >= seconds:
                    break
                if waited > LOGGED_S:
                    if absent(missing):
                        break
                    if not logged:
                        _log.info("rank %s waits for %s", self.rank, numbers(missing))
                        logged = True
                time.sleep(_PAUSE_S)
            if missing:
                self.store.set(keys[self.rank], _WITHDRAWN)
                self.store.add(f"{key.rpartition('/')[0]}/count/{self.rank}", -1)
            elif self.store.add(f"{key}/read", 1) == len(keys):
                with contextlib.suppress(RuntimeError):  # not every store can
                    for each in (*keys.values(), f"{key}/read"):
                        self.store.delete_key(each)
        return values

    def count_apart(self, model: str, asks: Mapping[str, Any]) -> None:
        """Let ranks that wait for this one know that it places a model of class ``model`` without them.  ``asks``: the
        arguments of ``offload`` that made it so.  Does nothing if the store cannot be reached: this rank does not need it."""
        place = _apart(model, self.rank)
        with contextlib.suppress(StoreEnded), reached():
            self.store.set(f"{place}/asks", json.dumps(asks))
            self.store.add(f"{place}/count", 1)

    def placed_apart(self, model: str, ranks: Collection[int]) -> tuple[int, dict[str, Any]] | None:
        """The first of ``ranks`` that has placed a model of class ``model`` without the others more often than this rank, and
        the arguments that it passed; None if there is none.  The surplus counts once: this rank's count is raised to it."""
        with reached():
            mine = self._count(_apart(model, self.rank))
            for rank in ranks:
                place = _apart(model, rank)
                if (more := self._count(place) - mine) > 0:
                    self.store.add(f"{_apart(model, self.rank)}/count", more)
                    return rank, json.loads(self.store.get(f"{place}/asks"))
        return None

    def _count(self, place: str) -> int:
        return int(self.store.get(f"{place}/count")) if self.store.check([f"{place}/count"]) else 0

    def missing(self, values: Mapping[int, Any]) -> list[int]:
        """The ranks that have posted none of ``values``; if all have, those that have withdrawn theirs."""
        return [r for r in self.ranks if r not in values] or [r for r, value in values.items() if value is None]

    def _values(self, keys: Mapping[int, str]) -> dict[int, Any]:
        """Rank -> the value under its key, of those that have one."""
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}


def _apart(model: str, rank: int) -> str:
    """Where the store of all groups counts how often a rank has placed models of a class without other ranks."""
    return f"chunkflow/apart/{hashlib.sha256(model.encode()).hexdigest()[:16]}/{rank}"


@contextlib.contextmanager
def reached() -> Iterator[None]:
    """Around calls of a store."""
    try:
        yield
    except RuntimeError as error:
        raise StoreEnded(
            f"The store of the process group cannot be reached ({first_line(error)}). Look at the errors of the other ranks, "
            "and start all of them again."
        ) from error


def group_of(group: Any = None) -> Group | None:
    """What is known of a process group, the default one if none is given; None unless it has several real ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) < 2 or dist.get_rank() not in ranks or (backend := _real_backend(group)) is None:
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return Group(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks, timeout)


def group_to_share_in(share: Any, device: torch.device) -> Group | None:
    """The group whose ranks share weights that are placed for ``device``, or None.

    ``share``: True, False, a process group, or None for the default: the default process group, for a GPU.  If there is none
    by default, that is said where a machine has several ranks.
    Raises ChunkflowError if sharing was asked for and there is no such group.
    """
    if share is False or (share is None and device.type != "cuda"):
        return None
    if share is not None and share is not True and not (dist.is_available() and isinstance(share, dist.ProcessGroup)):
        raise ChunkflowError(
            f"share={share!r} is no process group that this rank is in: pass True, False, or such a group; of a DeviceMesh, "
            "mesh.get_group()."
        )
    group = group_of(None if share is True else share)
    if group is None and share is not None:
        raise ChunkflowError(
            "share needs a process group of several ranks, of gloo or NCCL: call torch.distributed.init_process_group "
            "first, or leave share out."
        )
    if group is None:
        _say_why_none()
    return group


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of the process group of this name."""
    return tuple(dist.get_process_group_ranks(_resolved(name)))


def ranks_together() -> int:
    """The ranks that run a model at the same time: those of this machine where their launcher says how many they are, else
    those of the default process group.  One process that stands for several is one."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake":  # of a plan without ranks
        return dist.get_world_size()
    group = group_of()
    return local_ranks(1 if group is None else len(group.ranks))


def group_named(name: str) -> Group | None:
    """What is known of the process group of this name, None unless it has several real ranks."""
    return group_of(_resolved(name))


def numbers(ranks: Collection[int]) -> str:
    """In words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _resolved(name: str) -> Any:
    # it exists in every release, but not in __all__
    return dist.distributed_c10d.__dict__["_resolve_process_group"](name)


@functools.cache  # once a process
def _say_why_none() -> None:
    """Say why the ranks of this machine do not share by default, if there are several."""
    if (several := local_ranks()) < 2:
        return
    cause = "there is no process group yet; call torch.distributed.init_process_group before offload"
    if dist.is_available() and dist.is_initialized():
        cause = f"the default process group has no gloo or NCCL for several ranks, but {dist.get_backend()}"
    _log.warning("each of the %s ranks of this machine keeps a copy of the weights, because %s", several, cause)


def _real_backend(group: Any) -> Any:
    """The backend of a group for one of its devices, None if it has no real one.  A group may have one for each device."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # none for this device
            backend = group._get_backend(torch.device(device))
            if backend.name() in _REAL:
                return backend
    return None
