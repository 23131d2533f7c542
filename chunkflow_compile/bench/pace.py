"""Regions of a fixed duration on shared processors.

Other processes slow the cores of a machine for seconds at a time, and a copy thread takes time from compute; a GPU's
compute is as fast in every step, and its copies have engines of their own.  A paced region computes as usual and then
sleeps until its duration is over, so the duration holds as long as the slack covers what slowed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from chunkflow_compile.runtime.host_clock import MONOTONIC, HostClock

if TYPE_CHECKING:
    from chunkflow_compile.runtime.codes import Code
    from chunkflow_compile.runtime.wrapped_calls import LoweredRegion

# Durations over the measured ones.  On two shared cores, most steps were at most 1.4 times as long as the median.
PACE = 1.5


def paced(code: Code, compute_s: Sequence[float], pace: float, clock: HostClock = MONOTONIC) -> Code:
    """``code`` with each region as long as ``pace`` times its measured compute.

    ``compute_s``: seconds of each region of a step, in program order.  Regions that share their code share the mean.
    ``clock``: by which they last.
    """
    names = [str(n.target) for n in code.program.module.graph.nodes if n.op == "call_module"]
    taken: dict[str, list[float]] = {}
    for name, seconds in zip(names, compute_s, strict=True):
        taken.setdefault(name, []).append(seconds)
    late_s = 0.0  # by which the region before has ended late; it shortens the next ones, by its own duration at most

    def hold(region: LoweredRegion, duration_s: float) -> LoweredRegion:
        def run(inputs: list[Any]) -> Sequence[Any]:
            nonlocal late_s
            due = clock.now() + duration_s - late_s
            outputs = region(inputs)
            if (left := due - clock.now()) > 0:
                clock.sleep(left)
            late_s = min(max(0.0, clock.now() - due), duration_s)
            return outputs

        return run

    regions = {name: hold(region, pace * fmean(taken[name])) for name, region in code.regions.items()}
    return replace(code, regions=regions)
