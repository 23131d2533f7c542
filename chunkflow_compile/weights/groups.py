"""Process groups: their ranks, and the groups in which weights can be shared."""

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

# Seconds between two polls for the value of a rank; the value may take minutes to arrive.  The store is polled, because
# during TCPStore.wait no other thread could use the store, and Ctrl-C would have no effect.
_PAUSE_S = 0.02
# After this many seconds of waiting, the log names the missing ranks, and :meth:`Group.posted` checks whether these
# ranks will still post a value.
LOGGED_S = 5.0
# The JSON text that replaces a posted value when the rank that posted it withdraws it.
_WITHDRAWN = "null"

# Backends whose process groups have real ranks, that is, processes that can all reach the store.
_REAL = ("gloo", "nccl")


class StoreEnded(ChunkflowError):
    """Raised if the store of a process group cannot be reached."""


@dataclass(frozen=True)
class Group:
    """A process group of several ranks: its store, the number of this rank, the numbers of its ranks, and its timeout."""

    store: Any
    rank: int
    ranks: tuple[int, ...]
    timeout: timedelta

    @property
    def key(self) -> str:
        """The prefix of this group's keys in the store.  All ranks of the group have the same prefix, whereas torch's
        group names may differ between ranks."""
        return f"chunkflow/{hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]}"

    def post(self, what: str, value: Any) -> str:
        """Publish a JSON-serialisable value for the other ranks, and return the key to pass to :meth:`posted`.

        ``what``: the purpose of the value.  The n-th value that a rank posts for a purpose is matched with the n-th value
        that each other rank posts for it.
        Raises ChunkflowError if the store cannot be reached.
        """
        with reached():
            place = f"{self.key}/{hashlib.sha256(what.encode()).hexdigest()[:16]}"
            key = f"{place}/{self.store.add(f'{place}/count/{self.rank}', 1)}"
            self.store.set(f"{key}/{self.rank}", json.dumps(value))
            self.store.check([f"{key}/{self.rank}"])  # returns once the store has the value; ``set`` may return earlier
        return key

    def posted(
        self, key: str, seconds: float = 0.0, absent: Callable[[list[int]], bool] = lambda missing: False
    ) -> dict[int, Any]:
        """Return rank -> posted value for the ranks that have posted a value.  A withdrawn value is None.

        Wait at most ``seconds`` for the other ranks.  ``absent``: a function that takes the missing ranks, and returns
        whether one of them will never post; if so, the wait ends.  ``absent`` is first called after LOGGED_S seconds.
        If another rank is still missing when the wait ends, the calling rank withdraws its own value, and the next
        value that it posts replaces the withdrawn one.  Raises the same errors as :meth:`post`.
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
                with contextlib.suppress(RuntimeError):  # not every store can delete keys
                    for each in (*keys.values(), f"{key}/read"):
                        self.store.delete_key(each)
        return values

    def record_unshared(self, model: str, asks: Mapping[str, Any]) -> None:
        """Record that this rank places a model of class ``model`` without other ranks.  Ranks that wait for this rank
        then stop waiting.

        ``asks``: the arguments with which this rank called ``offload``, for error messages on the other ranks.  Errors
        of the store are ignored, because this rank does not need the store.
        """
        place = _unshared_key(model, self.rank)
        with contextlib.suppress(StoreEnded), reached():
            self.store.set(f"{place}/asks", json.dumps(asks))
            self.store.add(f"{place}/count", 1)

    def find_unshared(self, model: str, ranks: Collection[int]) -> tuple[int, dict[str, Any]] | None:
        """Find the first rank in ``ranks`` with more unshared placements of models of class ``model`` than the calling
        rank.  A placement is unshared if the rank places the model without other ranks.

        Returns the rank and the arguments that it passed to ``offload``, or None if there is no such rank.  Sets the
        calling rank's count to the count of the returned rank, so that the next call does not find the same placements.
        """
        with reached():
            mine = self._count(_unshared_key(model, self.rank))
            for rank in ranks:
                place = _unshared_key(model, rank)
                if (more := self._count(place) - mine) > 0:
                    self.store.add(f"{_unshared_key(model, self.rank)}/count", more)
                    return rank, json.loads(self.store.get(f"{place}/asks"))
        return None

    def _count(self, place: str) -> int:
        return int(self.store.get(f"{place}/count")) if self.store.check([f"{place}/count"]) else 0

    def missing(self, values: Mapping[int, Any]) -> list[int]:
        """Return the ranks without an entry in ``values``; if every rank has one, return the ranks that have withdrawn
        their values."""
        return [r for r in self.ranks if r not in values] or [r for r, value in values.items() if value is None]

    def _values(self, keys: Mapping[int, str]) -> dict[int, Any]:
        """Return rank -> the value under its key, for the keys that exist."""
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}


def _unshared_key(model: str, rank: int) -> str:
    """Return the store key under which a rank counts the models of one class that it has placed without other ranks.
    The key does not depend on the process group."""
    return f"chunkflow/apart/{hashlib.sha256(model.encode()).hexdigest()[:16]}/{rank}"


@contextlib.contextmanager
def reached() -> Iterator[None]:
    """A context for calls to a store.  It turns a RuntimeError into StoreEnded."""
    try:
        yield
    except RuntimeError as error:
        raise StoreEnded(
            f"The store of the process group cannot be reached ({first_line(error)}). Look at the errors of the other ranks, "
            "and start all of them again."
        ) from error


def group_of(group: Any = None) -> Group | None:
    """Describe a process group, by default the default group.  Returns None unless the group has several real ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) < 2 or dist.get_rank() not in ranks or (backend := _real_backend(group)) is None:
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return Group(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks, timeout)


def group_to_share_in(share: Any, device: torch.device) -> Group | None:
    """Return the group whose ranks share weights that are placed for ``device``, or None.

    ``share``: True, False, a process group, or None.  True selects the default process group, False selects no group.
    None selects the default process group if ``device`` is a GPU, and otherwise no group.  If None selects a group that
    cannot be used although the machine runs several ranks, the reason is logged.
    Raises ChunkflowError if True or a process group selects a group that cannot be used, or if ``share`` has another
    type.
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
    """Return the ranks of the process group with this name."""
    return tuple(dist.get_process_group_ranks(_resolved(name)))


def ranks_together() -> int:
    """Return how many ranks run a model at the same time.

    With a fake process group, the result is the number of ranks that this group emulates.  Otherwise it is the number of
    ranks on this machine if the launcher provides this number, or else the number of ranks of the default process
    group.
    """

    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake":  # used for planning only
        return dist.get_world_size()
    group = group_of()
    return local_ranks(1 if group is None else len(group.ranks))


def group_named(name: str) -> Group | None:
    """Describe the process group with this name.  Returns None unless the group has several real ranks."""
    return group_of(_resolved(name))


def numbers(ranks: Collection[int]) -> str:
    """Format rank numbers for messages: "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _resolved(name: str) -> Any:
    # every release of torch has this function, but __all__ does not list it
    return dist.distributed_c10d.__dict__["_resolve_process_group"](name)


@functools.cache  # to log the reason only once per process
def _say_why_none() -> None:
    """If this machine runs several ranks, log why they do not share weights by default."""
    if (several := local_ranks()) < 2:
        return
    cause = "there is no process group yet; call torch.distributed.init_process_group before offload"
    if dist.is_available() and dist.is_initialized():
        cause = f"the default process group has no gloo or NCCL for several ranks, but {dist.get_backend()}"
    _log.warning("each of the %s ranks of this machine keeps a copy of the weights, because %s", several, cause)


def _real_backend(group: Any) -> Any:
    """Return a backend of a process group that connects real ranks (see ``_REAL``), or None.

    A group may have one backend per device type.
    """
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # the group has no backend for this device
            backend = group._get_backend(torch.device(device))
            if backend.name() in _REAL:
                return backend
    return None
