"""Mappings of files, with the calls of the C library that Python's mmap does not have."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import re
from typing import Any

import torch

from .locks import when_collected

PAGE = mmap.PAGESIZE
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_FAILED = 2**64 - 1
_DONTFORK, _HUGE = 10, 14  # of madvise
# Since this version, a fork copies pages that a device reads for the child.  Before it, the parent's next write to such a
# page moved the parent to a copy, while the device went on reading the old one.
_FORKS_COPY_PINNED = [5, 12]
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class Descriptor:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        when_collected(self, os.close, number)


def memory_file(name: str, nbytes: int) -> Descriptor:
    """Shared memory as a file without a name in any file system, which no process can make shorter or longer."""
    memory = Descriptor(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(memory.number, nbytes)
    # no rank can cut it while another reads it
    fcntl.fcntl(memory.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def reopened(path: str, identity: tuple[int, int]) -> Descriptor:
    """The file at a path, to read and write.  Raises OSError if it cannot be opened, or is another one."""
    if identity_of(os.stat(path)) != identity:  # to open a stranger's pipe or terminal may do anything
        raise OSError(errno.ESTALE, "another file")
    opened = Descriptor(os.open(path, os.O_RDWR))
    if identity_of(os.fstat(opened.number)) != identity:
        raise OSError(errno.ESTALE, "another file")
    return opened


def identity_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def prefer_huge_pages(pages: torch.Tensor) -> None:
    """Ask for huge pages in a mapping: fewer to make, to pin, and to name in a read of the drive."""
    _libc().madvise(pages.data_ptr(), pages.nbytes, _HUGE)  # no matter where the kernel has no such pages


def for_copies(pages: torch.Tensor) -> None:
    """Advise the kernel on memory of this process alone that a GPU is going to copy from."""
    prefer_huge_pages(pages)
    if [int(part) for part in re.findall(r"\d+", platform.release())[:2]] < _FORKS_COPY_PINNED:
        _libc().madvise(pages.data_ptr(), pages.nbytes, _DONTFORK)


@functools.cache
def _libc() -> Any:
    """The C library, with the calls that Python's mmap does not have."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, *2 * [ctypes.c_size_t], ctypes.c_int, ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def map_file(descriptor: Descriptor, nbytes: int, kind: int, offset: int = 0) -> torch.Tensor | None:
    """Bytes of a file, uint8, unmapped with the last tensor in them; None if the kernel refuses.

    Python's mmap would keep the file open, and so its memory, after all weights in it have left.
    """
    system, size = _libc(), whole_pages(nbytes)
    address = system.mmap(None, size, _ACCESS, kind, descriptor.number, offset)
    if address == _FAILED:
        return None
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    when_collected(pages, system.munmap, address, size)
    return torch.frombuffer(pages, dtype=torch.uint8)


def map_over(host: torch.Tensor, descriptor: Descriptor | None, offset: int = 0, access: int = _ACCESS) -> bool:
    """Map a file privately at the address of ``host``, whole pages: views of it stay views.  None: memory without a file.

    ``access``: to it, as mmap takes it.  Returns False if the kernel refuses; nothing has changed then.
    """
    kind = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor is None else 0)
    number = -1 if descriptor is None else descriptor.number
    return bool(_libc().mmap(host.data_ptr(), whole_pages(host.nbytes), access, kind, number, offset) != _FAILED)


def written_pages(host: torch.Tensor) -> list[tuple[int, int]]:
    """The parts of a private mapping of a file that lie on pages which this process has written, by whatever way.

    ``host``: a flat tensor (uint8) in the mapping.  Returns where in it each part begins and ends, in bytes; if the kernel
    does not tell, the whole tensor is one part.
    """
    begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
    first, last = begin // PAGE, -(-end // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = bytearray(os.pread(pagemap.fileno(), 8 * (last - first), 8 * first))
    except OSError:
        return [(0, host.nbytes)]
    if len(entries) < 8 * (last - first):
        return [(0, host.nbytes)]
    pages = torch.frombuffer(entries, dtype=torch.int64)
    # a written page is present or swapped (bits 63 and 62), and no longer one of the file (bit 61)
    written = ((pages >> 62 & 3) != 0) & ((pages >> 61 & 1) == 0)
    if not written.any():
        return []
    edges = torch.nn.functional.pad(written.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    places = [min(max((first + page) * PAGE, begin), end) - begin for page in edges]
    return [*zip(places[::2], places[1::2], strict=True)]


def close_pages(host: torch.Tensor) -> None:
    """Give up the memory of a tensor on whole pages of its own.  Its addresses stay, and to touch them ends the process."""
    map_over(host, None, access=0)


def open_pages(host: torch.Tensor) -> None:
    """Let the closed pages of a tensor be touched again; they are zero.  Raises OSError if the kernel refuses."""
    if _libc().mprotect(host.data_ptr(), whole_pages(host.nbytes), _ACCESS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for_copies(host)


def own_memory(host: torch.Tensor, owned: set[int]) -> None:
    """Give a tensor in a mapping memory of its own, with the same bytes at the same address: views stay views.

    A private mapping of a file needs it too: the kernel drops its written pages when the file is cut.
    ``owned``: its first and its last page, which other tensors may have a part of.  One that is owned already stays: a
    device may read it.  Raises OSError if the kernel refuses; nothing has changed then.
    """
    first, last = (address - address % PAGE for address in (host.data_ptr(), host.data_ptr() + host.nbytes - 1))
    begin, end = first + PAGE * (first in owned), last + PAGE * (last not in owned)
    if begin < end:
        _replace(begin, end - begin)
    owned.update((first, last))


def _replace(begin: int, size: int) -> None:
    """Put memory of the process's own in the place of whole pages, with the bytes that are there."""
    system = _libc()
    copied = system.mmap(None, size, _ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copied != _FAILED:
        ctypes.memmove(copied, begin, size)
        # the pages move in one call: a reader sees either those before or the same bytes
        if system.mremap(copied, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, begin) == begin:
            return
        number = ctypes.get_errno()
        system.munmap(copied, size)
        raise OSError(number, os.strerror(number))
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
