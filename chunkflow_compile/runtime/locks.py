"""A lock that a forked process need not wait for."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A reentrant lock, ``with lock():``; new in a forked child, where whoever held it at the fork does not exist.

    It is handed out rather than entered: between the lines of an ``__enter__`` Ctrl-C could come, and leave it locked.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __call__(self) -> threading.RLock:  # type: ignore[valid-type]
        if os.getpid() != self._process:
            self._process, self._lock = os.getpid(), threading.RLock()
        return self._lock
