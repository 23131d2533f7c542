"""Give regions a fixed duration on shared processors.

Other processes slow down the cores of a machine for seconds at a time, and a copy thread takes time from compute.  On a
GPU, compute is equally fast in every step, and copies have separate engines.  A paced region computes as usual and then
sleeps until its duration is over.  So it takes the fixed duration, unless other work slows it down by more than the time
that it would sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from chunkflow_compile.runtime.host_clock import MONOTONIC, HostClock

if TYPE_CHECKING:
    from chunkflow_compile.runtime.variants import Variant
    from chunkflow_compile.runtime.wrapped_calls import LoweredRegion

# The fixed durations, as a multiple of the measured durations.  On two shared cores, most steps took at most 1.4 times
# the median.
PACE = 1.5


def paced(variant: Variant, compute_s: Sequence[float], pace: float, clock: HostClock = MONOTONIC) -> Variant:
    """Return a variant whose regions have fixed durations: ``pace`` times their measured compute times.

    ``compute_s``: the measured seconds of each region, in program order.  Regions that share their code get the mean.
    ``clock``: the clock that measures the durations.
    """
    names = [str(n.target) for n in variant.program.module.graph.nodes if n.op == "call_module"]
    taken: dict[str, list[float]] = {}
    for name, seconds in zip(names, compute_s, strict=True):
        taken.setdefault(name, []).append(seconds)
    late_s = 0.0  # how late the previous region ended; the next region is shortened by this time

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

    regions = {name: hold(region, pace * fmean(taken[name])) for name, region in variant.regions.items()}
    return replace(variant, regions=regions)
