"""Roll call: finds out, beside the steps, that ranks of a process group call different programs.

Ranks that call different programs wait for each other in different collectives until the process group gives up, or pair
collectives that do not belong together.  So each rank writes its newest calls to the store of the process group now and
then, and reads those of the others.  Steps only count their calls; nothing is exchanged in a step.

Each process group has its own, of the programs with a collective over it: ranks that never meet may call what they like.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from queue import Empty, SimpleQueue

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.meeting import Meeting

# Calls of which a rank remembers what they were; ranks are rarely further apart.
_REMEMBERED = 256
# The store is read this often within the timeout of the process group, so two rounds end well before it.
_ROUNDS = 5
_KEY = "chunkflow/roll/{}/{}/{}"


class RollCall:
    """The calls of this rank, and what the others of a process group, ``met``, say of theirs.

    Call :meth:`answer` before each call of a program with collectives over the group.  It ends when it is dropped.
    """

    def __init__(self, met: Meeting) -> None:
        self.met = met
        # several arenas of a process have roll calls of their own, which every rank begins in the same order
        number = met.store.add(_KEY.format(met.key, "count", met.rank), 1)
        self._keys = {rank: _KEY.format(met.key, number, rank) for rank in met.ranks}
        self._calls: OrderedDict[int, tuple[str, str]] = OrderedDict()  # number -> digest of all calls so far, name
        self._number, self._digest = 0, ""
        self._lock = threading.Lock()
        self._over: SimpleQueue[None] = SimpleQueue()  # the collector may run where a lock of an Event is held
        self.finding: str | None = None
        weakref.finalize(self, self._over.put, None).atexit = False
        watch = weakref.ref(self), self._over, met.timeout.total_seconds() / _ROUNDS
        threading.Thread(target=_watch, args=watch, name="chunkflow-roll-call", daemon=True).start()

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
        self._over.put(None)

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
        store = self.met.store
        store.set(self._keys[self.met.rank], json.dumps(mine))
        for rank, key in self._keys.items():
            if rank != self.met.rank and store.check([key]):
                theirs = json.loads(store.get(key))
                if (found := self._differs(rank, mine, {int(k): tuple(v) for k, v in theirs.items()})) is not None:
                    return found
        return None

    def _differs(
        self, rank: int, mine: Mapping[int, tuple[str, str]], theirs: Mapping[int, tuple[str, str]]
    ) -> str | None:
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number] != theirs[number]:
                return (
                    f"The ranks call different programs: call {number} is {mine[number][1]} on rank {self.met.rank}, and "
                    f"{theirs[number][1]} on rank {rank}. Their collectives do not belong together, and the outputs since "
                    "then are wrong. A step cache or a loop must decide from a value that all ranks agree on."
                )
        return None


def _watch(ref: weakref.ref[RollCall], over: SimpleQueue[None], every: float) -> None:
    """Compare the calls ``every`` so many seconds.  Keeps no roll call: its model may be dropped."""
    while True:
        with contextlib.suppress(Empty):
            over.get(timeout=every)
            return
        roll = ref()
        if roll is None or roll.newest() is not None:
            return
        del roll
