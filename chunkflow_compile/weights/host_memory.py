"""Host memory that a GPU can copy from directly: whole pages for each weight, near the GPU.

torch's pinned allocator rounds sizes up to powers of two.  Here a weight's size is rounded up to a page only, and no
two weights share a page, so each can be pinned and unpinned on its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .bytes import copy_host_bytes, flat_bytes
from .staging import GpuStaging

# The share of the machine's memory that one model may pin on all ranks together.  The rest is for everything else,
# because pinned pages can be neither swapped out nor moved.
MOST_PINNED = 0.8


# Since this version, a fork copies pages that a device reads for the child.  Before it, the parent's next write to such a
# page moved the parent to a copy, while the device went on reading the old one.
_FORKS_COPY_PINNED = (5, 12)


def own_pages(values: torch.Tensor, cpus: frozenset[int], staging: GpuStaging | None = None) -> torch.Tensor:
    """Copy a dense tensor to the host, into pages of its own.

    ``cpus``: the processors of the memory node to put the pages on, from :func:`near_cpus`; empty for any node.
    ``staging``: fetches the values from their GPU.
    """
    nbytes = values.numel() * values.element_size()
    pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
        if kernel_version(platform.release()) < _FORKS_COPY_PINNED:
            pages.madvise(mmap.MADV_DONTFORK)
    raw = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    made = raw.view(values.dtype).as_strided(values.shape, values.stride()) if nbytes else values.to("cpu", copy=True)
    if nbytes:
        with _running_on(cpus):  # the first thread to write a page decides its memory node
            if values.device.type == "cpu":
                copy_host_bytes(raw, flat_bytes(values))
            elif staging is not None:
                staging.fetch(raw, values)
            else:
                ctypes.memset(raw.data_ptr(), 0, nbytes)  # from this thread; copy_ may use others
                made.copy_(values)
    return made


def kernel_version(release: str) -> tuple[int, int]:
    """The version of a Linux kernel from its release, such as ``5.15.0-91-generic``; (0, 0) if it cannot be read."""
    try:
        major, minor = release.split("-")[0].split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return 0, 0


def near_cpus(device: torch.device) -> frozenset[int]:
    """The processors on the memory node of a GPU; empty if the machine does not say, or has only one node."""
    if device.type != "cuda" or len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return parse_cpus(Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of processors as Linux writes it, such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def pin_budget(ranks: int) -> int:
    """The default for the bytes that a model may pin in each of ``ranks`` processes on this machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(MOST_PINNED * total) // max(1, ranks)


@contextlib.contextmanager
def _running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keep the calling thread on ``cpus`` inside the context, if it may run on any of them."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if not (cpus & before):
        yield
        return
    os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
