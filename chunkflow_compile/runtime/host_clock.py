"""The clock of a device's host threads: what its streams, its link and its drive measure by, and sleep by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostClock:
    """``now``: seconds that only go forward, the same in every process.  ``sleep``: lets so many seconds pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


MONOTONIC = HostClock()
