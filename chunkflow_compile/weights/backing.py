"""The storage of a weight's bytes: private memory of this process, memory shared by several ranks, or a file on the SSD.

:class:`HostBuffer` decides when the bytes move to private memory.  Each class here implements this move for one type of
storage.
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
    """The storage of a weight's bytes; the module docstring of ``weight_memory.py`` explains the four cases."""

    OWN = "memory of this process alone"
    SHARED = "memory that other ranks map too"
    FILE = "a file on the drive"
    FILE_WRITTEN = "a file on the drive, whose mapping this process has written"


class Backing:
    """Storage in private memory of this process.  The subclasses implement the other types of storage.

    ``host``: the tensor with the weight's values.  ``stored``: the tensor that is copied to the device; it differs from
    ``host`` if the values are ``compressed``.  ``bytes``: the file range that ``stored`` maps, or None if the bytes are
    in memory.
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
        """The file range from which the bytes are copied to the device, or None if they are copied from memory."""
        return self.bytes if self.where is Where.FILE else None

    @property
    def in_scratch_file(self) -> bool:
        return self.bytes is not None and self.bytes.file.stamp is None

    def check(self) -> None:
        """Raise ChunkflowError if the backing file has changed.  Reading the mapping of a truncated file could kill the
        process."""

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        """Move the bytes to private memory without changing their address, and return the new backing.

        The caller makes sure that nothing reads the weight during the move.  ``name``: the weight's name, for error
        messages.
        ``lazily``: if host memory is short, allocate each page only when it is written.
        Raises ChunkflowError if the bytes do not fit in host memory.
        """
        return self

    def view_to_write(self, view: torch.Tensor) -> torch.Tensor:
        """Return a view of the values as an ordinary tensor.  Other processes do not see writes to this tensor."""
        return view.detach()

    def settle(self) -> bool:
        """Return whether the values may have been written since the last call of this method.  This includes writes that
        no version counter records, such as a write through NumPy to a tensor of a state_dict.  The base class returns
        True, because it cannot detect these writes in private memory."""
        return True


class SharedMemory(Backing):
    """Memory that other ranks map as well."""

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
        # Map the pages privately (copy-on-write).  All of the shared memory stays allocated as long as the mapping exists.
        # If mmap fails, the pages stay shared, and a later write by one rank changes the values on all ranks.
        map_over(self.host, self._descriptor, self._offset)
        return Backing(self.host)

    def view_to_write(self, view: torch.Tensor) -> torch.Tensor:
        """Return a private copy-on-write view.  The view takes no memory until it is written, and the writes do not reach
        other mappings.

        Raises ChunkflowError if the kernel cannot map the view.
        """
        pages = map_file(self._descriptor, self.host.nbytes, mmap.MAP_PRIVATE, self._offset)
        if pages is None:
            raise ChunkflowError(_no_memory(self.host, os.strerror(ctypes.get_errno())))
        begin = (view.data_ptr() - self.host.data_ptr()) // view.element_size()
        return pages.view(view.dtype).as_strided(view.shape, view.stride(), begin)

    def leave(self) -> None:
        """Unmap the pages of this weight, which must not be in use any more.  The pages of other weights in the mapping
        stay mapped."""
        map_over(self.host, None)


class FileSlice(Backing):
    """A byte range of a file on the SSD.  The host tensor is a private mapping of this range, so writes to the tensor
    do not reach the file."""

    def __init__(self, host: torch.Tensor, in_file: DriveBytes) -> None:
        super().__init__(host)
        self.bytes = in_file
        self._file = in_file.file
        self._version = host._version
        self._written = False  # whether a write was found that no version counter recorded

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
