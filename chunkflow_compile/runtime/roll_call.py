"""Roll call: finds out, beside the steps, that ranks call different programs.

Ranks that call different programs wait for each other in different collectives until the process group gives up, or pair
collectives that do not belong together.  So each rank writes its newest calls to the store of the process group now and
then, and reads those of the others.  Steps only count their calls; nothing is exchanged in a step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.meeting import meeting

# Calls of which a rank remembers what they were; ranks are rarely further apart.
_REMEMBERED = 256
# The store is read this often within the timeout of the process group, so two rounds end well before it.
_ROUNDS = 5
_KEY = "chunkflow/roll/{}/{}"


def begin_roll_call() -> RollCall | None:
    """A roll call over the default process group, None if there is none of several ranks."""
    found = meeting()
    return None if found is None else RollCall(found.store, found.rank, len(found.ranks), found.timeout)


class RollCall:
    """The calls of this rank, and what the others say of theirs.

    Call :meth:`answer` before each call of a program with collectives.
    """

    def __init__(self, store: Any, rank: int, ranks: int, timeout: timedelta) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        # several arenas of a process have roll calls of their own, which every rank begins in the same order
        self._round = store.add(_KEY.format("count", rank), 1)
        self._every = timeout.total_seconds() / _ROUNDS
        self._calls: OrderedDict[int, tuple[str, str]] = OrderedDict()  # number -> digest of all calls so far, name
        self._number, self._digest = 0, ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.finding: str | None = None
        threading.Thread(target=self._watch, name="chunkflow-roll-call", daemon=True).start()

    def answer(self, name: str) -> None:
        """Count a call of the program ``name``.  Raises ChunkflowError if a rank was found to call another."""
        if self.finding is not None:
            raise ChunkflowError(self.finding)
        with self._lock:
            self._number += 1
            self._digest = hashlib.sha256(f"{self._digest} {name}".encode()).hexdigest()[:16]
            self._calls[self._number] = self._digest, name
            if len(self._calls) > _REMEMBERED:
                self._calls.popitem(last=False)

    def close(self) -> None:
        self._over.set()

    def newest(self) -> str | None:
        """What is known now."""
        if self.finding is None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.finding = self.check()
        return self.finding

    def check(self) -> str | None:
        """Tell the others the calls of this rank, read theirs, and return what does not agree."""
        with self._lock:
            mine = dict(self._calls)
        self._store.set(_KEY.format(self._round, self._rank), json.dumps(mine))
        for rank in range(self._ranks):
            if rank != self._rank and self._store.check([_KEY.format(self._round, rank)]):
                theirs = json.loads(self._store.get(_KEY.format(self._round, rank)))
                if (found := self._differs(rank, mine, {int(k): tuple(v) for k, v in theirs.items()})) is not None:
                    return found
        return None

    def _differs(
        self, rank: int, mine: Mapping[int, tuple[str, str]], theirs: Mapping[int, tuple[str, str]]
    ) -> str | None:
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number] != theirs[number]:
                return (
                    f"The ranks call different programs: call {number} is {mine[number][1]} on rank {self._rank}, and "
                    f"{theirs[number][1]} on rank {rank}. Their collectives do not belong together, and the outputs since "
                    "then are wrong. A step cache or a loop must decide from a value that all ranks agree on."
                )
        return None

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            if self.newest() is not None:
                return
