"""A lock that a forked process need not wait for."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A reentrant lock; new in a forked child, where whoever held it at the fork does not exist."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            self._process, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
