"""What really happened, in the plan's own terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """One run of a program.

    ``step_s``: seconds from call to return.  ``exposed_h2d_s``: seconds that compute waited for weights, priming of a
    cold start included.  ``collective_s``: seconds in collectives and their completion.  ``moved_bytes``: bytes of the
    copies issued in the step; ``primed_bytes``: bytes issued in front of a cold step on top of that.
    """

    step_s: float
    exposed_h2d_s: float
    collective_s: float
    collectives: int
    moved_bytes: int
    primed_bytes: int
