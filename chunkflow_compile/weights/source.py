"""Sources of copies to the device: host memory, a file on the SSD, or the devices of the ranks."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ring import BLOCK

from .bytes import copy_host_bytes, memory_of
from .mapping import Descriptor, map_file, written_pages
from .peer_pieces import Pieces

# Bytes of a file to compare with memory at a time.
_COMPARED = 1 << 22


class WeightFile:
    """A file with weights, which is opened once for all of them.

    ``name``: the name of the file in error messages.  ``stamp``: for a checkpoint, its device and inode numbers and its
    modification time in ns, which must not change; None for a scratch file.  ``read_bytes``: bytes read so far.
    ``left``: the addresses of pages that were mapped from the file and are private memory now.  Only the first and the
    last page of each moved weight are recorded, because other weights may share them.
    """

    def __init__(self, opened: Descriptor | Path, name: str, stamp: tuple[tuple[int, int], int] | None = None) -> None:
        """``opened``: the open file, or the path of a file that is opened when it is first used."""
        self.name = name
        self.stamp = stamp
        self.read_bytes = 0
        self.left: set[int] = set()
        self._opened = opened

    @property
    def descriptor(self) -> Descriptor:
        """The open file.  Raises ChunkflowError if the file cannot be opened, for example because it was deleted."""
        if isinstance(self._opened, Path):
            try:
                self._opened = Descriptor(os.open(self._opened, os.O_RDONLY))
            except OSError as error:
                raise ChunkflowError(
                    f"{self._title} cannot be opened: {error.strerror or error}. Bring the file back, and load the model "
                    "again."
                ) from error
        return self._opened

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill a host tensor (uint8) with the bytes of the file from ``offset`` on.  Raises ChunkflowError if the read
        fails or the file has changed."""
        self._fill(self.descriptor.number, memory_of(target), offset, offset, target.numel())

    def read_direct(self, memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        """Read into ``memory`` without using the page cache, if the file system supports that; return the bytes as a
        view of ``memory``.

        ``memory``: uint8, page-aligned, large enough for all blocks of the file that contain the bytes.  Raises the same
        errors as :meth:`read`.
        """
        begin = offset % BLOCK
        values = memory[begin : begin + nbytes]
        if (direct := self._direct) is not None:
            blocks = memory_of(memory[: -(-(begin + nbytes) // BLOCK) * BLOCK])
            try:
                self._fill(direct.number, blocks, offset - begin, offset, nbytes)
                return values
            except ChunkflowError as error:
                if getattr(error.__cause__, "errno", None) != errno.EINVAL:
                    raise
                self._direct = None
        self.read(values, offset)
        return values

    @cached_property
    def _direct(self) -> Descriptor | None:
        """The file, opened a second time for direct reads, or None if the file system does not support direct reads."""
        try:
            # a file without a name can be reopened through /proc
            return Descriptor(os.open(f"/proc/self/fd/{self.descriptor.number}", os.O_RDONLY | os.O_DIRECT))
        except (OSError, AttributeError):
            return None

    def _fill(self, number: int, target: memoryview, begin: int, offset: int, nbytes: int) -> None:
        """Read the file into ``target``, from byte ``begin`` of the file until at least byte ``offset + nbytes``."""
        at, end = begin, offset + nbytes
        try:
            while at < end and (count := os.preadv(number, [target[at - begin :]], at)):
                at += count
        except OSError as error:
            raise ChunkflowError(
                f"{self._title} cannot be read at byte {offset}: {error.strerror or error}. Check the drive, or copy the "
                "file to another one, and load the model again."
            ) from error
        self.check()
        if at < end:
            raise ChunkflowError(f"{self._title} ends at byte {at}: load the model again.")
        self.read_bytes += nbytes

    def check(self) -> None:
        """Raise ChunkflowError if this is a checkpoint that has changed.  Reading the mapping of a truncated file would
        kill the process."""
        if self.stamp is None:
            return
        try:
            status = os.fstat(self.descriptor.number)
        except OSError as error:  # for example on a network file system
            raise ChunkflowError(
                f"{self._title} cannot be looked at: {error.strerror or error}. Check the drive, and load the model again."
            ) from error
        if ((status.st_dev, status.st_ino), status.st_mtime_ns) != self.stamp:
            raise ChunkflowError(f"{self._title} was changed while its weights were read: load the model again.")

    @property
    def _title(self) -> str:
        return self.name[:1].upper() + self.name[1:]


@dataclass(frozen=True)
class DriveBytes:
    """A range of bytes in a file, as a source of copies.  It has the methods of a flat uint8 tensor that copies use."""

    file: WeightFile
    offset: int
    nbytes: int

    def numel(self) -> int:
        return self.nbytes

    def is_pinned(self) -> bool:
        return False

    def __getitem__(self, part: slice) -> DriveBytes:
        begin, end, _ = part.indices(self.nbytes)
        return DriveBytes(self.file, self.offset + begin, max(0, end - begin))

    def read(self, target: torch.Tensor) -> None:
        """Read the bytes into a host tensor (uint8, equal sizes).  Raises the same errors as
        :meth:`WeightFile.read`."""
        self.file.read(target, self.offset)

    def read_direct(self, memory: torch.Tensor) -> torch.Tensor:
        """Read the bytes without using the page cache, see :meth:`WeightFile.read_direct`."""
        return self.file.read_direct(memory, self.offset, self.nbytes)

    def mapped(self) -> torch.Tensor:
        """Map the bytes privately as uint8, so that writes do not reach the file.  Raises ChunkflowError if mmap fails."""
        pages = map_file(self.file.descriptor, self.nbytes, mmap.MAP_PRIVATE, self.offset)
        if pages is None:
            raise ChunkflowError(f"A weight in {self.file.name} cannot be mapped: {os.strerror(ctypes.get_errno())}.")
        return pages

    def differ_from(self, mapping: torch.Tensor) -> bool:
        """Whether a private mapping of these bytes (uint8, equal sizes) was written and now differs from the file.
        Raises the same errors as :meth:`read`."""
        for begin, end in written_pages(mapping):
            for part in mapping[begin:end].split(_COMPARED):
                now = torch.empty_like(part)
                self.file.read(now, self.offset + part.data_ptr() - mapping.data_ptr())
                if not torch.equal(now, part):
                    return True
        return False

    def read_all(self) -> torch.Tensor:
        """Read the bytes into new host memory."""
        values = torch.empty(self.nbytes, dtype=torch.uint8)
        self.read(values)
        return values


# The types of sources for copies to the device.
Bytes = torch.Tensor | DriveBytes | Pieces


def take(target: torch.Tensor, source: Bytes) -> None:
    """Copy the bytes of any source into host memory (uint8, equal sizes) on the calling thread."""
    if isinstance(source, DriveBytes):
        source.read(target)
    elif isinstance(source, Pieces):
        for part, values in source.copies(target):
            copy_host_bytes(part, values)
    else:
        copy_host_bytes(target, source)
