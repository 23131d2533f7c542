"""Regions of a fixed duration on shared processors.

Other processes slow the cores of a machine for seconds at a time, and a copy thread takes time from compute; a GPU's
compute is as fast in every step, and its copies have engines of their own.  A paced region computes as usual and then
sleeps until its duration is over, so the duration holds as long as the slack covers what slowed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from chunkflow_compile.runtime.codes import Code

# Durations over the measured ones.  On two shared cores, most steps were at most 1.4 times as long as the median.
PACE = 1.5


def paced(code: Code, compute_s: Sequence[float], pace: float) -> Code:
    """``code`` with each region as long as ``pace`` times its measured compute.

    ``compute_s``: seconds of each region of a step, in program order.  Regions that share their code share the mean.
    """
    names = [str(n.target) for n in code.program.module.graph.nodes if n.op == "call_module"]
    taken: dict[str, list[float]] = {}
    for name, seconds in zip(names, compute_s, strict=True):
        taken.setdefault(name, []).append(seconds)
    schedule = _Schedule()
    regions: Mapping[str, Callable[..., Sequence[Any]]] = {
        name: schedule.hold(region, pace * fmean(taken[name])) for name, region in code.regions.items()
    }
    return replace(code, regions=regions)


class _Schedule:
    """Ends regions on time.  A region that ends late shortens the next ones, by its own duration at most."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def hold(self, region: Callable[..., Sequence[Any]], seconds: float) -> Callable[..., Sequence[Any]]:
        def run(*args: Any) -> Sequence[Any]:
            due = time.perf_counter() + seconds - self._late_s
            outputs = region(*args)
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            self._late_s = min(max(0.0, time.perf_counter() - due), seconds)
            return outputs

        return run
