"""Mappings of files, through C library functions that Python's mmap does not offer."""

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
# arguments of madvise
_DONTFORK, _HUGE = 10, 14
# Since this Linux version, a fork gives the child copies of the pages that are pinned for a device.  In older versions,
# the parent's next write to a pinned page gave the parent a copy, while the device went on reading the old page.
_FORKS_COPY_PINNED = [5, 12]
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


class Descriptor:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        when_collected(self, os.close, number)


def memory_file(name: str, nbytes: int) -> Descriptor:
    """Create a memfd: shared memory in the form of a file without a name.  No process can change its size."""
    memory = Descriptor(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(memory.number, nbytes)
    # fix the size, so that no rank can truncate the memory while another rank reads it
    fcntl.fcntl(memory.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def reopened(path: str, identity: tuple[int, int]) -> Descriptor:
    """Open the file at a path for reading and writing.

    Raises OSError if the file cannot be opened, or if its device and inode numbers differ from ``identity``.
    """

    # check before opening, because opening an unknown pipe or terminal may have side effects
    if identity_of(os.stat(path)) != identity:
        raise OSError(errno.ESTALE, "another file")
    opened = Descriptor(os.open(path, os.O_RDWR))
    if identity_of(os.fstat(opened.number)) != identity:
        raise OSError(errno.ESTALE, "another file")
    return opened


def identity_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def prefer_huge_pages(pages: torch.Tensor) -> None:
    """Ask the kernel for huge pages in a mapping.  Fewer and larger pages are faster to allocate, to pin, and to fill
    from the SSD."""

    # the result is ignored, because the kernel may not support huge pages
    _libc().madvise(pages.data_ptr(), pages.nbytes, _HUGE)


def advise_for_copies(pages: torch.Tensor) -> None:
    """Advise the kernel how to manage private memory from which a GPU is going to copy."""
    prefer_huge_pages(pages)
    if [int(part) for part in re.findall(r"\d+", platform.release())[:2]] < _FORKS_COPY_PINNED:
        _libc().madvise(pages.data_ptr(), pages.nbytes, _DONTFORK)


@functools.cache
def _libc() -> Any:
    """Return the C library, with the types of the functions that this module calls."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, *2 * [ctypes.c_size_t], ctypes.c_int, ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def map_file(descriptor: Descriptor, nbytes: int, kind: int, offset: int = 0) -> torch.Tensor | None:
    """Map bytes of a file, and return them as a uint8 tensor, or None if mmap fails.

    The bytes are unmapped when the last tensor that uses them is freed.  ``kind``: the flags of mmap.
    Python's mmap would keep the file open, and thus its memory allocated, even after all weights in the file are freed.
    """
    system, size = _libc(), whole_pages(nbytes)
    address = system.mmap(None, size, _ACCESS, kind, descriptor.number, offset)
    if address == _FAILED:
        return None
    pages = (ctypes.c_ubyte * nbytes).from_address(address)
    when_collected(pages, system.munmap, address, size)
    return torch.frombuffer(pages, dtype=torch.uint8)


def map_over(host: torch.Tensor, descriptor: Descriptor | None, offset: int = 0, access: int = _ACCESS) -> bool:
    """Map a file privately over the pages of ``host``, at the same address, so that views of ``host`` remain valid.

    ``descriptor``: the file, or None for anonymous memory.  ``access``: the protection of the mapping, as for mmap.
    Returns False if mmap fails; the pages are then unchanged.
    """
    kind = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor is None else 0)
    number = -1 if descriptor is None else descriptor.number
    return bool(_libc().mmap(host.data_ptr(), whole_pages(host.nbytes), access, kind, number, offset) != _FAILED)


def written_pages(host: torch.Tensor) -> list[tuple[int, int]]:
    """Return the parts of a private file mapping whose pages this process has written, even through a pointer.

    ``host``: a flat tensor (uint8) in the mapping.  Each part is returned as (begin, end), byte offsets in the tensor.
    If the kernel does not report written pages, the whole tensor is one part.
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
    # a written page is present or swapped (bits 63 and 62), and no longer a page of the file (bit 61)
    written = ((pages >> 62 & 3) != 0) & ((pages >> 61 & 1) == 0)
    if not written.any():
        return []
    edges = torch.nn.functional.pad(written.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    places = [min(max((first + page) * PAGE, begin), end) - begin for page in edges]
    return [*zip(places[::2], places[1::2], strict=True)]


def close_pages(host: torch.Tensor) -> None:
    """Free the memory of a tensor whose pages contain no other data.  The addresses stay reserved; accessing them kills
    the process."""
    map_over(host, None, access=0)


def open_pages(host: torch.Tensor) -> None:
    """Make the closed pages of a tensor accessible again; they then contain zeros.  Raises OSError if the kernel
    reports an error."""
    if _libc().mprotect(host.data_ptr(), whole_pages(host.nbytes), _ACCESS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    advise_for_copies(host)


def own_memory(host: torch.Tensor, owned: set[int]) -> None:
    """Move a tensor in a mapping to private memory, with the same bytes at the same address, so that views remain valid.

    A private mapping of a file must be moved, too, because the kernel drops the written pages of the mapping when the
    file is truncated.
    ``owned``: addresses of pages that are already private.  The tensor may share its first and its last page with other
    tensors, so these two pages are added to the set.  A page that is already in the set is left in place, because a
    device may be reading it.
    Raises OSError if the kernel reports an error; the pages are then unchanged.
    """
    first, last = (address - address % PAGE for address in (host.data_ptr(), host.data_ptr() + host.nbytes - 1))
    begin, end = first + PAGE * (first in owned), last + PAGE * (last not in owned)
    if begin < end:
        _replace(begin, end - begin)
    owned.update((first, last))


def _replace(begin: int, size: int) -> None:
    """Replace whole pages by private memory with the same bytes."""
    system = _libc()
    copied = system.mmap(None, size, _ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copied != _FAILED:
        ctypes.memmove(copied, begin, size)
        # replace the pages in one call, so that a reader sees either the old pages or the same bytes in the new pages
        if system.mremap(copied, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, begin) == begin:
            return
        number = ctypes.get_errno()
        system.munmap(copied, size)
        raise OSError(number, os.strerror(number))
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
