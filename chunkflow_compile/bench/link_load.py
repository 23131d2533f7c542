"""The bandwidth of an emulated link, derived from the compute that this machine was measured to need.

A fixed bandwidth is a nearly full link on one machine and an idle one on another.  A fixed load is the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkflow_compile.hardware.emulated import EXCHANGE_S
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.problem import Problem

# Bytes/s of a link whose load is known, until it sets them.
TO_BE_DERIVED = 1e9


@dataclass(frozen=True)
class LinkLoad:
    """``share``: of the resident step, for which the link would be busy if every weight streamed once a step; above 1 the
    link cannot carry them in time.  ``compute_s``: the measured compute of a resident step, seconds, mean over the ranks."""

    share: float
    compute_s: float

    def __str__(self) -> str:
        return (
            f"its bandwidth follows from {self.compute_s * 1e3:.0f} ms of compute measured: all weights and collectives load "
            f"the link for {self.share:.2f} of the resident step"
        )

    def bandwidth(self, problem: Problem) -> float:
        """Bytes/s into a rank, B, by (W + A) / B = share (compute + n e + A / B).

        W: bytes of weights that may stream; A: bytes of the n collectives of a step; e: overhead of an exchange.
        Raises ChunkflowError for a load that no bandwidth gives: collectives slow the resident step as well.
        """
        weights = sum(w.nbytes for w in problem.weights if w.keep is None)
        exchanged = sum(c.nbytes for c in problem.collectives)
        alone = self.compute_s + len(problem.collectives) * EXCHANGE_S
        needed = weights + exchanged * (1 - self.share)
        if needed <= 0:
            most = 1 + weights / exchanged
            raise ChunkflowError(
                f"A load of {self.share} cannot be reached: this model's is below {most:.2f} on any link."
            )
        return needed / (self.share * alone)
