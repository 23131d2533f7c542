"""The emulated link of a measurement: the bandwidth for a given load, and the accuracy of the emulation.

An emulated link with a fixed bandwidth is nearly full on one machine and mostly idle on another.  A fixed load has the same
meaning on both.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from chunkflow_compile.hardware.emulated import EXCHANGE_S
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.runtime.link import LANES, LaneName, Port

# A placeholder for the bandwidth of an emulated link, in bytes/s, until the load sets it.
TO_BE_DERIVED = 1e9
_TRANSFER = 1 << 20
# The duration of the transfers in a measurement, in seconds.  It is long compared with the milliseconds by which a thread
# may wake up late.
_TRANSFERS_S = 0.25


@dataclass(frozen=True)
class LinkLoad:
    """The load of an emulated link.

    ``share``: share of the resident step in which the emulated link would be busy if every weight were streamed once per
    step.  Above 1, such a step takes longer than the resident one.  ``measured_s``: measured compute time of a resident
    step in seconds, averaged over the ranks.  ``pace``: duration of regions as a multiple of their measured times, or None
    if they are not held.  ``peers``: bandwidth of a second port for collectives, as a multiple of the first port's
    bandwidth; 0 if collectives share the first port.
    """

    share: float
    measured_s: float
    pace: float | None = None
    peers: float = 0.0

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
        Collectives on a port of p times the bandwidth: W / B = share (compute + n e + A / (p B)).
        Raises ChunkflowError if no bandwidth gives this load: collectives slow the resident step too, which limits it.
        """
        weights = sum(w.nbytes for w in problem.weights if w.keep is None)
        exchanged = sum(c.nbytes for c in problem.collectives)
        uncontended_s = self.compute_s + len(problem.collectives) * EXCHANGE_S
        beside = 0 if self.peers else exchanged  # A on the left side, if collectives use the same link
        needed = weights + beside - self.share * exchanged / (self.peers or 1)
        if needed <= 0:
            most = 1 + weights / exchanged
            raise ChunkflowError(
                f"A load of {self.share} cannot be reached: on any link, that of this model is below {most:.2f}. "
                "Give a smaller load."
            )
        return needed / (self.share * uncontended_s)


@dataclass(frozen=True)
class LinkError:
    """The accuracy of an emulated link, in bytes/s.  ``requested``: requested bandwidth.  ``alone``: bandwidth reached by
    copies alone.  ``shared``: bandwidth reached by all lanes together."""

    requested: float
    alone: float
    shared: float

    def __str__(self) -> str:
        off = [f"{100 * (rate / self.requested - 1):+.1f} %" for rate in (self.alone, self.shared)]
        return (
            f"a link of {self.requested / 1e6:.1f} MB/s is emulated: copies alone reach {self.alone / 1e6:.1f} MB/s "
            f"({off[0]}), copies and collectives together {self.shared / 1e6:.1f} MB/s ({off[1]})"
        )


def link_error(link: LinkEmulation) -> LinkError:
    """Measure the accuracy of ``link`` on private ports.  On a shared port, the traffic of other ranks would appear as an
    error."""
    link = replace(link, shared="", latency_s=0.0)
    count = max(4, round(_TRANSFERS_S * link.bandwidth / _TRANSFER))
    copies, port = chain(Port(link), "copy", count), Port(link)
    with ThreadPoolExecutor(len(LANES)) as threads:
        lanes = threads.map(lambda lane: chain(port, lane, count), LANES)
        return LinkError(link.bandwidth, alone=copies, shared=sum(lanes))


def chain(port: Port, lane: LaneName, count: int) -> float:
    """The bandwidth in bytes/s of ``count`` transfers of 1 MiB in one lane, each sent after the previous one has ended."""
    start = since = port.clock.now()
    for _ in range(count):
        since = port.send(lane, _TRANSFER, since)
    return count * _TRANSFER / (since - start)
