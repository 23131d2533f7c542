"""The emulated link of a measurement: the bandwidth that its load sets, and how exactly it is emulated.

A link of fixed bandwidth is nearly full on one machine and idle on another.  A fixed load means the same on both.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from chunkflow_compile.hardware.emulated import EXCHANGE_S
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.runtime.link import LANES, LaneName, Port

# Bytes/s in place of the bandwidth of a link until its load sets it.
TO_BE_DERIVED = 1e9
_TRANSFER = 1 << 20
# Seconds of link time in a measurement: long compared with the milliseconds by which a thread wakes up late.
_TRANSFERS_S = 0.25


@dataclass(frozen=True)
class LinkLoad:
    """The load of a link.

    ``share``: the share of the resident step for which the link would be busy if every weight streamed once a step.
    Above 1, such a step takes longer than the resident one.  ``measured_s``: measured compute of a resident step,
    seconds, mean over the ranks.  ``pace``: how many times as long regions are held, None if they are not.
    ``peers``: how many times its bandwidth a second port has, through which collectives pass; 0 if they share the link.
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
        beside = 0 if self.peers else exchanged  # A on the left, where collectives cross the same link
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
    """Bytes/s.  ``requested``: as asked for.  ``alone``: reached by copies alone.  ``shared``: by all lanes together."""

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
    """Measure ``link`` on private ports.  On a shared port, the traffic of other ranks would appear as an error."""
    link = replace(link, shared="", latency_s=0.0)
    count = max(4, round(_TRANSFERS_S * link.bandwidth / _TRANSFER))
    copies, port = chain(Port(link), "copy", count), Port(link)
    with ThreadPoolExecutor(len(LANES)) as threads:
        lanes = threads.map(lambda lane: chain(port, lane, count), LANES)
        return LinkError(link.bandwidth, alone=copies, shared=sum(lanes))


def chain(port: Port, lane: LaneName, count: int) -> float:
    """Bytes/s of ``count`` transfers of 1 MiB in one lane, each sent when the one before has ended."""
    start = since = port.clock.now()
    for _ in range(count):
        since = port.send(lane, _TRANSFER, since)
    return count * _TRANSFER / (since - start)
