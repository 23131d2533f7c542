"""The accuracy of an emulated link on this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.runtime.link import LANES, LaneName, Port

_TRANSFER = 1 << 20
# Seconds of link time in a measurement: long compared with the milliseconds by which a thread wakes up late.
_TRANSFERS_S = 0.25


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
    return LinkError(link.bandwidth, chain(Port(link), "copy", count), together(Port(link), count))


def chain(port: Port, lane: LaneName, count: int) -> float:
    """Bytes/s of ``count`` transfers of 1 MiB in one lane, each sent when the one before has ended."""
    start = since = port.clock.now()
    for _ in range(count):
        since = port.send(lane, _TRANSFER, since)
    return count * _TRANSFER / (since - start)


def together(port: Port, count: int) -> float:
    """Bytes/s of all lanes in sum, while all of them send."""
    with ThreadPoolExecutor(len(LANES)) as threads:
        return sum(threads.map(lambda lane: chain(port, lane, count), LANES))
