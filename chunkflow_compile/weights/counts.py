"""Counts: what the programs of a model have done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Counts:
    """Sums that only grow while a model is placed, whatever replaces its programs.

    ``cold_starts``: calls that began with empty slots, or off their cycle, and fetched first what a warm one finds.
    ``moved_bytes``: of the copies issued, theirs included.  ``off_cycle``: calls at which a cycle was entered anew.
    ``fetched_bytes``: copied for ops outside programs.
    ``launches``: calls that were one CUDA graph.  ``captures``, ``capture_s``: recordings of them, and their seconds.
    ``measured`` counts the calls that were measured; seconds are of these alone.
    """

    programs: int = 0
    calls: int = 0
    cold_starts: int = 0
    off_cycle: int = 0
    fetched_bytes: int = 0
    moved_bytes: int = 0
    launches: int = 0
    captures: int = 0
    capture_s: float = 0.0
    measured: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    stalled_s: float = 0.0
    collective_s: float = 0.0
