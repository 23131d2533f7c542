"""The node: the ranks of a process group that run on this machine and share its memory.

They find each other through the store of the process group, and then meet in a gloo group of their own, which ends with the
placement.  A file is handed over as ``/proc/PID/fd/N`` of the first rank, so that it needs no name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError, first_line

from .groups import Group, group_to_share_in, numbers
from .host_memory import near_cpus
from .mapping import PAGE, Descriptor, identity_of, memory_file, reopened

_log = logging.getLogger(__name__)

# What ranks post in the store of their group when they place a model.
_PLACING = "placing"


class Node:
    """The ranks of a machine that share memory, in their order; the first one leads.

    All of them call its methods in the same order.  Raises ChunkflowError when another rank has ended or failed.
    """

    def __init__(self, group: Group, ranks: tuple[int, ...], key: str) -> None:
        """``ranks``: those of the group that meet.  ``key``: in its store, of this occasion."""
        self.rank = group.rank
        self.ranks = ranks
        # not by new_group: its names for a group are other ones on ranks with other groups, and it uses them again
        store, place = dist.distributed_c10d.PrefixStore(f"{key}/{ranks[0]}", group.store), ranks.index(group.rank)
        with self._lost_ranks():
            self._gloo: Any = dist.ProcessGroupGloo(store, place, len(ranks), group.timeout)

    @property
    def meets(self) -> bool:
        """Whether no rank has failed or left, as far as this one has heard."""
        return self._gloo is not None

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def gather(self, value: Any, error: Exception | None = None) -> list[Any]:
        """The values of all ranks, at every rank.  They must be such that JSON can hold.

        ``error``: why this rank cannot go on.  All ranks raise if one has any, and cannot meet again.
        """
        report = json.dumps((value, None if error is None else _cause(error)))
        mine = torch.frombuffer(bytearray(report.encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._gathered(torch.tensor([mine.numel()], device="cpu"))]
        padded = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()))
        reports = [bytes(each[:size].tolist()) for each, size in zip(self._gathered(padded), sizes, strict=True)]
        values, causes = zip(*map(json.loads, reports), strict=True)
        for rank, cause in zip(self.ranks, causes, strict=True):
            if cause is not None:
                self._gloo = None
                raise _failed(rank, cause)
        return [*values]

    def share(self, file: Descriptor | None) -> Descriptor:
        """A file of the leader's, opened at every rank; the others pass None."""
        (shared,) = self.exchange(file).values()
        return shared

    def exchange(self, file: Descriptor | None) -> dict[int, Descriptor]:
        """Rank -> the file that it passes, opened at every rank, of those that pass one."""
        place = None if file is None else [os.getpid(), file.number, *identity_of(os.fstat(file.number))]
        opened, cause = {} if file is None else {self.rank: file}, ""
        places = {rank: found for rank, found in zip(self.ranks, self.gather(place), strict=True) if found is not None}
        for rank, (process, number, *identity) in places.items():
            if rank != self.rank and not cause:
                try:
                    opened[rank] = reopened(f"/proc/{process}/fd/{number}", (identity[0], identity[1]))
                except OSError as error:
                    cause = f"rank {rank}: {error.strerror or error}"
        if cause := max(self.gather(cause)):
            raise ChunkflowError(
                f"A file of a rank of this machine cannot be opened in /proc by the others ({cause}). Pass share=False."
            )
        return {rank: opened[rank] for rank in places}

    def close(self, error: BaseException | None = None) -> None:
        """Leave.  ``error``: why this rank cannot go on, which the others raise when they meet next.

        An interrupted rank does not wait for that: they see it as one that has ended.
        """
        if self.meets and isinstance(error, Exception):
            with contextlib.suppress(ChunkflowError):  # its own error, or that of another rank, which says less
                self.gather(None, error)
        self._gloo = None

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of each rank, of equal shapes."""
        tensors = [torch.empty_like(mine) for _ in self.ranks]
        with self._lost_ranks():
            self._gloo.allgather([tensors], [mine]).wait()
        return tensors

    @contextlib.contextmanager
    def _lost_ranks(self) -> Iterator[None]:
        """Around what needs all ranks."""
        try:
            yield
        except RuntimeError as error:
            self._gloo = None
            raise ChunkflowError(
                f"One of {numbers(self.ranks)} has ended, or does not answer, while the weights were placed (seen by rank "
                f"{self.rank}: {first_line(error)}). Look at the errors of these ranks, and start all of them again."
            ) from error


def node_of(share: Any, device: torch.device) -> Node | None:
    """The ranks of this machine to share weights with, see :func:`group_to_share_in`; None for none.

    Raises ChunkflowError also if a rank of the group is absent.
    """
    if (group := group_to_share_in(share, device)) is None:
        return None
    # each memory node has its own copy: a GPU reads the other node's memory more slowly
    near = near_cpus(device)
    return rendezvous(group, ",".join(map(str, sorted(near))))


def report_absence(group: Group, error: BaseException) -> None:
    """Tell the ranks that call :func:`rendezvous` why this one does not.  Does not wait for them."""
    group.post(_PLACING, {"failed": _cause(error)})


def rendezvous(group: Group, near: str = "") -> Node | None:
    """The node of this rank, None if it shares with no other.  All ranks of the group must call it.

    ``near``: the memory node to share on; ranks on others share among themselves.
    Raises ChunkflowError, with the numbers of the ranks, if some do not call it before the timeout.
    """
    key = group.post(_PLACING, {"machine": _machine(), "namespace": _pid_namespace(), "near": near})
    seconds = group.timeout.total_seconds()
    records = group.posted(key, seconds)
    if absent := group.missing(records):
        raise ChunkflowError(
            f"{numbers(absent).capitalize()} did not place the model within {seconds:.0f} s: with share, every rank of the "
            "group calls offload. Pass share=False to place it on this rank only, or share=group with the ranks that "
            "place it."
        )
    for rank, record in records.items():
        if (cause := record.get("failed")) is not None:
            raise _failed(rank, cause)
    ranks = _sharing(group, records)
    if len(ranks) < 2:
        return None
    node = Node(group, ranks, key)
    try:
        node.share(memory_file("chunkflow-trial", PAGE) if node.leads else None)
    except ChunkflowError as error:
        if not node.meets:
            raise
        node.close()
        _log.warning("each of %s keeps weights of its own: %s", numbers(ranks), error)
        return None
    except BaseException as error:
        node.close(error)
        raise
    return node


def _sharing(group: Group, records: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks that share with this one.  Says why others of this machine do not."""
    mine = records[group.rank]
    here = [rank for rank in group.ranks if records[rank]["machine"] == mine["machine"]]
    ranks = [rank for rank in here if records[rank] == mine]
    if others := {*here} - {*ranks}:
        single = len(ranks) < 2
        _log.log(
            logging.WARNING if single else logging.INFO,
            "rank %s %s: on this machine, %s are near other memory nodes, each of which has a copy, or of another user, or "
            "in a container with other process numbers (--pid)",
            group.rank,
            "keeps weights of its own" if single else f"shares its weights with {numbers({*ranks} - {group.rank})}",
            numbers(others),
        )
    return tuple(ranks)


def _failed(rank: int, cause: str) -> ChunkflowError:
    return ChunkflowError(f"The weights are not placed, because rank {rank} failed: {cause.rstrip('.')}.")


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, ChunkflowError) else first_line(error)


def _machine() -> str:
    """The same for all containers of one running machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _pid_namespace() -> str:
    """The user, and the name space of process numbers: a file of another process can be opened where both are the same."""
    try:
        return f"{os.getuid()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getuid()}"
