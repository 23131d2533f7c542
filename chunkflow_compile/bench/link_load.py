"""The bandwidth of an emulated link, derived from the compute measured on this machine.

A link of fixed bandwidth is nearly full on one machine and idle on another.  A fixed load means the same on both.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkflow_compile.hardware.emulated import EXCHANGE_S
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.problem import Problem

# Bytes/s in place of the bandwidth of a link until its load sets it.
TO_BE_DERIVED = 1e9


@dataclass(frozen=True)
class LinkLoad:
    """The load of a link.

    ``share``: the share of the resident step for which the link would be busy if every weight streamed once a step.
    Above 1, such a step takes longer than the resident one.  ``measured_s``: measured compute of a resident step,
    seconds, mean over the ranks.  ``pace``: how many times as long regions are held, None if they are not.
    """

    share: float
    measured_s: float
    pace: float | None = None

    @property
    def compute_s(self) -> float:
        """Seconds of compute in a resident step."""
        return self.measured_s * (self.pace or 1.0)

    def __str__(self) -> str:
        held = "" if self.pace is None else f", held to {self.pace:g} times that"
        return (
            f"its bandwidth follows from {self.measured_s * 1e3:.0f} ms of measured compute{held}: all weights and "
            f"collectives would keep the link busy for {self.share:.2f} of the resident step"
        )

    def bandwidth(self, problem: Problem) -> float:
        """Bytes/s into a rank: B in (W + A) / B = share (compute + n e + A / B).

        W: bytes of the weights that may stream.  A: bytes of the n collectives of a step.  e: overhead of a collective.
        Raises ChunkflowError if no bandwidth gives this load: collectives slow the resident step too, which limits it.
        """
        weights = sum(w.nbytes for w in problem.weights if w.keep is None)
        exchanged = sum(c.nbytes for c in problem.collectives)
        alone = self.compute_s + len(problem.collectives) * EXCHANGE_S
        needed = weights + exchanged * (1 - self.share)
        if needed <= 0:
            most = 1 + weights / exchanged
            raise ChunkflowError(
                f"A load of {self.share} cannot be reached: on any link, that of this model is below {most:.2f}. "
                "Give a smaller load."
            )
        return needed / (self.share * alone)
