"""A lock that a forked process need not wait for."""

from __future__ import annotations

import os
import threading


class ProcessLock:
    """A reentrant lock, ``with lock():``.  A forked child gets a new one: the old one's holder may not exist there.

    The call returns a plain RLock to enter.  Ctrl-C between the lines of a Python ``__enter__`` could leave it locked.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __call__(self) -> threading.RLock:  # type: ignore[valid-type]
        if os.getpid() != self._process:
            self._process, self._lock = os.getpid(), threading.RLock()
        return self._lock
