"""The node: the ranks of a process group that run on this machine and share its memory.

They find each other through the store of the process group, and then meet in rounds, in that store too.  A file is passed
as ``/proc/PID/fd/N`` of the first rank, so that it needs no name.

Note: a round
-------------
Each rank contributes one record: a value, or why it has none (it failed, or it left).  The first rank that can decide the
round writes the decision, once, by an atomic operation of the store; all ranks follow it:

* every rank has a value: all of them get all values;
* a rank failed, or its process has ended: all raise one error, which names the rank and its cause;
* a rank left, or is late: all end their rounds, see :meth:`Node.agree`.

A rank that fails or leaves does not wait for the others.  They follow its record when they come to the round, and the rank
itself goes on with the next round.  Records are JSON.  No thread and no connection belongs to a node, so a forked child may
drop one; it cannot take part in rounds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError, first_line

from .groups import Group, StoreEnded, group_to_share_in, numbers, reached
from .host_memory import near_cpus
from .mapping import PAGE, Descriptor, identity_of, memory_file, reopened

_log = logging.getLogger(__name__)

# What ranks post in the store of their group when they place a model.
_PLACING = "placing"


# Between two looks at a round: at first, and at most.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
# Between two looks at whether the processes of missing ranks still run.
_LIVENESS_S = 0.2
# A rank that is waited for is named in the log after so long.
_LOGGED_S = 5.0
# The records of a rank in a round, and the decisions on it.
_NOTHING, _VALUE, _FAILED, _ENDED, _LEFT, _LATE = "", "value", "failed", "ended", "left", "late"
# The key of the decision.
_DECISION = "decision"


class RankFailed(ChunkflowError):
    """Raised on the ranks that wait for a rank that failed or has ended: all ranks know it already."""


class Left(ChunkflowError):
    """Raised on the ranks that wait for a rank that has left the rounds, or is late: no rank waits any more."""


class Node:
    """The ranks of a machine that share memory, in their order; the first one leads.

    All of them call its methods in the same order.  Raises RankFailed when another rank has ended or failed.
    ``task``: what is not done then, for errors.
    """

    def __init__(self, group: Group, ranks: tuple[int, ...], key: str, processes: Mapping[int, Sequence[int]]) -> None:
        """``ranks``: those of the group that meet.  ``key``: in its store, of this occasion.  ``processes``: rank -> what
        :func:`_process` returned there."""
        self.rank = group.rank
        self.ranks = ranks
        self.task = "placed"
        self._store = dist.distributed_c10d.PrefixStore(f"{key}/{ranks[0]}", group.store)
        self._timeout_s = group.timeout.total_seconds()
        self._processes = processes
        self._process = os.getpid()
        self._open = True
        self._round = 0
        self._said = _NOTHING  # this rank's record of the round
        self._told: BaseException | None = None  # the error on its way out of this rank that the others know
        self._busy = False

    @property
    def meets(self) -> bool:
        """Whether no rank has ended or left, as far as this one has heard.  False in a forked child."""
        return self._open and not self.forked

    @property
    def forked(self) -> bool:
        """Whether this process was forked from a rank, and is none itself."""
        return os.getpid() != self._process

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def gather(self, value: Any, error: Exception | None = None) -> list[Any]:
        """The values of all ranks, at every rank.  They must be such that JSON can hold.

        ``error``: why this rank cannot go on.  All ranks raise RankFailed if one has any; they can meet again.
        """
        if error is not None:
            self.fail(error)
            raise _failed(self.task, self.rank, _cause(error)) from error
        return self._meet(value, self._timeout_s, _ENDED)

    def agree(self, value: Any, patience_s: float) -> list[Any]:
        """The same, where ranks come at other times: a rank that has not come is late after ``patience_s``, unless it is
        busy, see :meth:`busy`.  Raises Left, on all ranks, if one is late or has left."""
        return self._meet(value, min(patience_s, self._timeout_s), _LATE)

    def fail(self, error: BaseException) -> None:
        """Let the other ranks raise ``error``, in this round or, if that is decided, in the next.  Does not wait for them."""
        if not self.meets or self._knows(error):
            return
        self._told = error
        with self._reached():
            self._pass_known_failure()
            ours = json.dumps((_FAILED, {self.rank: _cause(error)}))
            while True:
                how, _ = json.loads(self._store.compare_set(self._key(_DECISION), "", ours))
                self._next()
                if how != _VALUE:
                    return

    def leave(self, why: str) -> None:
        """Take part in no further round.  Does not wait for the other ranks, which raise Left."""
        if self.meets:
            self._say(_LEFT, why)
        self._open = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """On the way to a round: the other ranks wait however long this takes.

        If it raises, they raise the same at that round, unless this rank has come again by then.
        """
        if not self.meets or self._busy:
            yield
            return
        self._busy = True
        try:
            with self._reached():
                self._store.set(f"busy/{self.rank}", "1")
            yield
            if self._said == _FAILED and self.meets:  # it has failed before, and has gone on without a round
                self._say(_NOTHING, "")
        except BaseException as error:
            if self.meets and not self._knows(error):
                with contextlib.suppress(ChunkflowError):  # its own error is the one to see
                    self.fail(error) if self._said == _VALUE else self._say(_FAILED, _cause(error))
            raise
        finally:
            self._busy, self._told = False, None
            if self.meets:
                with contextlib.suppress(ChunkflowError), self._reached():
                    self._store.set(f"busy/{self.rank}", "")

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
        """Take part in no further round.  ``error``: why this rank cannot go on, which the others raise."""
        if error is not None:
            with contextlib.suppress(ChunkflowError):  # its own error is the one to see
                self.fail(error)
        self._open = False

    def _knows(self, error: BaseException | None) -> bool:
        """Whether the other ranks know why an error is raised."""
        while error is not None:
            if isinstance(error, RankFailed | Left) or error is self._told:
                return True
            error = error.__cause__ or error.__context__
        return False

    def _meet(self, value: Any, patience_s: float, late: str) -> list[Any]:
        """The values of all ranks.  ``late``: how the round is decided after ``patience_s`` without a rank."""
        if self.forked:
            raise ChunkflowError(
                f"This process was forked from rank {self.rank} of a process group and is none of its ranks, which the "
                "weights need here: call chunkflow_compile.restore(model) in it, or start it before the model is placed."
            )
        self._told = None
        while self._open:
            with self._reached():
                self._pass_known_failure()
                records, how, of = self._decided({_VALUE: value}, patience_s, late)
                self._next()
            if how == _VALUE:
                return [records[rank][_VALUE] for rank in self.ranks]
            rank, why = min(of.items())
            if how == _FAILED and rank == self.rank:
                continue  # the others have heard of an earlier failure, and this rank comes again
            if how == _FAILED:
                raise _failed(self.task, rank, why)
            self._open = False
            if how == _ENDED:
                raise _ended(self.task, rank, why)
            raise Left(f"{numbers(of.keys())} {why}")
        raise RankFailed(f"The weights are not {self.task}: one of {numbers(self.ranks)} has ended, or has left.")

    def _decided(
        self, mine: Mapping[str, Any], patience_s: float, late: str
    ) -> tuple[dict[int, Any], str, dict[int, str]]:
        """The records of the round and its decision, after this rank has added its own record."""
        records = dict[int, Any]()
        began, pause, looked, logged = time.monotonic(), _PAUSE_S, 0.0, False
        self._said = _VALUE
        self._set(str(self.rank), mine)
        while (decision := self._get(_DECISION)) is None:
            found = {rank: self._get(str(rank)) for rank in self.ranks if rank not in records}
            records |= {rank: record for rank, record in found.items() if record}
            absent = [rank for rank in self.ranks if rank not in records]
            proposed, waited = _of_records(records, absent), time.monotonic() - began
            if proposed is None and waited - looked > _LIVENESS_S:
                looked, proposed = waited, self._of_absent(absent, waited, patience_s, late)
                if proposed is None and waited > _LOGGED_S and not logged:
                    _log.info("rank %s waits for %s", self.rank, numbers(absent))
                    logged = True
            if proposed is None:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            else:
                self._store.compare_set(self._key(_DECISION), "", json.dumps(proposed))
        how, of = decision
        if how == _VALUE:  # which no rank changes any more
            records |= {rank: self._get(str(rank)) for rank in self.ranks if rank not in records}
        return records, how, {int(rank): why for rank, why in of.items()}

    def _of_absent(self, absent: Sequence[int], waited: float, patience_s: float, late: str) -> Any:
        """The decision on a round in which ranks are missing; None to go on waiting."""
        if (ended := self._ended_of(absent)) is not None:
            return _ENDED, {ended: "its process has ended"}
        keys = [f"busy/{rank}" for rank in absent]
        if waited > self._timeout_s or (
            waited > patience_s and not any(self._store.check([key]) and self._store.get(key) for key in keys)
        ):
            return late, dict.fromkeys(absent, f"did not come within {waited:.0f} s")
        return None

    def _ended_of(self, ranks: Iterable[int]) -> int | None:
        """The first rank whose process has ended, None if all run."""
        return next((r for r in ranks if _process(self._processes[r][0]) != [*self._processes[r]]), None)

    def _say(self, how: str, why: str) -> None:
        """Have a record of this kind in the current round, until this rank has another."""
        with self._reached():
            self._pass_known_failure()
            self._set(str(self.rank), {how: why} if how != _NOTHING else {})
            self._said = how

    def _pass_known_failure(self) -> None:
        """Leave the round in which this rank has failed, if the others know."""
        if self._said == _FAILED and self._get(_DECISION) is not None:
            self._next()

    def _next(self) -> None:
        """Go on with the next round.  The last rank deletes the records."""
        if self._store.add(self._key("read"), 1) == len(self.ranks):
            with contextlib.suppress(RuntimeError):  # not every store can
                for what in (*map(str, self.ranks), _DECISION, "read"):
                    self._store.delete_key(self._key(what))
        self._round += 1
        self._said = _NOTHING

    def _key(self, what: str) -> str:
        return f"{self._round}/{what}"

    def _set(self, what: str, value: Any) -> None:
        self._store.set(self._key(what), json.dumps(value))

    def _get(self, what: str) -> Any:
        key = self._key(what)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Around uses of the store, which ends with the rank that serves it."""
        try:
            with reached():
                yield
        except StoreEnded as error:
            self._open = False
            if (ended := self._ended_of(self.ranks)) is not None:
                raise _ended(self.task, ended, "its process has ended") from error
            raise


def _of_records(records: Mapping[int, Any], absent: Sequence[int]) -> Any:
    """The decision that the records of a round allow; None if they do not yet."""
    for how in _FAILED, _LEFT:
        if of := {rank: record[how] for rank, record in records.items() if how in record}:
            return how, of
    return None if absent else (_VALUE, {})


def _process(number: int) -> list[int]:
    """A process, as no later one of the same number is; empty if it has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":
            return [number, int(fields[18])]  # when it started
    return []


def node_of(share: Any, device: torch.device, asks: Mapping[str, Any] | None = None) -> Node | None:
    """The ranks of this machine to share weights with, see :func:`group_to_share_in`, or None.

    ``asks``: as in :func:`rendezvous`.  Raises ChunkflowError also if a rank of the group is absent.
    """
    if (group := group_to_share_in(share, device)) is None:
        return None
    # each memory node has its own copy: a GPU reads the other node's memory more slowly
    near = near_cpus(device)
    return rendezvous(group, ",".join(map(str, sorted(near))), asks)


def report_absence(group: Group, error: BaseException) -> None:
    """Tell the ranks that call :func:`rendezvous` why this one does not.  Does not wait for them."""
    group.post(_PLACING, {"failed": _cause(error)})


def rendezvous(group: Group, near: str = "", asks: Mapping[str, Any] | None = None) -> Node | None:
    """The node of this rank, None if it shares with no other.  All ranks of the group must call it.

    ``near``: the memory node to share on; ranks on others share among themselves.  ``asks``: arguments of ``offload`` that
    all ranks must pass alike, by name.
    Raises ChunkflowError, with the numbers of the ranks, if some do not call it before the timeout, or pass other arguments.
    """
    place = {"machine": _machine(), "namespace": _pid_namespace(), "near": near}
    key = group.post(_PLACING, {**place, "process": _process(os.getpid()), "asks": asks or {}})
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
            raise _failed("placed", rank, cause)
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
    """The ranks that share with this one.  Says why others of this machine do not."""
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
    """Raise ChunkflowError, the same on all ranks, if one of ``ranks`` says something else than the first, by name."""
    for rank, others in zip(ranks, said, strict=True):
        for name, value in others.items():
            if value != said[0].get(name):
                raise ChunkflowError(
                    f"Rank {rank} places its model with {name}={value!r}, and rank {ranks[0]} with "
                    f"{name}={said[0].get(name)!r}: give all ranks the same model and options."
                )


def _failed(task: str, rank: int, cause: str) -> RankFailed:
    return RankFailed(f"The weights are not {task}, because rank {rank} failed: {cause.rstrip('.')}.")


def _ended(task: str, rank: int, why: str) -> RankFailed:
    return RankFailed(
        f"The weights are not {task}, because rank {rank} is gone: {why}. Look at the errors of that rank, and start all "
        "ranks again."
    )


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if (inner := getattr(error, "inner_exception", None)) is not None:  # of a failed compilation
        return _cause(inner)
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
