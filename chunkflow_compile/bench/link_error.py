"""How well the emulated link keeps to its figures on this machine."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.runtime.link import LANES, LaneName, Port

_TRANSFER = 1 << 20
# Of link time a measurement: long against the milliseconds that a thread wakes up late.
_SECONDS = 0.25


@dataclass(frozen=True)
class LinkError:
    """Bytes/s: what was asked for, what one lane had of it alone, and two lanes together at once."""

    requested: float
    alone: float
    shared: float

    def __str__(self) -> str:
        off = [f"{100 * (rate / self.requested - 1):+.1f} %" for rate in (self.alone, self.shared)]
        return (
            f"a link of {self.requested / 1e6:.1f} MB/s is emulated: {self.alone / 1e6:.1f} alone ({off[0]}) and "
            f"{self.shared / 1e6:.1f} by copies and collectives together ({off[1]})"
        )


def link_error(link: LinkEmulation) -> LinkError:
    """Measures a port of its own: what others on a shared port send would not be an error."""
    link = replace(link, shared="", latency_s=0.0)
    count = max(4, round(_SECONDS * link.bandwidth / _TRANSFER))
    return LinkError(link.bandwidth, chain(Port(link), "copy", count), together(Port(link), count))


def chain(port: Port, lane: LaneName, count: int) -> float:
    """Bytes/s of transfers of a MiB that follow each other."""
    start = since = time.monotonic()
    for _ in range(count):
        since = port.send(lane, _TRANSFER, since)
    return count * _TRANSFER / (since - start)


def together(port: Port, count: int) -> float:
    """Bytes/s of all lanes, while all of them send."""
    rates: dict[str, float] = {}
    threads = [threading.Thread(target=lambda n=n: rates.update({n: chain(port, n, count)})) for n in LANES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates.values())
