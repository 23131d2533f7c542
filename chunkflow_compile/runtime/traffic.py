"""Traffic: what passes the link into a rank, and what of it had the link to itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .link import LaneName
from .measurement import WindowSeconds


class Copied(NamedTuple):
    """Sums over copies: seconds and bytes, and of those that no collective ran beside."""

    seconds: float = 0.0
    nbytes: int = 0
    alone_s: float = 0.0
    alone_bytes: int = 0

    def since(self, before: Copied) -> Copied:
        """What was added."""
        return Copied(
            self.seconds - before.seconds,
            self.nbytes - before.nbytes,
            self.alone_s - before.alone_s,
            self.alone_bytes - before.alone_bytes,
        )


class Traffic:
    """Counts transfers.  Each lane is one thread, so that a count of it is written by one and read by the other."""

    def __init__(self) -> None:
        self.copied = Copied()
        self._begun: dict[LaneName, int] = {"copy": 0, "collective": 0}
        self._over: dict[LaneName, int] = {"copy": 0, "collective": 0}

    def copy(self, nbytes: int, work: Callable[[], None]) -> None:
        """Runs a copy and counts it."""
        seconds, alone = self._run("copy", "collective", work)[1:]
        was = self.copied
        self.copied = Copied(
            was.seconds + seconds,
            was.nbytes + nbytes,
            was.alone_s + seconds * alone,
            was.alone_bytes + nbytes * alone,
        )

    def collective(self, windows: WindowSeconds, window: int, work: Callable[[], Any]) -> Any:
        """Runs a collective, or its completion, and counts its seconds to a window; returns what it returns."""
        result, seconds, alone = self._run("collective", "copy", work)
        windows.collective_s[window] += seconds
        windows.beside_s[window] += 0.0 if alone else seconds
        return result

    def _run(self, lane: LaneName, other: LaneName, work: Callable[[], Any]) -> tuple[Any, float, bool]:
        """What ``work`` returned, its seconds, and whether the other lane carried nothing meanwhile."""
        before, idle = self._begun[other], self._begun[other] == self._over[other]
        self._begun[lane] += 1
        start = time.perf_counter()
        try:
            result = work()
        finally:
            seconds = time.perf_counter() - start
            self._over[lane] += 1
        return result, seconds, idle and self._begun[other] == before
