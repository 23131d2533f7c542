"""Profiles of GPUs, each derived from the profile of a similar GPU by means of data sheets and published measurements.

The rates of GEMMs and attention are scaled by the number of multiprocessors, or by a published GEMM rate of the GPU.
All other figures are from the data sheet of the GPU, proportional to a figure from it, or equal to the figures of the
similar GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chunkflow_compile.passes.hardware import Hardware

GIB = 1 << 30
# Bytes/s per lane and direction, by PCIe generation.
_LANE = {3: 15.75e9 / 16, 4: 31.5e9 / 16, 5: 63e9 / 16}
_TESTS = "zzc0721/torch-performance-test-data (database.md)"


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """A GPU, described by its differences from the GPU of the profile ``like``.

    ``cards``: the names that the driver reports for this GPU.  ``processors``: the numbers of multiprocessors in this
    GPU and in the similar GPU.  ``bandwidth``: bytes/s of its memory.  ``cache_bytes``: size of its L2 cache in bytes.
    ``pcie``: generation of its PCIe link, and number of lanes.  ``memory``: size of its memory in GiB.
    ``more``: other figures that differ, as field of ``Hardware`` -> (value, source).
    """

    like: str
    cards: tuple[str, ...]
    processors: tuple[int, int]
    bandwidth: float
    cache_bytes: int
    pcie: tuple[int, int]
    memory: int
    more: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def profile(self, name: str, like: Hardware) -> Hardware:
        """Return the profile called ``name``.  ``like``: the profile of the similar GPU."""
        mine, other = self.processors
        times, (generation, lanes) = mine / other, self.pcie
        link = _LANE[generation] * lanes
        # collectives usually reach three quarters of the PCIe bandwidth, or three eighths without peer access
        share = like.collective_bandwidth / like.h2d_bandwidth
        cache = like.cache_bandwidth / like.memory_bandwidth
        gemm, gemm_source = self.more.get("gemm_flops", ({}, ""))
        scaled = f"assumption: {like.name} by number of multiprocessors ({mine} of {other})"
        if gemm:
            times = gemm["bfloat16"] / like.gemm_flops["bfloat16"]
            scaled = f"assumption: {like.name} by GEMM rate"
        figures: dict[str, tuple[Any, str]] = {
            "gemm_flops": (
                gemm or {dtype: times * rate for dtype, rate in like.gemm_flops.items()},
                gemm_source or scaled,
            ),
            "attention_flops": ({kernel: times * rate for kernel, rate in like.attention_flops.items()}, scaled),
            "memory_bandwidth": (self.bandwidth, "data sheet"),
            "memory_bytes": (self.memory * GIB, f"data sheet: {self.memory} GB"),
            "cache_bytes": (self.cache_bytes, "data sheet or architecture whitepaper: L2"),
            "multiprocessors": (mine, "data sheet: streaming multiprocessors"),
            "cache_bandwidth": (
                cache * self.bandwidth,
                f"assumption: as {like.name}, the L2 moves {cache:.1f} times the bytes of the memory after it",
            ),
            "h2d_bandwidth": (link, f"PCIe {generation}.0 x{lanes}, {link / 1e9:.4g} GB/s a direction"),
            "collective_bandwidth": (share * link, like.sources["collective_bandwidth"]),
            **{figure: given for figure, given in self.more.items() if figure != "gemm_flops"},
        }
        return replace(
            like,
            name=name,
            cards=self.cards,
            **{figure: value for figure, (value, _) in figures.items()},
            sources={**like.sources, **{figure: source for figure, (_, source) in figures.items()}},
        )


_NO_HOST = {"host_bandwidth": (0.0, "0: not known; chunkflow calibrate measures it on all cards at once")}


def _float16_figures(half: float, single: float, brain: float, source: str) -> dict[str, tuple[Any, str]]:
    """Return figures for a GPU whose tensor cores support float16 only.

    ``half``, ``single``, ``brain``: FLOP/s of GEMMs in float16, float32 and bfloat16.  Plans do not use ``brain``; it is
    only mentioned in the text about the source of the figures.
    """
    efficient = 0.48 * half
    return {
        "gemm_flops": (
            {"bfloat16": half, "float16": half, "float32": single},
            f"{source}.  bfloat16: this card has no tensor cores for it ({brain / 1e12:.3g} TFLOP/s); a plan in bfloat16 "
            "stands for the same model loaded in float16, which has as many bytes",
        ),
        "attention_flops": (
            {"efficient": efficient},
            "assumption: 0.48 of the GEMM rate, 0.55 of the share that FlashAttention-2 reaches on Ampere cards",
        ),
        "attention": (
            "efficient",
            "FlashAttention-2 needs compute capability 8.0, so torch takes its efficient kernel",
        ),
        "eta_masked": (1.0, "assumption: the efficient kernel takes a mask as fast as none"),
        "eta_gemm": (0.87, "assumption: as a100-40gb-pcie"),
        **_NO_HOST,
    }


# Profile name -> a GPU, described by its differences from a similar GPU.  Multiprocessors, clocks, caches, links and
# memories are from NVIDIA's architecture white papers (GA102, AD102, Blackwell RTX, Volta, Turing), product pages and
# data sheets.
SIBLINGS: Mapping[str, Sibling] = {
    "rtx-3060-pcie": Sibling(
        like="rtx-3090-pcie",
        cards=("NVIDIA GeForce RTX 3060",),
        processors=(28, 82),
        bandwidth=360e9,
        cache_bytes=3 << 20,
        pcie=(4, 16),
        memory=12,
    ),
    "rtx-3080-pcie": Sibling(
        like="rtx-3090-pcie",
        cards=("NVIDIA GeForce RTX 3080",),
        processors=(68, 82),
        bandwidth=760e9,
        cache_bytes=5 << 20,
        pcie=(4, 16),
        memory=10,
    ),
    "rtx-4060-ti-pcie": Sibling(
        like="rtx-4090-pcie",
        cards=("NVIDIA GeForce RTX 4060 Ti",),
        processors=(34, 128),
        bandwidth=288e9,
        cache_bytes=32 << 20,
        pcie=(4, 8),
        memory=16,
    ),
    "rtx-4070-ti-super-pcie": Sibling(
        like="rtx-4090-pcie",
        cards=("NVIDIA GeForce RTX 4070 Ti SUPER",),
        processors=(66, 128),
        bandwidth=672e9,
        cache_bytes=48 << 20,
        pcie=(4, 16),
        memory=16,
    ),
    "rtx-5060-ti-pcie": Sibling(
        like="rtx-5090-pcie",
        cards=("NVIDIA GeForce RTX 5060 Ti",),
        processors=(36, 170),
        bandwidth=448e9,
        cache_bytes=32 << 20,
        pcie=(5, 8),
        memory=16,
    ),
    "rtx-5070-ti-pcie": Sibling(
        like="rtx-5090-pcie",
        cards=("NVIDIA GeForce RTX 5070 Ti",),
        processors=(70, 170),
        bandwidth=896e9,
        cache_bytes=48 << 20,
        pcie=(5, 16),
        memory=16,
    ),
    "a10g-pcie": Sibling(
        like="rtx-3090-pcie",
        cards=("NVIDIA A10G",),
        processors=(80, 82),
        bandwidth=600e9,
        cache_bytes=6 << 20,
        pcie=(4, 16),
        memory=24,
        more={
            "collective_bandwidth": (23.6e9, "assumption: three quarters of the link, as fitted for h100-pcie-x2"),
            "peer_bandwidth": (0.0, "0: over PCIe"),
            **_NO_HOST,
        },
    ),
    "l4-pcie": Sibling(
        like="l40-pcie",
        cards=("NVIDIA L4",),
        processors=(58, 142),
        bandwidth=300e9,
        cache_bytes=48 << 20,
        pcie=(4, 16),
        memory=24,
        more=_NO_HOST,
    ),
    "rtx-a5000-pcie": Sibling(
        like="rtx-a6000-pcie",
        cards=("NVIDIA RTX A5000",),
        processors=(64, 84),
        bandwidth=768e9,
        cache_bytes=6 << 20,
        pcie=(4, 16),
        memory=24,
    ),
    "v100-pcie": Sibling(
        like="a100-40gb-pcie",
        cards=("Tesla V100-PCIE-32GB", "Tesla V100-PCIE-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB"),
        processors=(80, 108),
        bandwidth=900e9,
        cache_bytes=6 << 20,
        pcie=(3, 16),
        memory=32,
        more=_float16_figures(
            half=85e12,
            single=13e12,
            brain=9.5e12,
            source=f"measured: a large GEMM on a V100S, 88.9, 13.6 in float32, {_TESTS}; 125 of its 130 by data sheet",
        ),
    ),
    "t4-pcie": Sibling(
        like="a100-40gb-pcie",
        cards=("Tesla T4",),
        processors=(40, 108),
        bandwidth=320e9,
        cache_bytes=4 << 20,
        pcie=(3, 16),
        memory=16,
        more=_float16_figures(
            half=42e12,
            single=4.3e12,
            brain=2.4e12,
            source=f"measured: a large GEMM, 41.9 and 42.7 on two cards, {_TESTS}",
        ),
    ),
}
