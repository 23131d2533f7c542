"""The card and its link by themselves: versions, pinning, copies, and copies beside matrix products."""

from __future__ import annotations

import ctypes
import platform
import time
from dataclasses import asdict, dataclass

import torch

from chunkflow_compile.hardware.beside import MIB, median_seconds
from chunkflow_compile.hardware.machine import Machine, device_name
from chunkflow_compile.report.record import size
from chunkflow_compile.runtime.cuda import register
from chunkflow_compile.weights.host_memory import empty_pages, near_cpus, running_on

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """Bytes, and seconds for them.  ``fill_s``: until the pages are written; then ``pin_s`` and ``unpin_s``.

    ``pinned_s``, ``pageable_s``: to copy ``copied`` bytes to the card.  ``product_s``: matrix products that take about as
    long as the pinned copy; ``both_s``: these and the copy on a stream of its own, at the same time.  These four are medians.
    """

    versions: str
    pinned: int
    fill_s: float
    pin_s: float
    unpin_s: float
    copied: int
    pinned_s: float
    pageable_s: float
    product_s: float
    both_s: float

    @property
    def overlap(self) -> float:
        """How much of the shorter of the two is hidden under the other: 1 all of it, 0 nothing."""
        return (self.pinned_s + self.product_s - self.both_s) / min(self.pinned_s, self.product_s)

    def lines(self) -> list[str]:
        """In words, a line each."""
        return [
            self.versions,
            f"{size(self.pinned)} of host memory: written in {self.fill_s:.2f} s, pinned in {self.pin_s:.2f} s "
            f"({self.pinned / self.pin_s / 1e9:.1f} GB/s), given back in {self.unpin_s:.2f} s",
            f"{size(self.copied)} to the card: {self.copied / self.pinned_s / 1e9:.1f} GB/s from pinned memory, "
            f"{self.copied / self.pageable_s / 1e9:.1f} GB/s from pageable memory",
            f"beside matrix products of {1e3 * self.product_s:.1f} ms, the copy of {1e3 * self.pinned_s:.1f} ms: both take "
            f"{1e3 * self.both_s:.1f} ms, so {100 * self.overlap:.0f} % of the shorter one is hidden",
        ]

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "overlap": self.overlap}


def measure(device: torch.device, machine: Machine, nbytes: int = 8 * GIB, side: int = 8192) -> Card:
    """Pin ``nbytes``, copy an eighth of them, and multiply square matrices of ``side`` beside the copy.

    At most a quarter of the free host memory.  Raises OSError if it cannot be pinned.
    """
    nbytes = min(nbytes, machine.available_bytes // 4 // MIB * MIB)
    start = time.perf_counter()
    host = empty_pages(torch.empty(nbytes, dtype=torch.uint8), torch.uint8)
    with running_on(near_cpus(device)):
        ctypes.memset(host.data_ptr(), 1, nbytes)
    fill_s = time.perf_counter() - start
    start = time.perf_counter()
    unpin = register(host, device)
    pin_s = time.perf_counter() - start
    try:
        part = host[: nbytes // 8]
        target = torch.empty_like(part, device=device)
        copies = torch.cuda.Stream(device)

        def copy() -> None:
            with torch.cuda.stream(copies):
                target.copy_(part, non_blocking=True)

        pinned_s = median_seconds(device, copy)
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        times = max(1, round(pinned_s / median_seconds(device, lambda: a @ b)))

        def products() -> None:
            for _ in range(times):
                _ = a @ b

        product_s = median_seconds(device, products)
        both_s = median_seconds(device, lambda: (copy(), products()))
    finally:
        start = time.perf_counter()
        unpin()
        unpin_s = time.perf_counter() - start
    pageable_s = median_seconds(device, lambda: target.copy_(part))
    return Card(
        _versions(device, machine), nbytes, fill_s, pin_s, unpin_s, part.nbytes, pinned_s, pageable_s, product_s, both_s
    )


def _versions(device: torch.device, machine: Machine) -> str:
    return (
        f"{device_name(device)}, driver {machine.driver}, CUDA {torch.version.cuda}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {machine.cpus} cores"
    )
