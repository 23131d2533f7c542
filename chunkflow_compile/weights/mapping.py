"""Mappings of files, with the calls of the C library that Python's mmap has not."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import torch

PAGE = mmap.PAGESIZE
ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED = 0x10
FAILED = 2**64 - 1


class Descriptor:
    """An open file, closed when nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False


@functools.cache
def libc() -> Any:
    """The C library, with the calls that Python's mmap has not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, *2 * [ctypes.c_size_t], ctypes.c_int, ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def map_file(descriptor: Descriptor, nbytes: int, kind: int, offset: int = 0) -> torch.Tensor | None:
    """Bytes of a file, uint8, unmapped with the last tensor in them; None if the kernel refuses.

    Python's mmap would keep the file open, and so its memory, after all weights in it have left.
    """
    system, size = libc(), whole_pages(nbytes)
    made = system.mmap(None, size, ACCESS, kind, descriptor.number, offset)
    if made == FAILED:
        return None
    pages = (ctypes.c_ubyte * nbytes).from_address(made)
    weakref.finalize(pages, system.munmap, made, size).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8)


def map_over(host: torch.Tensor, descriptor: Descriptor, kind: int, offset: int) -> None:
    """Map a file at the address of ``host``, whole pages of the same bytes: views of it stay views.

    Raises OSError if the kernel refuses; nothing has changed then.
    """
    size, there = whole_pages(host.nbytes), host.data_ptr()
    if libc().mmap(there, size, ACCESS, kind | MAP_FIXED, descriptor.number, offset) != there:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
