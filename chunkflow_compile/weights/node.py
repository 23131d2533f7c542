"""The node: the ranks of a process group that run on this machine and share its memory.

These ranks find each other through the store of the process group, and then exchange values in rounds (``rounds.py``).  A
rank passes an open file to the other ranks as the path ``/proc/PID/fd/N``, which exists even if the file has no name.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .groups import Group, group_to_share_in, numbers
from .host_memory import near_cpus
from .mapping import PAGE, Descriptor, identity_of, memory_file, reopened
from .rounds import RankFailed, Rounds, cause_of, failed, process_of

_log = logging.getLogger(__name__)

# The purpose (see :meth:`Group.post`) of the values that ranks post when they place a model.
_PLACING = "placing"


class Node(Rounds):
    """The ranks of a machine that share memory, in rank order.  They can pass each other open files."""

    def share(self, file: Descriptor | None) -> Descriptor:
        """Open a file of the leading rank on every rank.  The leader passes the file; the other ranks pass None."""
        (shared,) = self.exchange(file).values()
        return shared

    def exchange(self, file: Descriptor | None) -> dict[int, Descriptor]:
        """Open the files of all ranks on every rank, and return them as rank -> file.  A rank without a file passes
        None, and is not in the result.

        Raises ChunkflowError on all ranks if one of them cannot open the file of another.
        """
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


def node_of(
    share: Any, device: torch.device, asks: Mapping[str, Any] | None = None, model: str | None = None
) -> Node | None:
    """Return the ranks of this machine that share weights with this rank, or None if there are no others; see
    :func:`group_to_share_in`.

    ``asks``, ``model``: as in :func:`rendezvous`.  Raises the same errors as :func:`group_to_share_in` and
    :func:`rendezvous`.
    """
    if (group := group_to_share_in(share, device)) is None:
        return None
    # ranks share within a NUMA node only, because a GPU reads the memory of another NUMA node more slowly
    near = near_cpus(device)
    return rendezvous(group, ",".join(map(str, sorted(near))), asks, model)


def report_absence(group: Group, error: BaseException) -> None:
    """Report to the ranks that call :func:`rendezvous` why this rank does not call it.  Does not wait for the other
    ranks."""
    group.post(_PLACING, {"failed": cause_of(error)})


def rendezvous(
    group: Group, near: str = "", asks: Mapping[str, Any] | None = None, model: str | None = None
) -> Node | None:
    """Return the node of this rank, or None if no other rank can share weights with this rank.  All ranks of the group
    must call this.

    ``near``: a text that identifies the NUMA node; only ranks that pass the same text share weights.  ``asks``:
    arguments of ``offload``, by name, that must be equal on all ranks.  ``model``: the class of the model that is
    placed.  Raises ChunkflowError, which names the ranks, if some ranks do not call this before the timeout, pass
    different ``asks``, or place a model of this class without the other ranks.
    """
    place = {"machine": _machine(), "namespace": _pid_namespace(), "near": near}
    key = group.post(_PLACING, {**place, "process": process_of(os.getpid()), "asks": asks or {}})
    seconds = group.timeout.total_seconds()
    apart: list[tuple[int, dict[str, Any]]] = []

    def has_gone_apart(missing: list[int]) -> bool:
        if model is not None and (found := group.find_unshared(model, missing)) is not None:
            apart.append(found)
        return bool(apart)

    records = group.posted(key, seconds, has_gone_apart)
    if apart and asks:
        (other, theirs), *_ = apart
        check_alike((group.rank, other), [asks, theirs])
    if absent := group.missing(records):
        raise ChunkflowError(
            f"{numbers(absent).capitalize()} did not place the model within {seconds:.0f} s: with share, every rank of the "
            "group calls offload. Pass share=False to place it on this rank only, or share=group with the ranks that "
            "place it."
        )
    for rank, record in records.items():
        if (cause := record.get("failed")) is not None:
            raise failed("placed", rank, cause)
    check_alike(group.ranks, [records[rank]["asks"] for rank in group.ranks])
    ranks = _sharing(group, records)
    if len(ranks) < 2:
        return None
    node = Node(group, ranks, key, {rank: records[rank]["process"] for rank in ranks})
    try:
        node.share(memory_file("chunkflow-trial", PAGE) if node.leads else None)
    except RankFailed:
        node.close()
        raise
    except ChunkflowError as error:
        node.close()
        _log.warning("each of %s keeps weights of its own: %s", numbers(ranks), error)
        return None
    except BaseException as error:
        node.close(error)
        raise
    return node


def _sharing(group: Group, records: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """Return this rank and the ranks that share weights with it.  Log why other ranks of this machine do not share with
    it."""
    places = {rank: [record[of] for of in ("machine", "namespace", "near")] for rank, record in records.items()}
    mine = places[group.rank]
    here = [rank for rank in group.ranks if places[rank][0] == mine[0]]
    ranks = [rank for rank in here if places[rank] == mine]
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


def check_alike(ranks: Sequence[int], said: Sequence[Mapping[str, Any]]) -> None:
    """Raise the same ChunkflowError on every rank if any rank in ``ranks`` has different arguments from the first rank.

    ``said``: for each rank, a mapping of argument names to values.
    """
    for rank, others in zip(ranks, said, strict=True):
        for name, value in others.items():
            if value != said[0].get(name):
                raise ChunkflowError(
                    f"Rank {rank} places its model with {name}={value!r}, and rank {ranks[0]} with "
                    f"{name}={said[0].get(name)!r}: give all ranks the same model and options."
                )


def _machine() -> str:
    """Return an identifier of this machine, which is equal in all of its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _pid_namespace() -> str:
    """Return the user id and the PID namespace of this process.  If both are equal for two processes, each process can
    open the files of the other."""
    try:
        return f"{os.getuid()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getuid()}"
