"""The clock of a device's host threads.  Its streams, its emulated link and its emulated SSD measure time and sleep with
it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostClock:
    """``now``: returns the time in seconds, which never decreases and is the same in every process.  ``sleep``: blocks for a
    number of seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


MONOTONIC = HostClock()
