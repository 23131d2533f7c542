"""The node: the ranks of a process group that run on this machine and share its memory.

They find each other and talk through the store of the process group.  A file is handed over as ``/proc/PID/fd/N`` of the
first rank, so that it needs no name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError, first_line

from .groups import Group, group_to_share_in, numbers, reached
from .host_memory import near_cpus
from .mapping import PAGE, Descriptor, identity_of, memory_file, reopened

_log = logging.getLogger(__name__)

# Pauses between two looks at the store, in seconds.
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05


class _AbsentError(ChunkflowError):
    """``ranks`` did not come in time."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(
            f"{numbers(ranks).capitalize()} did not answer in time while the weights were placed. Look at the errors there, "
            "and start all ranks again."
        )
        self.ranks = [*ranks]


class _NoWayError(ChunkflowError):
    """Ranks cannot open a file of another."""


class Node:
    """The ranks of a machine that share memory, in their order; the first one leads.

    All of them call its methods in the same order.  Raises ChunkflowError when another rank has ended or failed.
    """

    def __init__(self, group: Group, key: str, processes: Mapping[int, Sequence[Any]] | None = None) -> None:
        """``group``: only these ranks.  ``key``: of what they keep in the store.  ``processes``: the number and the begin of
        each, as far as they are known."""
        self.rank = group.rank
        self.ranks = group.ranks
        self.seconds = group.timeout.total_seconds()  # how long one waits for another
        self._store = group.store
        self.key = key
        self._processes = processes or {}
        self._rounds = self._steps = 0
        self._open = True

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, at every rank.  They must be such that JSON can hold."""
        keys = {rank: f"{self._rounds}/{rank}" for rank in self.ranks}
        read, self._rounds = f"{self._rounds}/read", self._rounds + 1
        missing = [*self.ranks]

        def awaited() -> Sequence[int]:
            missing[:] = [rank for rank in missing if not self._store.check([f"{self.key}/{keys[rank]}"])]
            return missing

        with _reached():
            self._store.set(f"{self.key}/{keys[self.rank]}", json.dumps(value))
        self._until(awaited)
        with _reached():
            values = [json.loads(self._store.get(f"{self.key}/{key}")) for key in keys.values()]
        if self._add(read, 1) == len(self.ranks):
            self._delete(*keys.values(), read)
        return values

    def step(self) -> None:
        """The leader has done one more step."""
        self._steps = self._add("steps", 1)

    def wait(self, steps: int) -> None:
        """Wait until the leader has done ``steps``."""

        def awaited() -> Sequence[int]:
            if self._steps < steps:
                self._steps = self._add("steps", 0)
            return self.ranks[:1] if self._steps < steps else ()

        self._until(awaited)

    def share(self, made: Descriptor | None) -> Descriptor:
        """A file that the leader has ``made``, opened at every rank; the others pass None."""
        place = None if made is None else [os.getpid(), made.number, *identity_of(os.fstat(made.number))]
        process, number, *identity = self.gather(place)[0]
        cause = ""
        if made is None:
            try:
                made = reopened(f"/proc/{process}/fd/{number}", (identity[0], identity[1]))
            except OSError as error:
                cause = error.strerror or str(error)
        causes = self.gather(cause)
        if made is None or any(causes):
            raise _NoWayError(
                f"A file of rank {self.ranks[0]} cannot be opened in /proc by the other ranks of this machine "
                f"({max(causes)}). Pass share=False."
            )
        return made

    def close(self, error: BaseException | None = None) -> None:
        """Leave.  ``error``: why this rank cannot go on, which the others are told.  The last one empties the store."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(RuntimeError):  # the store may have ended too
            if error is not None and self._failure() is None:
                cause = str(error) if isinstance(error, ChunkflowError) else first_line(error)
                absent = error.ranks if isinstance(error, _AbsentError) else []
                self._store.set(f"{self.key}/failed", json.dumps({"rank": self.rank, "cause": cause, "absent": absent}))
            if self._add("closed", 1) == len(self.ranks):
                # where one has failed, they are at most a round apart
                rounds = range(max(0, self._rounds - 2), self._rounds + 1)
                self._delete(*(f"{n}/{rank}" for n in rounds for rank in (*self.ranks, "read")))
                self._delete("failed", "steps", "closed")

    def _until(self, awaited: Callable[[], Sequence[int]]) -> None:
        """Wait until no rank is ``awaited`` any more."""
        deadline, pause = time.monotonic() + self.seconds, _FIRST_PAUSE
        while True:
            with _reached():
                if not (late := awaited()):
                    return
            failure = self._failure() or next((_ended(r) for r in late if not self._lives(r)), None)
            if failure is not None:
                with _reached():
                    if not awaited():  # it was the last that it did
                        return
                raise failure
            if time.monotonic() > deadline:
                raise _AbsentError(late)
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_PAUSE)

    def _failure(self) -> ChunkflowError | None:
        """What a rank has failed with that has told it."""
        failed = f"{self.key}/failed"
        with _reached():
            if not self._store.check([failed]):
                return None
            report = json.loads(self._store.get(failed))
        if report["absent"]:
            return _AbsentError(report["absent"])
        return ChunkflowError(
            f"The weights are not placed, because rank {report['rank']} failed: {report['cause'].rstrip('.')}."
        )

    def _lives(self, rank: int) -> bool:
        """Whether the process of a rank lives, as far as this one can see."""
        process, began = self._processes.get(rank, (0, None))
        return began is None or _began(process) == began

    def _add(self, key: str, number: int) -> int:
        with _reached():
            return int(self._store.add(f"{self.key}/{key}", number))

    def _delete(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(RuntimeError):  # not every store can
                self._store.delete_key(f"{self.key}/{key}")


def node_of(share: Any, device: torch.device) -> Node | None:
    """The ranks of this machine to share weights with, see :func:`group_to_share_in`; None for none.

    Raises ChunkflowError also if a rank of the group is absent.
    """
    if (found := group_to_share_in(share, device)) is None:
        return None
    # each memory node has its own copy: a GPU reads the other node's memory more slowly
    near = near_cpus(device)
    return meet(found, ",".join(map(str, sorted(near))))


def stay_away(share: Any, device: torch.device, error: BaseException) -> None:
    """Tell the ranks that call :func:`node_of` why this one does not.  Does not wait for them."""
    with contextlib.suppress(RuntimeError):  # the store has ended too, or there is no group
        if (found := group_to_share_in(share, device)) is not None:
            _next(found).close(error)


def meet(found: Group, near: str = "") -> Node | None:
    """The node of this rank, None if it shares with no other.  All ranks of the group must call it.

    ``near``: the memory node to share on; ranks on others share among themselves.
    Raises ChunkflowError, with the numbers of the ranks, if some do not call it before the timeout.
    """
    everyone = _next(found)
    try:
        with everyone:
            mine = {
                "machine": _machine(),
                "reach": _reach(),
                "near": near,
                "process": [os.getpid(), _began(os.getpid())],
            }
            records = dict(zip(found.ranks, everyone.gather(mine), strict=True))
    except _AbsentError as error:
        raise ChunkflowError(
            f"{numbers(error.ranks).capitalize()} did not place the model within {everyone.seconds:.0f} s: with "
            "share, every rank of the group calls offload. Pass share=False to place it on this rank alone, or share=group "
            "with the ranks that place it."
        ) from error
    ranks = _sharing(found, records)
    if len(ranks) < 2:
        return None
    processes = {rank: records[rank]["process"] for rank in ranks}
    node = Node(replace(found, ranks=ranks), f"{everyone.key}/{ranks[0]}", processes)
    try:
        node.share(memory_file("chunkflow-trial", PAGE) if node.leads else None)
    except _NoWayError as error:
        node.close()
        _log.warning("each of %s keeps weights of its own: %s", numbers(ranks), error)
        return None
    except BaseException as error:
        node.close(error)
        raise
    return node


def _next(found: Group) -> Node:
    """All ranks of a group, the next time that they meet.  Each counts for itself, as all of them come each time.

    A rank that was absent skips the times that the others have given up, or they would never meet again.
    """
    while True:
        with _reached():
            number = found.store.add(f"{found.key}/count/{found.rank}", 1)
        everyone = Node(found, f"{found.key}/{number}")
        if not isinstance(everyone._failure(), _AbsentError):
            return everyone
        everyone.close()


def _sharing(found: Group, records: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks that share with this one.  Says why others of this machine do not."""
    mine = records[found.rank]
    here = [rank for rank in found.ranks if records[rank]["machine"] == mine["machine"]]
    reached = [rank for rank in here if records[rank]["reach"] == mine["reach"]]
    ranks = [rank for rank in reached if records[rank]["near"] == mine["near"]]
    if beside := [rank for rank in here if rank not in reached]:
        _log.warning(
            "rank %s shares no weights with %s on this machine: another user, or a container with other process numbers "
            "(--pid)",
            found.rank,
            numbers(beside),
        )
    if elsewhere := [rank for rank in reached if rank not in ranks]:
        alone = len(ranks) < 2
        _log.log(
            logging.WARNING if alone else logging.INFO,
            "rank %s %s: %s %s near other memory nodes of this machine, and each node has a copy",
            found.rank,
            "keeps weights of its own" if alone else f"shares its weights with {numbers(set(ranks) - {found.rank})}",
            numbers(elsewhere),
            "are" if len(elsewhere) > 1 else "is",
        )
    return tuple(ranks)


def _reached() -> contextlib.AbstractContextManager[None]:
    return reached("the weights are placed")


def _ended(rank: int) -> ChunkflowError:
    return ChunkflowError(
        f"Rank {rank} has ended while the weights were placed. Look at its own error, and start all ranks again."
    )


def _machine() -> str:
    """The same for all containers of one running machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _reach() -> str:
    """The user, and the name space of process numbers: a file of another process can be opened where both are the same."""
    try:
        return f"{os.getuid()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.getuid()}"


def _began(process: int) -> str | None:
    """When a process began, None if it has ended: its number may be another one's by now."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
