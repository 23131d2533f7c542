"""Host memory from which a GPU can copy directly: whole pages for each weight, on the NUMA node of the GPU.

torch's pinned allocator rounds sizes up to powers of two.  This module rounds the size of a weight up to whole pages only.
No two weights share a page, so each weight can be pinned and unpinned separately.
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

from .bytes import as_weight, cast_on_this_thread, copy_host_bytes, flat_bytes
from .mapping import advise_for_copies
from .staging import GpuStagings

# Number of elements that are cast at a time.
_CAST = 1 << 22


def empty_pages(like: torch.Tensor) -> torch.Tensor:
    """Allocate a host tensor on separate, unwritten pages, with the shape, strides and dtype of the dense tensor
    ``like``."""
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = torch.frombuffer(memory, dtype=torch.uint8)[: like.nbytes]
    advise_for_copies(pages)
    return as_weight(pages, like)


def fill(target: torch.Tensor, values: torch.Tensor, cpus: frozenset[int], stagings: GpuStagings) -> None:
    """Write the values of a dense tensor into a host tensor of the same shape and strides, on the calling thread alone.

    ``cpus``: the CPUs of the NUMA node on which to allocate the pages, from :func:`near_cpus`; empty for any node.
    """

    with running_on(cpus):  # the kernel allocates a page on the NUMA node of the thread that first writes to it
        _fill(target, values, stagings)


def _fill(target: torch.Tensor, values: torch.Tensor, stagings: GpuStagings) -> None:
    if not target.numel():
        return
    if target.dtype != values.dtype:
        # cast in pieces, because casting a whole tensor on a GPU would allocate GPU memory for all of its values
        target, source = target.as_strided((target.numel(),), (1,)), values.as_strided((values.numel(),), (1,))
        for part, piece in zip(target.split(_CAST), source.split(_CAST), strict=True):
            if piece.device.type == "cpu":
                cast_on_this_thread(part, piece)
            else:
                part.copy_(piece.to(target.dtype))
    elif values.device.type == "cpu":
        copy_host_bytes(flat_bytes(target), flat_bytes(values))
    else:
        stagings.fetch(flat_bytes(target), flat_bytes(values))


def give_free_memory_back() -> None:
    """Return freed memory from the C library's allocator to the system.  After a model was loaded, the freed memory that
    the allocator holds may be half as large as the model."""

    with contextlib.suppress(AttributeError, OSError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def near_cpus(device: torch.device) -> frozenset[int]:
    """Return the CPUs on the NUMA node of a GPU; empty if this node is unknown, or if the machine has a single node."""
    if device.type != "cuda" or len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return parse_cpus(Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of CPUs in the format of Linux, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


@contextlib.contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Restrict the calling thread to ``cpus`` inside the context, unless the thread may not run on any of them."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if not (cpus & before):
        yield
        return
    os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
