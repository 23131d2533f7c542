"""A clock that a test owns: no other program on the machine changes what it shows."""

from __future__ import annotations

import threading

from chunkflow_compile.runtime.host_clock import HostClock


class OwnClock:
    """Time passes only while all of its ``threads`` sleep, and then at once, to the end of the shortest sleep.

    Of several threads, one runs at a time from its first sleep on.  Each says at its end that it is :meth:`over`.
    ``tick``: seconds that also pass whenever it is read, so that nothing takes no time at all.
    """

    def __init__(self, threads: int = 1, tick: float = 0.0) -> None:
        self._threads = threads
        self._tick = tick
        self._time = 0.0
        self._changed = threading.Condition()
        self._due: list[tuple[float, int]] = []  # of the sleepers: when, and a number of their own
        self._sleeps = 0

    @property
    def host(self) -> HostClock:
        """As devices, links and readers take it."""
        return HostClock(self.now, self.sleep)

    def now(self) -> float:
        with self._changed:
            self._time += self._tick
            return self._time

    def sleep(self, seconds: float) -> None:
        with self._changed:
            self._sleeps += 1
            mine = self._time + max(0.0, seconds), self._sleeps
            self._due.append(mine)
            self._wake()
            assert self._changed.wait_for(lambda: mine not in self._due, timeout=300), (
                "a thread neither sleeps nor ends"
            )

    def over(self) -> None:
        """The calling thread sleeps no more."""
        with self._changed:
            self._threads -= 1
            self._wake()

    def _wake(self) -> None:
        if self._due and len(self._due) >= self._threads:
            first = min(self._due)
            self._due.remove(first)
            self._time = max(self._time, first[0])
            self._changed.notify_all()
