"""Where the bytes of a weight lie: in memory of this process alone, in memory of several ranks, or in a file on the drive.

:class:`HostBuffer` decides when they move; here is how each place does that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from enum import Enum

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .bytes import flat_bytes
from .limits import no_room
from .mapping import Descriptor, map_file, map_over, own_memory
from .source import DriveBytes


class Where(Enum):
    """The place of a weight's bytes, see the note in ``host_buffer.py``."""

    OWN = "memory of this process alone"
    SHARED = "memory that other ranks map too"
    FILE = "a file on the drive"
    FILE_WRITTEN = "a file on the drive, whose mapping this process has written"


class Backing:
    """Memory of this process alone; of the other places, what differs.

    ``host``: the weight's values there.  ``stored``: what copies read, another tensor if the values are ``compressed``.
    ``bytes``: those of the file of which that is a mapping, None in memory.
    """

    compressed = False
    bytes: DriveBytes | None = None

    def __init__(self, host: torch.Tensor, stored: torch.Tensor | None = None) -> None:
        self.host = host
        self.stored = host if stored is None else stored

    @property
    def where(self) -> Where:
        return Where.OWN

    @property
    def file_bytes(self) -> DriveBytes | None:
        """The bytes that copies read from the file, None if they read memory."""
        return self.bytes if self.where is Where.FILE else None

    @property
    def in_scratch_file(self) -> bool:
        return self.bytes is not None and self.bytes.file.stamp is None

    def check(self) -> None:
        """Raise ChunkflowError if it is a file that has changed: to touch the mapping could kill the process."""

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        """Give the weight memory of its own, with the same bytes at the same address; return that.  Nothing reads it now.

        ``name``: for errors.  ``lazily``: where there is no room, a page takes memory when it is written.
        Raises ChunkflowError if there is no room.
        """
        return self

    def view_to_write(self, view: torch.Tensor) -> torch.Tensor:
        """A view of the values as an ordinary tensor, of whose writes no other process sees any."""
        return view.detach()

    def settle(self) -> bool:
        """Whether a tensor of a state_dict was written since this was asked last, in a way that no count sees.  Memory of
        this process cannot tell, so it says yes."""
        return True


class SharedMemory(Backing):
    """Memory that other ranks map too."""

    def __init__(self, descriptor: Descriptor, offset: int, host: torch.Tensor) -> None:
        super().__init__(host)
        self._descriptor = descriptor
        self._offset = offset

    @property
    def where(self) -> Where:
        return Where.SHARED

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        cause = no_room(self.host.nbytes)
        if cause is None:
            try:
                own_memory(self.host, set())
                return Backing(self.host)
            except OSError as error:
                cause = error.strerror or str(error)
        if not lazily:
            raise ChunkflowError(_no_memory(self.host, cause))
        # keeps all of the shared memory; where the kernel refuses, it stays shared, which is right until it is written
        map_over(self.host, self._descriptor, self._offset)
        return Backing(self.host)

    def view_to_write(self, view: torch.Tensor) -> torch.Tensor:
        """It takes no memory until it is written, and only it sees the writes.  Raises ChunkflowError if there is none."""
        pages = map_file(self._descriptor, self.host.nbytes, mmap.MAP_PRIVATE, self._offset)
        if pages is None:
            raise ChunkflowError(_no_memory(self.host, os.strerror(ctypes.get_errno())))
        begin = (view.data_ptr() - self.host.data_ptr()) // view.element_size()
        return pages.view(view.dtype).as_strided(view.shape, view.stride(), begin)

    def leave(self) -> None:
        """Unmap the memory, which nothing here refers to: the mapping around it lasts as long as any weight in it."""
        map_over(self.host, None)


class FileSlice(Backing):
    """Bytes of a file on the drive; the host tensor is a mapping of them whose writes the file does not see."""

    def __init__(self, host: torch.Tensor, in_file: DriveBytes) -> None:
        super().__init__(host)
        self.bytes = in_file
        self._file = in_file.file
        self._version = host._version
        self._written = False  # past every count

    @property
    def where(self) -> Where:
        return Where.FILE_WRITTEN if self._written or self._version != self.host._version else Where.FILE

    def settle(self) -> bool:
        if self.where is Where.FILE and self.bytes is not None:
            self._written = self.bytes.differ_from(flat_bytes(self.host))
        return self.where is Where.FILE_WRITTEN

    def check(self) -> None:
        self._file.check()

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        nbytes = self.host.nbytes
        if (cause := no_room(nbytes)) is not None:
            raise ChunkflowError(
                f"{name} is written, and goes from the drive into host memory for that, but its {size(nbytes)} find no room "
                f"there: {cause}. Free host memory, or write before the model is placed."
            )
        try:
            own_memory(self.host, self._file.left)
        except OSError as error:
            raise ChunkflowError(f"{name} ({size(nbytes)}) cannot be written: {error.strerror}.") from error
        return Backing(self.host)


def _no_memory(weight: torch.Tensor, cause: str) -> str:
    return (
        f"A shared weight of {size(weight.nbytes)} cannot be given memory of its own: {cause}. "
        "Free host memory, or place the model with share=False."
    )
