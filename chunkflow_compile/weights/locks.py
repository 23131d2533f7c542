"""Locks that a forked child can use, and finalizers that may wait for a lock."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch


class ProcessLock:
    """A reentrant lock, used as ``with lock():``.  A forked child gets a new lock, because the thread that holds the old
    lock may not exist in the child.

    ``lock()`` returns an RLock, whose ``__enter__`` is implemented in C.  In an ``__enter__`` that is written in Python,
    Ctrl-C between two lines could leave the lock held.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __call__(self) -> threading.RLock:  # type: ignore[valid-type]
        if os.getpid() != self._process:
            self._process, self._lock = os.getpid(), threading.RLock()
        return self._lock


def when_collected(owner: object, work: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Call ``work`` when the garbage collector frees ``owner``.  ``work`` is not called when the process exits, because
    the exit frees everything anyway."""
    undone = weakref.finalize(owner, work, *args)
    undone.atexit = False
    return undone


@torch.compiler.disable  # type: ignore[untyped-decorator]
def aside(work: Callable[[], None]) -> None:
    """Run the work of a finalizer on a separate thread, because the work waits for locks and streams, and the garbage
    collector may call a finalizer in any thread.

    Does nothing while the process exits, because the exit frees everything anyway.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=work, name="chunkflow-close").start()
