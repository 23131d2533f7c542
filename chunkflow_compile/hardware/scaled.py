"""Estimated profiles, for GPUs without a profile: a profile of the same architecture is scaled by the properties that
the driver reports for the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from chunkflow_compile.passes.hardware import Hardware

# The assumed factor by which attention and a collective over PCIe slow each other down, and its source.
ON_PCIE = 1.1
NO_PCIE_FIGURE = "assumption, not measured: NCCL drives PCIe by few multiprocessors, as in the built-in profiles"


class Properties(Protocol):
    """The properties of a GPU from ``torch.cuda.get_device_properties``.  Clocks are in kHz, the bus width is in bits."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    L2_cache_size: int
    total_memory: int


# Compute capability -> (name of a profile of that architecture, number of multiprocessors of its GPU, maximum clock in
# kHz), from data sheets.  The rates of GEMMs and attention are assumed to be proportional to the product of
# multiprocessors and clock.
_LIKE: Mapping[tuple[int, int], tuple[str, int, int]] = {
    (7, 0): ("v100-pcie", 80, 1_530_000),
    (7, 5): ("t4-pcie", 40, 1_590_000),
    (8, 0): ("a100-80gb-nvlink", 108, 1_410_000),
    (8, 6): ("rtx-3090-pcie", 82, 1_695_000),
    (8, 9): ("rtx-4090-pcie", 128, 2_520_000),
    (9, 0): ("h100-nvlink", 132, 1_980_000),
    (10, 0): ("b200", 148, 1_965_000),
    (12, 0): ("rtx-5090-pcie", 170, 2_407_000),
}


def similar_profile(properties: Properties) -> str:
    """Return the name of the profile to scale for a GPU.  It is a profile of the GPU's architecture or, if there is
    none, of the latest architecture before it."""
    return _nearest(properties)[0]


def scaled(properties: Properties, like: Hardware) -> Hardware:
    """Return an estimated profile of a GPU.  ``like``: the profile that :func:`similar_profile` names.

    The PCIe bandwidth is taken from ``like``, and the rates of GEMMs and attention are scaled by the properties of the
    GPU.  The connection to other GPUs is not known, so it is assumed to be PCIe.
    """
    name, processors, clock = _nearest(properties)
    # values that a driver does not report are 0
    ratios = {"multiprocessors": properties.multi_processor_count / processors, "clock": properties.clock_rate / clock}
    ratios = {what: times for what, times in ratios.items() if times}
    faster = math.prod(ratios.values())
    memory = 2 * 1000 * properties.memory_clock_rate * properties.memory_bus_width / 8  # two transfers per clock cycle
    how = f"as {name}: its driver tells nothing"
    if ratios:
        how = f"scaled from {name} by {' and '.join(ratios)}, {faster:.2f} times"
    sources = {
        **like.sources,
        "gemm_flops": how,
        "attention_flops": how,
        "memory_bytes": "its driver",
        "multiprocessors": "its driver",
        "collective_bandwidth": "assumption: three quarters of PCIe",
        "shared_link": "assumption: PCIe carries copies and collectives alike",
        "copy_slowdown": "assumption: a fair share",
        "collective_slowdown": "assumption: a fair share",
        "attention_slowdown": NO_PCIE_FIGURE,
        "peer_bandwidth": "0: a link between cards is not known",
        "host_bandwidth": "not known: chunkflow calibrate measures it on all cards of the machine at once",
    }
    if memory:
        sources["memory_bandwidth"] = "its driver: memory clock and width of the bus"
    if properties.L2_cache_size:
        sources["cache_bytes"] = "its driver"
    return replace(
        like,
        name=f"scaled for {properties.name}",
        cards=(),
        gemm_flops={dtype: faster * rate for dtype, rate in like.gemm_flops.items()},
        attention_flops={kernel: faster * rate for kernel, rate in like.attention_flops.items()},
        memory_bandwidth=memory or like.memory_bandwidth,
        memory_bytes=properties.total_memory,
        cache_bytes=properties.L2_cache_size or like.cache_bytes,
        multiprocessors=properties.multi_processor_count,
        collective_bandwidth=min(like.collective_bandwidth, 0.75 * like.h2d_bandwidth),
        shared_link=True,
        copy_slowdown=2.0,
        collective_slowdown=2.0,
        attention_slowdown=ON_PCIE,
        peer_bandwidth=0.0,
        host_bandwidth=0.0,
        sources=sources,
    )


def _nearest(properties: Properties) -> tuple[str, int, int]:
    capability = properties.major, properties.minor
    return _LIKE[max((listed for listed in _LIKE if listed <= capability), default=min(_LIKE))]
