"""Host memory that a GPU may copy from by itself: whole pages of their own for each weight, near the GPU.

torch's pinned allocator rounds up to powers of two.  Here memory is as large as the weight, up to a page, and pages are
nobody else's, so that they can be pinned and unpinned by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .bytes import copy_host_bytes, flat_bytes

# Of the machine's memory, what one model may pin on all ranks together: what is pinned cannot be swapped out, nor moved.
MOST_PINNED = 0.8


def own_pages(values: torch.Tensor, cpus: frozenset[int]) -> torch.Tensor:
    """A copy of a dense tensor on the host, in pages of its own.

    ``cpus``: of the memory node that they are wanted on, as :func:`near_cpus` tells; empty where it does not matter.
    """
    nbytes = values.numel() * values.element_size()
    pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    made = raw.view(values.dtype).as_strided(values.shape, values.stride()) if nbytes else values.to("cpu", copy=True)
    if nbytes:
        with _running_on(cpus):  # who writes a page first decides where it lies
            if values.device.type == "cpu":
                copy_host_bytes(raw, flat_bytes(values))
            else:
                ctypes.memset(raw.data_ptr(), 0, nbytes)  # this thread, where copy_ may use others
                made.copy_(values)
    return made


def near_cpus(device: torch.device) -> frozenset[int]:
    """The processors on the memory node of a GPU; empty where the machine does not tell, or has one node."""
    if device.type != "cuda" or len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return parse_cpus(Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Numbers of a list as Linux writes it: 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def pin_budget(ranks: int) -> int:
    """Bytes that a model may pin in one of ``ranks`` processes on this machine if it is not told."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(MOST_PINNED * total) // max(1, ranks)


@contextlib.contextmanager
def _running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keeps the calling thread on some processors."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if not (cpus & before):
        yield
        return
    os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
