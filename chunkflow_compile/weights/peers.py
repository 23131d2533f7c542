"""Peers: the ranks of a process group that run on this machine and can share memory.

They find each other through the store of the process group, and then talk over sockets, which say at once that a process
has ended.  The sockets are abstract: they have no name in a file system, and nothing is left of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError

from .host_memory import near_cpus
from .limits import local_ranks
from .meeting import Meeting, meeting

_log = logging.getLogger(__name__)

_KEY = "chunkflow/peers"
_GIVEN_UP = "given up"
# For sockets without a timeout.
_SECONDS = 600.0
_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Peers:
    """The ranks of this machine that share memory, in their order; the first one leads.

    Every method is called by all of them, in the same order.  Raises ChunkflowError when another rank has ended or failed.
    """

    def __init__(self, rank: int, ranks: Sequence[int], links: Mapping[int, socket.socket]) -> None:
        """``links``: of the leader to each other rank, and of each other rank to the leader."""
        self.rank = rank
        self.ranks = tuple(ranks)
        self._links = dict(links)

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, at every rank.  They must be such that JSON can hold."""
        if not self.leads:
            self._send(self.ranks[0], value)
            found: list[Any] = self._receive(self.ranks[0])
            return found
        mine = json.loads(json.dumps(value))  # as the others see it
        values = [mine if rank == self.rank else self._receive(rank) for rank in self.ranks]
        self.say(values)
        return values

    def say(self, value: Any) -> None:
        """Tell the other ranks a value; the leader calls this, and they call :meth:`hear`."""
        for rank in self._links:
            self._send(rank, value)

    def hear(self) -> Any:
        return self._receive(self.ranks[0])

    def hand(self, descriptor: int) -> None:
        """Hand a file to the other ranks, which call :meth:`take`."""
        self.say(None)  # or why there is none
        for rank, link in self._links.items():
            try:
                socket.send_fds(link, [b"f"], [descriptor])
            except OSError as error:
                raise _ended(rank, error) from error

    def take(self) -> int:
        """The file that the leader hands over, which the caller closes."""
        self.hear()
        try:
            _, descriptors, _, _ = socket.recv_fds(self._links[self.ranks[0]], 1, 1)
        except OSError as error:
            raise _ended(self.ranks[0], error) from error
        if not descriptors:
            raise _ended(self.ranks[0], None)
        os.set_inheritable(descriptors[0], False)  # recv_fds takes no flag for it
        return descriptors[0]

    @property
    def seconds(self) -> float:
        """How long one waits for another."""
        return min((s for link in self._links.values() if (s := link.gettimeout())), default=_SECONDS)

    def close(self, error: BaseException | None = None) -> None:
        """Close the sockets.  ``error``: why this rank cannot go on, which the others are told."""
        for rank, link in self._links.items():
            if error is not None:
                with contextlib.suppress(ChunkflowError):
                    self._send(rank, f"rank {self.rank}: {error}", failed=True)
            link.close()
        self._links.clear()

    def _send(self, rank: int, value: Any, failed: bool = False) -> None:
        text = json.dumps({"failed" if failed else "value": value}).encode()
        try:
            self._links[rank].sendall(_LENGTH.pack(len(text)) + text)
        except OSError as error:
            while not failed and isinstance(error, (BrokenPipeError, ConnectionResetError)):
                self._receive(rank)  # it may have said why; this raises in any case
            raise _ended(rank, error) from error

    def _receive(self, rank: int) -> Any:
        try:
            (length,) = _LENGTH.unpack(self._exactly(rank, _LENGTH.size))
            message = json.loads(self._exactly(rank, length))
        except OSError as error:
            raise _ended(rank, error) from error
        if "failed" in message:
            raise ChunkflowError(f"The weights are not placed, because another rank failed. {message['failed']}")
        return message["value"]

    def _exactly(self, rank: int, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            part = self._links[rank].recv(min(length - len(found), 1 << 20))
            if not part:
                raise _ended(rank, None)
            found += part
        return bytes(found)


def peers_of(share: Any, device: torch.device) -> Peers | None:
    """The ranks to share weights with that are placed for ``device``; None for none.

    ``share``: True, False, a process group, or None for the default: the default process group, for a GPU.
    Raises ChunkflowError if sharing was asked for and there is no such group, or if a rank of it is absent.
    """
    if share is False or (share is None and device.type != "cuda"):
        return None
    found = meeting(_group(share))
    if found is None:
        if share is None:
            _say_why_none()
        else:
            raise ChunkflowError(
                "share needs a process group of several ranks, of gloo or NCCL: call torch.distributed.init_process_group "
                "first, or leave share out."
            )
        return None
    # each memory node has its own copy: a GPU reads the other node's memory more slowly
    near = near_cpus(device)
    return meet(found, ",".join(map(str, sorted(near))))


def _group(share: Any) -> Any:
    """The process group to share in, None for the default one.  Raises ChunkflowError if ``share`` is no such thing."""
    if share is None or share is True:
        return None
    if not dist.is_available() or not isinstance(share, dist.ProcessGroup):
        raise ChunkflowError(
            f"share={share!r} is no process group that this rank is in: pass True, False, or such a group; of a DeviceMesh, "
            "mesh.get_group()."
        )
    return share


@functools.cache  # once a process
def _say_why_none() -> None:
    """Say why the ranks of this machine do not share by default, if there are several."""
    if (several := local_ranks()) < 2:
        return
    cause = "there is no process group yet; call torch.distributed.init_process_group before offload"
    if dist.is_available() and dist.is_initialized():
        cause = f"the default process group has no gloo or NCCL for several ranks, but {dist.get_backend()}"
    _log.warning("each of the %s ranks of this machine keeps a copy of the weights, because %s", several, cause)


def stay_away(share: Any, device: torch.device, error: BaseException) -> None:
    """Tell the ranks that call :func:`peers_of` why this one does not.  Does not wait for them."""
    if share is False or (share is None and device.type != "cuda"):
        return
    with contextlib.suppress(RuntimeError, ChunkflowError):  # the store has ended too, or share is no group
        if (found := meeting(_group(share))) is not None:
            found.store.set(f"{_next(found)}/{found.rank}", json.dumps({"failed": f"{type(error).__name__}: {error}"}))


def _next(found: Meeting) -> str:
    """The key of the next time that these ranks meet.  Each counts for itself, as all of them come each time.

    A rank that was absent skips the times that the others have given up, or they would never meet again.
    """
    while True:
        number = found.store.add(f"{_KEY}/{found.key}/count/{found.rank}", 1)
        key = f"{_KEY}/{found.key}/{number}"
        if not found.store.check([f"{key}/{_GIVEN_UP}"]):
            return key


def meet(found: Meeting, near: str = "") -> Peers | None:
    """The peers of this rank, None if there are none.  All ranks of the meeting must call it.

    ``near``: the memory node to share on; ranks on others share among themselves.
    Raises ChunkflowError, with the numbers of the ranks, if some do not call it before the timeout.
    """
    key = _next(found)
    listener, name = _listener()
    with listener:
        mine = {"machine": _machine(), "reach": f"{os.getuid()} {_network()}", "near": near, "name": name}
        records = _exchange(found, key, mine)
        ranks = _sharing(found, records)
        if len(ranks) < 2:
            return None
        seconds = found.timeout.total_seconds()
        if found.rank != ranks[0]:
            link = _connected(found.rank, ranks[0], records[ranks[0]]["name"], seconds)
            return Peers(found.rank, ranks, {ranks[0]: link})
        return Peers(found.rank, ranks, _accepted(listener, ranks[1:], seconds))


def _sharing(found: Meeting, records: Mapping[int, Mapping[str, str]]) -> list[int]:
    """The ranks that share with this one.  Says why others of this machine do not."""
    mine = records[found.rank]
    here = [rank for rank in found.ranks if records[rank]["machine"] == mine["machine"]]
    reached = [rank for rank in here if records[rank]["reach"] == mine["reach"]]
    ranks = [rank for rank in reached if records[rank]["near"] == mine["near"]]
    if beside := [rank for rank in here if rank not in reached]:
        _log.warning(
            "rank %s shares no weights with %s on this machine: another user, or another network name space",
            found.rank,
            _numbers(beside),
        )
    if elsewhere := [rank for rank in reached if rank not in ranks]:
        alone = len(ranks) < 2
        _log.log(
            logging.WARNING if alone else logging.INFO,
            "rank %s %s: %s %s near other memory nodes of this machine, and each node has a copy",
            found.rank,
            "keeps weights of its own" if alone else f"shares its weights with {_numbers(set(ranks) - {found.rank})}",
            _numbers(elsewhere),
            "are" if len(elsewhere) > 1 else "is",
        )
    return ranks


def _exchange(found: Meeting, key: str, mine: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """What each rank says of itself."""
    keys = [f"{key}/{rank}" for rank in found.ranks]
    found.store.set(f"{key}/{found.rank}", json.dumps(mine))
    try:
        found.store.wait(keys, found.timeout)
    except RuntimeError as error:
        absent = [rank for rank, k in zip(found.ranks, keys, strict=True) if not found.store.check([k])]
        found.store.set(f"{key}/{_GIVEN_UP}", "")
        raise ChunkflowError(
            f"{_numbers(absent).capitalize()} did not place the model within {found.timeout.total_seconds():.0f} s: with "
            "share, every rank of the group calls offload. Pass share=False to place it on this rank alone, or share=group "
            "with the ranks that place it."
        ) from error
    records = {rank: json.loads(found.store.get(k)) for rank, k in zip(found.ranks, keys, strict=True)}
    for rank, record in records.items():
        if "failed" in record:
            cause = f"because rank {rank} failed: {str(record['failed']).rstrip('.')}"
            raise ChunkflowError(f"The weights are not placed, {cause}.")
    return records


def _listener() -> tuple[socket.socket, str]:
    """A listening socket, and its name."""
    name = f"chunkflow-{os.urandom(16).hex()}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(f"\0{name}")
    made.listen(128)
    return made, name


def _connected(rank: int, leader: int, name: str, seconds: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(seconds)
    try:
        link.connect(f"\0{name}")
        if (user := _user(link)) != os.getuid():
            raise ChunkflowError(
                f"Rank {leader} has ended, and user {user} answers in its place. Start all ranks again, as one user."
            )
        link.sendall(_LENGTH.pack(rank))
    except BaseException as error:
        link.close()
        if not isinstance(error, OSError):
            raise
        raise _ended(leader, error) from error
    return link


def _accepted(listener: socket.socket, ranks: Sequence[int], seconds: float) -> dict[int, socket.socket]:
    """The links to ``ranks``.  A process of another user is turned away: an abstract name can be reached by anyone."""
    links: dict[int, socket.socket] = {}
    listener.settimeout(seconds)
    while len(links) < len(ranks):
        absent = [rank for rank in ranks if rank not in links]
        try:
            link, _ = listener.accept()
            link.settimeout(seconds)
            if (user := _user(link)) != os.getuid():
                link.close()
                _log.warning("a process of user %s asked for the weights, and was turned away", user)
                continue
            (rank,) = _LENGTH.unpack(link.recv(_LENGTH.size, socket.MSG_WAITALL))
            if rank in absent:
                links[rank] = link
        except (OSError, struct.error) as error:
            for link in links.values():
                link.close()
            raise _ended(absent[0], error) from error
    return {rank: links[rank] for rank in ranks}


def _user(link: socket.socket) -> int:
    """The user of the process at the other end, as the kernel says."""
    told = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


def _ended(rank: int, error: Exception | None) -> ChunkflowError:
    cause = "did not answer in time" if isinstance(error, TimeoutError) else "has ended"
    return ChunkflowError(
        f"Rank {rank} {cause} while the weights were placed. Look at its own error, and start all ranks again."
    )


def _numbers(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _machine() -> str:
    """The same for all containers of one running machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _network() -> str:
    """The network name space, which abstract sockets do not leave."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
