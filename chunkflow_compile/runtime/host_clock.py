"""The clock of host threads.  The streams of a device, the emulated PCIe link and the emulated SSD use this clock to measure
time and to sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostClock:
    """``now``: a function that returns the time in seconds; the time never decreases and is the same in every process.
    ``sleep``: a function that blocks for a number of seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


MONOTONIC = HostClock()
