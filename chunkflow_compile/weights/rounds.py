"""Rounds: how the ranks of a machine make joint decisions, through the store of their process group.

Each rank contributes one record to a round: a value, or the reason why it has none (it failed, or it left).  The first
rank that can decide the round writes the decision, once, with an atomic operation of the store, and all ranks follow it:

* Every rank has a value: all ranks get all values.
* A rank failed, or its process has ended: all ranks raise the same error, which names the rank and the cause.
* A rank left, or is late: there are no further rounds, see :meth:`Rounds.agree`.

A rank that fails or leaves does not wait for the others, which find its record when they reach the round.  Records are
JSON.  A forked child cannot take part in rounds, but it may drop its :class:`Rounds` object, which owns no thread and no
connection.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError, first_line

from .groups import LOGGED_S, Group, StoreEnded, numbers, reached

_log = logging.getLogger(__name__)


# Initial and maximum number of seconds between two polls of a round.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
# Seconds between two checks that the processes of missing ranks still run.
_LIVENESS_S = 0.2
# The types of a rank's record and of a round's decision.
_NOTHING, _VALUE, _FAILED, _ENDED, _LEFT, _LATE = "", "value", "failed", "ended", "left", "late"
# The key in the store under which the decision of a round is written.
_DECISION = "decision"


_Rounds = TypeVar("_Rounds", bound="Rounds")


class RankFailed(ChunkflowError):
    """Raised on all ranks that still run, if a rank has failed or ended."""


class Left(ChunkflowError):
    """Raised on all ranks that take part in a round, if a rank has left the rounds or is late.  No further rounds
    follow."""


class Rounds:
    """The rounds of several ranks of a machine.  The first rank is the leader.

    All ranks call :meth:`gather` and :meth:`agree` in the same order.  Both raise RankFailed when another rank has
    ended or failed.  ``task``: the end of the phrase "The weights are not ..." in error messages.
    """

    def __init__(self, group: Group, ranks: tuple[int, ...], key: str, processes: Mapping[int, Sequence[int]]) -> None:
        """``ranks``: the ranks of the group that take part, in rank order.  ``key``: a store prefix that is unique to
        these rounds.  ``processes``: rank -> the result of :func:`process_of` on that rank."""
        self.rank = group.rank
        self.ranks = ranks
        self.task = "placed"
        self._store = dist.distributed_c10d.PrefixStore(f"{key}/{ranks[0]}", group.store)
        self._timeout_s = group.timeout.total_seconds()
        self._processes = processes
        self._process = os.getpid()
        self._open = True
        self._round = 0
        # the type of this rank's record in the current round
        self._record_type = _NOTHING
        # an error that this rank is raising and has reported to the others
        self._reported_error: BaseException | None = None
        self._busy = False

    @property
    def takes_part(self) -> bool:
        """Whether this rank takes part in rounds.  False in a forked child, and if this rank has left, or knows that
        another rank has ended or left."""
        return self._open and not self.forked

    @property
    def forked(self) -> bool:
        """Whether this process was forked from a rank, and therefore is not a rank itself."""
        return os.getpid() != self._process

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    def __enter__(self: _Rounds) -> _Rounds:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def gather(self, value: Any, error: Exception | None = None) -> list[Any]:
        """All-gather: return the values of all ranks on every rank.  The values must be serialisable as JSON.

        ``error``: the reason why this rank cannot continue, or None.  If one rank passes an error, all ranks raise
        RankFailed, and can begin another round afterwards.
        """
        if error is not None:
            self.fail(error)
            raise failed(self.task, self.rank, cause_of(error)) from error
        return self._run_round(value, self._timeout_s, _ENDED)

    def agree(self, value: Any, patience_s: float) -> list[Any]:
        """All-gather like :meth:`gather`, but for ranks that arrive at different times.  A rank that has no record
        after ``patience_s`` seconds is late, unless it is in a :meth:`busy` context.  Raises Left on all ranks if one
        of them is late or has left."""
        return self._run_round(value, min(patience_s, self._timeout_s), _LATE)

    def fail(self, error: BaseException) -> None:
        """Let the other ranks raise RankFailed because of ``error``, in the current round, or in the next round if the
        current one is already decided.  Does not wait for the other ranks."""
        if not self.takes_part or self._is_reported(error):
            return
        self._reported_error = error
        with self._reached():
            self._pass_known_failure()
            ours = json.dumps((_FAILED, {self.rank: cause_of(error)}))
            while True:
                how, _ = json.loads(self._store.compare_set(self._key(_DECISION), "", ours))
                self._next()
                if how != _VALUE:
                    return

    def leave(self, why: str) -> None:
        """Stop taking part in rounds.  Does not wait for the other ranks, which raise Left."""
        if self.takes_part:
            with self._reached():
                self._pass_known_failure()
                # a failure that this rank has reported ends this round, so the record below belongs to the next one
                self._round += self._record_type == _FAILED
                self._set(str(self.rank), {_LEFT: why})
        self._open = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A context for work before a round.  In the next round, the other ranks wait for this rank until the work is
        done, or until the timeout of the group has passed.

        If the work raises an error, the other ranks raise it too when they reach the next round, unless a later call of
        this rank has reached that round before them.
        """
        if not self.takes_part or self._busy:
            yield
            return
        self._busy = True
        try:
            with self._reached():
                self._store.set(f"busy/{self.rank}", "1")
            yield
            # withdraw the failure of an earlier call, because the present call needed no round and succeeded
            if self._record_type == _FAILED and self.takes_part:
                self._set_record(_NOTHING, "")
        except BaseException as error:
            if self.takes_part and not self._is_reported(error):
                with contextlib.suppress(ChunkflowError):  # the original error is more important
                    self.fail(error) if self._record_type == _VALUE else self._set_record(_FAILED, cause_of(error))
            raise
        finally:
            self._busy, self._reported_error = False, None
            if self.takes_part:
                with contextlib.suppress(ChunkflowError), self._reached():
                    self._store.set(f"busy/{self.rank}", "")

    def close(self, error: BaseException | None = None) -> None:
        """Stop taking part in rounds.

        ``error``: the reason why this rank cannot continue, or None.  If there is a reason, the other ranks raise
        RankFailed.
        """
        if error is not None:
            with contextlib.suppress(ChunkflowError):  # the original error is more important
                self.fail(error)
        self._open = False

    def _is_reported(self, error: BaseException | None) -> bool:
        """Whether the other ranks know about an error, or about an error that caused it."""
        while error is not None:
            if isinstance(error, RankFailed | Left) or error is self._reported_error:
                return True
            error = error.__cause__ or error.__context__
        return False

    def _run_round(self, value: Any, patience_s: float, late: str) -> list[Any]:
        """Run a round and return the values of all ranks.  ``late``: what the round decides if a rank is missing after
        ``patience_s`` seconds: ``_ENDED`` (all ranks raise RankFailed) or ``_LATE`` (all ranks raise Left)."""
        if self.forked:
            raise ChunkflowError(
                f"This process was forked from rank {self.rank} of a process group and is none of its ranks, which the "
                "weights need here: call chunkflow_compile.restore(model) in it, or start it before the model is placed."
            )
        self._reported_error = None
        while self._open:
            with self._reached():
                self._pass_known_failure()
                records, how, of = self._wait_for_decision({_VALUE: value}, patience_s, late)
                self._next()
            if how == _VALUE:
                return [records[rank][_VALUE] for rank in self.ranks]
            rank, why = min(of.items())
            if how == _FAILED and rank == self.rank:
                continue  # the others have raised an earlier failure of this rank; try again in the next round
            if how == _FAILED:
                raise failed(self.task, rank, why)
            self._open = False
            if how == _ENDED:
                raise _ended(self.task, rank, why)
            raise Left(f"{numbers(of.keys())} {why}")
        raise RankFailed(f"The weights are not {self.task}: one of {numbers(self.ranks)} has ended, or has left.")

    def _wait_for_decision(
        self, mine: Mapping[str, Any], patience_s: float, late: str
    ) -> tuple[dict[int, Any], str, dict[int, str]]:
        """Add this rank's record to the round, and wait for the decision.  Return the records by rank, the type of the
        decision, and rank -> cause for the ranks that caused the decision."""
        records, waiting, pause = dict[int, Any](), self._waiting(patience_s, late), _PAUSE_S
        self._record_type = _VALUE
        self._set(str(self.rank), mine)
        while (decision := self._get(_DECISION)) is None:
            found = {rank: self._get(str(rank)) for rank in self.ranks if rank not in records}
            records |= {rank: record for rank, record in found.items() if record}
            absent = [rank for rank in self.ranks if rank not in records]
            if (proposed := _possible_decision(records, absent) or waiting(absent)) is None:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            else:
                self._store.compare_set(self._key(_DECISION), "", json.dumps(proposed))
        how, of = decision
        if how == _VALUE:  # after the decision, records do not change
            records |= {rank: self._get(str(rank)) for rank in self.ranks if rank not in records}
        return records, how, {int(rank): why for rank, why in of.items()}

    def _waiting(self, patience_s: float, late: str) -> Callable[[Sequence[int]], Any]:
        """Return a function that takes the ranks without a record.  The function returns None while this rank should wait
        for those ranks.  After that, it returns a decision."""
        began = looked = busy = time.monotonic()
        logged = False

        def decision(absent: Sequence[int]) -> Any:
            nonlocal looked, busy, logged
            if (now := time.monotonic()) - looked < _LIVENESS_S:
                return None
            looked = now
            if (ended := self._ended_of(absent)) is not None:
                return _ENDED, {ended: "its process has ended"}
            if any(self._store.check([key]) and self._store.get(key) for key in map("busy/{}".format, absent)):
                busy = now
            if now - busy > patience_s or now - began > self._timeout_s:
                return late, dict.fromkeys(absent, f"did not come within {now - began:.0f} s")
            if now - began > LOGGED_S and not logged:
                logged = True
                _log.info("rank %s waits for %s", self.rank, numbers(absent))
            return None

        return decision

    def _ended_of(self, ranks: Iterable[int]) -> int | None:
        """Return the first of ``ranks`` whose process has ended, or None if all of these processes still run."""
        known = {rank: [*self._processes[rank]] for rank in ranks if self._processes[rank]}
        return next((rank for rank, process in known.items() if process_of(process[0]) != process), None)

    def _set_record(self, how: str, why: str) -> None:
        """Set or replace this rank's record in the current round."""
        with self._reached():
            self._pass_known_failure()
            self._set(str(self.rank), {how: why} if how != _NOTHING else {})
            self._record_type = how

    def _pass_known_failure(self) -> None:
        """Go on to the next round if the current round was decided by the failure of this rank."""
        if self._record_type == _FAILED and self._get(_DECISION) is not None:
            self._next()

    def _next(self) -> None:
        """Go on to the next round.  The last rank that does so deletes the records of the current round."""
        if self._store.add(self._key("read"), 1) == len(self.ranks):
            with contextlib.suppress(RuntimeError):  # not every store can delete keys
                for what in (*map(str, self.ranks), _DECISION, "read"):
                    self._store.delete_key(self._key(what))
        self._round += 1
        self._record_type = _NOTHING

    def _key(self, what: str) -> str:
        return f"{self._round}/{what}"

    def _set(self, what: str, value: Any) -> None:
        self._store.set(self._key(what), json.dumps(value))

    def _get(self, what: str) -> Any:
        key = self._key(what)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """A context for calls to the store.  When the store cannot be reached, raises RankFailed if a rank has ended
        (perhaps the rank that serves the store), and otherwise StoreEnded."""
        try:
            with reached():
                yield
        except StoreEnded as error:
            self._open = False
            if (ended := self._ended_of(self.ranks)) is not None:
                raise _ended(self.task, ended, "its process has ended") from error
            raise


def _possible_decision(records: Mapping[int, Any], absent: Sequence[int]) -> Any:
    """Return the decision that the records of a round permit, or None if the round cannot be decided yet."""
    for how in _FAILED, _LEFT:
        if of := {rank: record[how] for rank, record in records.items() if how in record}:
            return how, of
    return None if absent else (_VALUE, {})


def process_of(number: int) -> list[int]:
    """Return the PID and the start time of a process.  Together they identify the process even if its PID is reused.  The
    list is empty if the process has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        if state not in "ZX":
            return [number, int(fields[18])]  # the start time of the process
    return []


def failed(task: str, rank: int, cause: str) -> RankFailed:
    return RankFailed(f"The weights are not {task}, because rank {rank} failed: {cause.rstrip('.')}.")


def _ended(task: str, rank: int, why: str) -> RankFailed:
    return RankFailed(
        f"The weights are not {task}, because rank {rank} is gone: {why}. Look at the errors of that rank, and start all "
        "ranks again."
    )


def cause_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if (inner := getattr(error, "inner_exception", None)) is not None:  # Dynamo wraps the error of a failed compilation
        return cause_of(inner)
    return str(error) if isinstance(error, ChunkflowError) else first_line(error)
