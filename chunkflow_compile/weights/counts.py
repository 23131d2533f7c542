"""Counters of the work that a model's programs have done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Counts:
    """Sums over all programs of a placed model.  They never decrease, even if programs are replaced.

    ``cold_starts``: calls that first had to copy weights into their slots, because the slots were empty or the call was
    out of cycle order.  ``off_cycle``: calls out of cycle order.
    ``moved_bytes``: bytes of all copies that programs have issued, including the copies for cold starts.
    ``fetched_bytes``: bytes copied for ops outside programs.
    ``launches``: calls that ran as one CUDA graph.  ``captures``: captures of CUDA graphs.  ``capture_s``: seconds
    spent on these captures.
    ``row_hits``: calls whose row was in the table of hoisted values.  ``row_misses``: calls whose row had to be
    computed first.  ``row_fill_s``: seconds spent on computing rows.  In a model that is compiled per block type, hits
    and misses count the calls of blocks.  If the row of one block is missing, the rows of all blocks are computed.
    Therefore a step that begins without rows counts one miss, and after that only hits.
    ``measured``: calls whose time was measured.  The fields after ``measured`` are sums over these calls only, in
    seconds.
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
        """Count a program that was started."""
        self.programs += 1

    def add_call(self, moved_bytes: int, primed_bytes: int) -> None:
        """Count a call that has run.

        ``moved_bytes``: bytes that the call has copied.  ``primed_bytes``: bytes that were copied before the call.
        """
        self.calls += 1
        self.moved_bytes += moved_bytes + primed_bytes
        self.cold_starts += primed_bytes > 0

    def add_jump(self) -> None:
        """Count a call out of cycle order (a jump)."""
        self.off_cycle += 1

    def add_measured(self, *, seconds: float, predicted_s: float, stalled_s: float, collective_s: float) -> None:
        """Add the times of a call that was measured."""
        self.measured += 1
        self.measured_s += seconds
        self.predicted_s += predicted_s
        self.stalled_s += stalled_s
        self.collective_s += collective_s

    def add_fetched(self, nbytes: int) -> None:
        """Add the bytes of a weight that an op outside programs has fetched."""
        self.fetched_bytes += nbytes

    def add_row_hit(self) -> None:
        """Count a call whose row of hoisted values was in the table."""
        self.row_hits += 1

    def add_row_miss(self) -> None:
        """Count a call whose row of hoisted values had to be computed."""
        self.row_misses += 1

    def add_row_fill(self, seconds: float) -> None:
        """Add the ``seconds`` spent on computing rows."""
        self.row_fill_s += seconds

    def add_capture(self, seconds: float) -> None:
        """Count a call that was captured as a CUDA graph."""
        self.captures += 1
        self.capture_s += seconds

    def add_launch(self) -> None:
        """Count the launch of a CUDA graph."""
        self.launches += 1
