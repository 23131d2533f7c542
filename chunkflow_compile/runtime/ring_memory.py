"""The memory of the ring: host pages, pinned where the device can, of this process or of all ranks that read together."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.host_memory import empty_pages
from chunkflow_compile.weights.mapping import Descriptor, map_file, memory_file, prefer_huge_pages

Pin = Callable[[torch.Tensor], Callable[[], None]]


class RingMemory:
    """Whole pages, uint8, which stay pinned as long as this lasts.

    ``bytes``: they.  ``descriptor``: of the file without a name that other ranks map too; None for this process alone.
    """

    def __init__(self, pages: torch.Tensor, pin: Pin, descriptor: Descriptor | None = None) -> None:
        self.bytes = pages
        self.descriptor = descriptor
        with contextlib.suppress(OSError):  # copies from memory that is not pinned are slower, and as right
            weakref.finalize(self, _unpinned, pin(pages)).atexit = False

    @staticmethod
    def own(nbytes: int, pin: Pin) -> RingMemory:
        """For this process alone."""
        return RingMemory(empty_pages(torch.empty(nbytes, dtype=torch.uint8, device="meta"), torch.uint8), pin)

    @staticmethod
    def shared(nbytes: int, pin: Pin) -> RingMemory:
        """To be mapped by other ranks too.  Raises ChunkflowError if the kernel refuses."""
        try:
            return RingMemory.of(memory_file("chunkflow-ring", nbytes), pin)
        except OSError as error:
            raise ChunkflowError(f"A ring of {nbytes} bytes cannot be made: {error.strerror or error}.") from error

    @staticmethod
    def of(descriptor: Descriptor, pin: Pin) -> RingMemory:
        """That of another rank, which has handed its file over.  Raises ChunkflowError if the kernel refuses."""
        nbytes = os.fstat(descriptor.number).st_size
        pages = map_file(descriptor, nbytes, mmap.MAP_SHARED)
        if pages is None:
            raise ChunkflowError(f"A ring of {nbytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}.")
        prefer_huge_pages(pages)
        return RingMemory(pages, pin, descriptor)

    @property
    def file(self) -> int:
        """The number of the file that the ranks share."""
        assert self.descriptor is not None
        return inode(self.descriptor)


def inode(descriptor: Descriptor) -> int:
    """The number of an open file."""
    return os.fstat(descriptor.number).st_ino


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpinned(undo: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the device has failed
        undo()
