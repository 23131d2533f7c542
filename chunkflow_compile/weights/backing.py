"""Where the bytes of a weight lie, if not in memory of this process alone: in memory of several ranks, or in a file.

A write makes a weight private, whatever backs it: it gets memory of its own first, at the same address.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .limits import no_room
from .mapping import Descriptor, map_file, map_over, own_memory
from .source import DriveBytes


class SharedMemory:
    """Memory that other ranks map too.  ``host``: the weight's values there."""

    def __init__(self, descriptor: Descriptor, offset: int, host: torch.Tensor) -> None:
        self.host = host
        self._descriptor = descriptor
        self._offset = offset

    def make_private(self, name: str) -> None:
        """Give the weight memory of its own, with the same bytes at the same address.  Nothing reads it now.

        ``name``: for errors.  Raises ChunkflowError if there is no room.
        """
        if (cause := no_room(self.host.nbytes)) is not None:
            raise ChunkflowError(_no_memory(self.host, cause))
        try:
            own_memory(self.host, set())
        except OSError as error:
            raise ChunkflowError(_no_memory(self.host, error.strerror or str(error))) from error

    def leave(self) -> None:
        """Unmap the memory, which nothing here refers to: the mapping around it lasts as long as any weight in it."""
        map_over(self.host, None)

    def copy_on_write(self) -> None:
        """As :meth:`make_private`, without memory: a page takes some when it is written.  Keeps all of the shared memory.

        Where the kernel refuses, it stays shared, which is right until it is written.
        """
        map_over(self.host, self._descriptor, self._offset)

    def to_write(self, view: torch.Tensor) -> torch.Tensor:
        """A view of the values as an ordinary tensor.  It takes no memory until it is written, and only it sees the writes.

        Raises ChunkflowError if there is no memory.
        """
        pages = map_file(self._descriptor, self.host.nbytes, mmap.MAP_PRIVATE, self._offset)
        if pages is None:
            raise ChunkflowError(_no_memory(self.host, os.strerror(ctypes.get_errno())))
        begin = (view.data_ptr() - self.host.data_ptr()) // view.element_size()
        return pages.view(view.dtype).as_strided(view.shape, view.stride(), begin)


class FileSlice:
    """Bytes of a file on the drive.  ``host``: the weight's values, a mapping of them whose writes the file does not see."""

    def __init__(self, host: torch.Tensor, found: DriveBytes) -> None:
        self.host = host
        self._bytes = found
        self._version = host._version

    @property
    def bytes(self) -> DriveBytes | None:
        """What copies read; None once the mapping was written."""
        return self._bytes if self._version == self.host._version else None

    @property
    def scratch(self) -> bool:
        """Whether it is a scratch file, and not a checkpoint."""
        return self._bytes.file.stamp is None

    def check(self) -> None:
        """Raise ChunkflowError if the file has changed: to touch the mapping could kill the process."""
        self._bytes.file.check()

    def make_private(self, name: str) -> None:
        """As :meth:`SharedMemory.make_private`."""
        nbytes = self.host.nbytes
        if (cause := no_room(nbytes)) is not None:
            raise ChunkflowError(
                f"{name} is written, and goes from the drive into host memory for that, but its {size(nbytes)} find no room "
                f"there: {cause}. Free host memory, or write before the model is placed."
            )
        try:
            own_memory(self.host, self._bytes.file.left)
        except OSError as error:
            raise ChunkflowError(f"{name} ({size(nbytes)}) cannot be written: {error.strerror}.") from error


# Where the bytes of the host tensor of a weight lie.
Backing = SharedMemory | FileSlice


def _no_memory(weight: torch.Tensor, cause: str) -> str:
    return (
        f"A shared weight of {size(weight.nbytes)} cannot be given memory of its own: {cause}. "
        "Free host memory, or place the model with share=False."
    )
