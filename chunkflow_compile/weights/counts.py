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
    ``row_hits``, ``row_misses``: calls for which the table had a row of hoisted values, and had none; ``row_fill_s``: seconds
    of computing rows.  In a model that is compiled by kind, these are calls of blocks, and a miss of one computes the rows of
    the others: a step without rows is one miss, and hits.
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
    row_hits: int = 0
    row_misses: int = 0
    row_fill_s: float = 0.0
    measured: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    stalled_s: float = 0.0
    collective_s: float = 0.0

    def add_program(self) -> None:
        """A program was bound."""
        self.programs += 1

    def add_call(self, moved_bytes: int, primed_bytes: int) -> None:
        """A call has run.  ``primed_bytes``: copied before it, in addition to ``moved_bytes``."""
        self.calls += 1
        self.moved_bytes += moved_bytes + primed_bytes
        self.cold_starts += primed_bytes > 0

    def add_jump(self) -> None:
        """A call entered a cycle at another place than the expected one."""
        self.off_cycle += 1

    def add_measured(self, *, seconds: float, predicted_s: float, stalled_s: float, collective_s: float) -> None:
        """A call was measured."""
        self.measured += 1
        self.measured_s += seconds
        self.predicted_s += predicted_s
        self.stalled_s += stalled_s
        self.collective_s += collective_s

    def add_fetched(self, nbytes: int) -> None:
        """An op outside programs has fetched a weight."""
        self.fetched_bytes += nbytes

    def add_row_hit(self) -> None:
        """A call found its row."""
        self.row_hits += 1

    def add_row_miss(self) -> None:
        """A call had to have its row computed."""
        self.row_misses += 1

    def add_row_fill(self, seconds: float) -> None:
        """Rows were computed, in ``seconds``."""
        self.row_fill_s += seconds

    def add_capture(self, seconds: float) -> None:
        """A call was recorded as a CUDA graph."""
        self.captures += 1
        self.capture_s += seconds

    def add_launch(self) -> None:
        """A CUDA graph was launched."""
        self.launches += 1
