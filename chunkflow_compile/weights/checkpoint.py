"""Weights whose values are still in their checkpoint file.  ``from_pretrained`` maps the file, and the kernel reads a
page only when it is first accessed.

Several threads read the values of such a weight from the file directly into new host memory.  A copy through the
mapping would instead fault in the pages of the file one by one, and leave them in the page tables of this process.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .bytes import cast_on_this_thread, copy_host_bytes, flat_bytes
from .host_memory import running_on
from .mapping import PAGE
from .source import DriveBytes, WeightFile

# Bytes that one thread reads at a time: enough to reach the full bandwidth of an SSD.
BLOCK = 8 << 20
# Number of concurrent requests that an SSD needs to reach its full bandwidth.
THREADS = 4
# Flags in an entry of /proc/self/pagemap.
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61


@dataclass(frozen=True)
class _Mapping:
    begin: int
    end: int
    offset: int
    inode: tuple[int, int]
    path: str


class Mappings:
    """The files that this process had mapped when this object was created."""

    def __init__(self) -> None:
        self._found = sorted(_mapped(), key=lambda m: m.begin)
        self._numbers: dict[str, tuple[int, int] | None] = {}
        self._files: dict[str, WeightFile] = {}

    def part(self, tensor: torch.Tensor) -> DriveBytes | None:
        """Return the file range to which the memory of a dense host tensor is mapped.

        Returns None if the tensor is not a mapping of a file, if it was written, or if the file was replaced.
        Raises ChunkflowError if the file was truncated and no longer contains this range, because reading such a
        mapping would kill the process.
        """
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        before = bisect.bisect_right(self._found, address, key=lambda m: m.begin)
        mapping = self._found[before - 1] if before else None
        if mapping is None or address + nbytes > mapping.end or _written(address, nbytes):
            return None
        offset = mapping.offset + address - mapping.begin
        try:
            status = os.stat(mapping.path)
        except OSError:
            return None  # the file was deleted, or this process cannot see its path; the mapping is still valid
        if (status.st_dev, status.st_ino) != mapping.inode and self._as_mapped(mapping.path) != mapping.inode:
            return None
        if status.st_size < offset + nbytes:
            raise ChunkflowError(
                f"The checkpoint {mapping.path} was cut to {status.st_size} bytes after it was loaded; a weight reaches to "
                f"byte {offset + nbytes}. Restore the file and load the model again."
            )
        if mapping.path not in self._files:
            stamp = (status.st_dev, status.st_ino), status.st_mtime_ns
            self._files[mapping.path] = WeightFile(Path(mapping.path), f"the checkpoint {mapping.path}", stamp)
        return DriveBytes(self._files[mapping.path], offset, nbytes)

    def _as_mapped(self, path: str) -> tuple[int, int] | None:
        """Return the device and inode numbers of a file as /proc/self/maps reports them.  On btrfs, and on overlayfs
        with old kernels, these numbers differ from the numbers that stat reports."""
        if path not in self._numbers:
            self._numbers[path] = None
            with (
                contextlib.suppress(OSError, ValueError),  # an empty file cannot be mapped
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE) as page,
            ):
                at = ctypes.addressof(ctypes.c_char.from_buffer(page))
                self._numbers[path] = next((m.inode for m in _mapped() if m.begin <= at < m.end), None)
        return self._numbers[path]


class CheckpointReader:
    """Reads file ranges into host memory with a few threads.

    ``direct``: whether to bypass the page cache, so that the files take no memory there.  ``cpus``: the CPUs on which
    the threads run.  The kernel allocates a page on the NUMA node of the CPU that first writes to it.
    """

    def __init__(self, direct: bool, cpus: frozenset[int] = frozenset()) -> None:
        self._direct = direct
        self._cpus = cpus
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, "chunkflow-read", self._begin)

    def read(self, part: DriveBytes, target: torch.Tensor, dtype: torch.dtype) -> None:
        """Read the values in a file range into a dense host tensor, and cast them to the dtype of this tensor.

        ``dtype``: the dtype of the values in the file.
        Raises ChunkflowError if the file is replaced, truncated or modified during the read, or if the read fails.
        """
        count, size = target.numel(), dtype.itemsize
        step = BLOCK // size
        flat = target.as_strided((count,), (1,))
        spans = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
        # check the file, because another file may have been moved to its path since the weight was mapped
        part.file.check()
        # wait for all reads, and raise the first error
        deque(self._threads.map(partial(self._block, part, flat, dtype), spans), maxlen=0)

    def close(self) -> None:
        """Wait for the threads to finish, and end them."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _block(self, part: DriveBytes, flat: torch.Tensor, dtype: torch.dtype, span: tuple[int, int]) -> None:
        with running_on(self._cpus):
            begin, end = span
            target, block = flat[begin:end], part[begin * dtype.itemsize : end * dtype.itemsize]
            if not self._direct and dtype == flat.dtype:
                block.read(flat_bytes(target))
                return
            buffer: torch.Tensor = self._local.buffer
            values = buffer[: block.nbytes]
            if self._direct:
                values = block.read_direct(buffer)
            else:
                block.read(values)
            if dtype == flat.dtype:
                copy_host_bytes(flat_bytes(target), values)
                return
            # align the values for the cast, because a weight may begin at any byte of a checkpoint
            if values.data_ptr() % dtype.itemsize:
                # ``copy_host_bytes`` uses memmove, so source and target may overlap
                copy_host_bytes(buffer[: block.nbytes], values)
                values = buffer[: block.nbytes]
            cast_on_this_thread(target, values.view(dtype))

    def _begin(self) -> None:
        """Give a new thread its own page-aligned buffer, which direct reads need."""
        self._local.buffer = torch.frombuffer(mmap.mmap(-1, BLOCK + 2 * PAGE), dtype=torch.uint8)


def _mapped() -> Iterator[_Mapping]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[4] != "0" and fields[5].startswith("/"):
                begin, end = (int(x, 16) for x in fields[0].split("-"))
                major, minor = (int(x, 16) for x in fields[3].split(":"))
                inode = os.makedev(major, minor), int(fields[4])
                yield _Mapping(begin, end, int(fields[2], 16), inode, fields[5])


def _written(address: int, nbytes: int) -> bool:
    """Whether any page of a private mapping was written.  The bytes of a written page may differ from the file.

    Also True if the kernel does not report which pages were written.
    """
    first, last = address // PAGE, (address + nbytes - 1) // PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            raw = bytearray(os.pread(pagemap.fileno(), 8 * (last - first + 1), 8 * first))
    except OSError:
        return True
    if len(raw) != 8 * (last - first + 1):
        return True
    entries = torch.frombuffer(raw, dtype=torch.int64)
    held = (entries < 0) | (entries & _SWAPPED != 0)  # an entry is negative if its highest bit (page present) is set
    return bool((held & (entries & _OF_FILE == 0)).any())
