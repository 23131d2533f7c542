"""The emulated link of a measurement: compute its bandwidth for a given load, and measure the accuracy of the emulation.

With a fixed bandwidth, an emulated link would be nearly full on a fast machine and mostly idle on a slow machine.  A
fixed load means the same on both.
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
# The total duration of the transfers that measure the accuracy, in seconds.  It is long, because a thread may wake up
# some milliseconds late.
_TRANSFERS_S = 0.25


@dataclass(frozen=True)
class LinkLoad:
    """The load of an emulated link.

    ``share``: the share of the resident step in which the emulated link would be busy if every weight were streamed once
    per step.  If it is above 1, this streaming takes longer than the resident step.  ``measured_s``: the measured compute
    time of a resident step in seconds, averaged over the ranks.  ``pace``: the duration to which regions are held, as a
    multiple of their measured times, or None.  ``peers``: the bandwidth of a second port for collectives, as a multiple
    of the first port's bandwidth; 0 if collectives share the first port.
    """

    share: float
    measured_s: float
    pace: float | None = None
    peers: float = 0.0

    @property
    def compute_s(self) -> float:
        """The seconds of compute in a resident step."""
        return self.measured_s * (self.pace or 1.0)

    def __str__(self) -> str:
        held = "" if self.pace is None else f", held to {self.pace:g} times that"
        return (
            f"its bandwidth follows from {self.measured_s * 1e3:.0f} ms of measured compute{held}: all weights and "
            f"collectives would keep the link busy for {self.share:.2f} of the resident step"
        )

    def bandwidth(self, problem: Problem) -> float:
        """Return the bandwidth into a rank in bytes/s: the solution B of (W + A) / B = share (compute + n e + A / B).

        W: the bytes of the weights that may stream.  A: the bytes of the n collectives in a step.  e: the overhead of a
        collective.  If collectives use a second port with p times the bandwidth, B solves W / B = share (compute + n e +
        A / (p B)).  Raises ChunkflowError if there is no solution.  A large load may be impossible, because collectives
        make the resident step longer, too.
        """
        weights = sum(w.nbytes for w in problem.weights if w.keep is None)
        exchanged = sum(c.nbytes for c in problem.collectives)
        uncontended_s = self.compute_s + len(problem.collectives) * EXCHANGE_S
        shared = 0 if self.peers else exchanged  # A on the left side of the equation, if collectives share the port
        needed = weights + shared - self.share * exchanged / (self.peers or 1)
        if needed <= 0:
            most = 1 + weights / exchanged
            raise ChunkflowError(
                f"A load of {self.share} cannot be reached: on any link, that of this model is below {most:.2f}. "
                "Give a smaller load."
            )
        return needed / (self.share * uncontended_s)


@dataclass(frozen=True)
class LinkError:
    """The accuracy of an emulated link, in bytes/s.  ``requested``: the requested bandwidth.  ``alone``: the measured
    bandwidth of copies alone.  ``shared``: the measured bandwidth of all lanes together."""

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
    """Measure the accuracy of an emulated link.  Each rank uses a private port, because on a shared port the traffic of
    other ranks would appear as an error."""
    link = replace(link, shared="", latency_s=0.0)
    count = max(4, round(_TRANSFERS_S * link.bandwidth / _TRANSFER))
    copies, port = chain(Port(link), "copy", count), Port(link)
    with ThreadPoolExecutor(len(LANES)) as threads:
        lanes = threads.map(lambda lane: chain(port, lane, count), LANES)
        return LinkError(link.bandwidth, alone=copies, shared=sum(lanes))


def chain(port: Port, lane: LaneName, count: int) -> float:
    """Send ``count`` transfers of 1 MiB in one lane, one after another; return their bandwidth in bytes/s."""
    start = since = port.clock.now()
    for _ in range(count):
        since = port.send(lane, _TRANSFER, since)
    return count * _TRANSFER / (since - start)
