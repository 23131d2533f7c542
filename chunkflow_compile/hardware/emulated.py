"""A profile with an emulated PCIe link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chunkflow_compile.passes.hardware import Hardware, LinkEmulation

# The seconds that a gloo all-to-all of a few KiB takes between processes on one machine.
EXCHANGE_S = 1e-3


def on_emulated_link(hardware: Hardware, link: LinkEmulation, ranks: int) -> Hardware:
    """Return a profile like ``hardware``, but with the emulated link ``link`` for copies and collectives.

    If ``link.shared`` is set, all ``ranks`` ranks use one emulated link; otherwise, each rank uses a separate link.  If
    ``link.peers`` is set, collectives and pulls from other ranks use a second emulated link.
    """
    rate = link.bandwidth / (ranks if link.shared else 1)
    together = link.bandwidth if link.shared else 0.0
    # the fraction of an exchange during which gloo uses the same CPU cores as attention
    moving = min(1.0, (link.peers or rate) / hardware.collective_bandwidth)
    by = f"emulated, {link.order}, {'all ranks' if link.shared else 'each rank'} {link.bandwidth:g} bytes/s"
    figures: dict[str, Any] = {
        "h2d_bandwidth": link.bandwidth,
        "host_bandwidth": together,
        "eta_pref": 1.0,
        "chunk_s": 0.0,
        "collective_bandwidth": link.peers or rate,
        "collective_latency_s": EXCHANGE_S + link.latency_s,
        "shared_link": not link.peers,
        "copy_slowdown": 1.0 if link.peers else 2.0,
        "collective_slowdown": 1.0 if link.peers else 2.0,
        "attention_slowdown": round(1.0 + moving, 3),
        "peer_bandwidth": link.peers,
        "pull_slowdown": 2.0,
        "collective_pull_slowdown": 2.0,
        "compute_pull_slowdown": hardware.compute_slowdown,
    }
    return replace(
        hardware,
        name=f"{hardware.name}, emulated link",
        **figures,
        sources={**hardware.sources, **dict.fromkeys(figures, by)},
        link_emulation=link,
    )
