"""Weights whose bytes are packed, without loss: twelve bits a value, see ``passes/packing.py``.

The host tensor of such a weight is *address space without pages*: it has the shape, the strides, the storage and the version
of the values, so that a view of it is a view of the weight, but to touch it would be a segmentation fault.  A reader gets the
values in a temporary.  A writer opens the pages, and closes them afterwards.

``state_dict()`` opens the pages, too: its tensors are the memory of the weight, as those of any module are.  The pages are
then a private mapping of a scratch file, so that the values take no memory until somebody writes them.  The kernel tells
which pages were written, also by a pointer or by NumPy; :meth:`Packed.settle` finds these writes, and closes the pages after
the last tensor is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.packing import Layout, Run, pack, unpack_into
from chunkflow_compile.units import size

from .backing import Backing, Where
from .bytes import as_weight, flat_bytes, place_of, same_bits
from .drive import Scratch
from .host_memory import empty_pages, running_on
from .limits import no_room
from .locks import ProcessLock
from .mapping import close_pages, map_over, memory_file, open_pages, own_memory, whole_pages, written_pages

# Threads that pack a weight, at most: a few fill the memory bus.
_THREADS = 16
# In the place of the base, which is at least 0.
_DO_NOT_FIT = -1
# Values of a weight that one thread packs sooner than others start.
_SERIAL = 1 << 20


class Packed(Backing):
    """Packed values, whose bytes lie where those of ``inner`` do.  ``host``: the address space of the values.

    ``is_open``: whether a write has opened the pages.  Then they have the values, and the packed bytes are old.  Writes come
    one at a time: the caller of :meth:`open`, :meth:`opened` and :meth:`exported` excludes other threads.
    """

    compressed = True

    def __init__(self, host: torch.Tensor, inner: Backing) -> None:
        super().__init__(host, inner.host)
        self.bytes = inner.bytes
        self._inner = inner
        self._writer: tuple[int, int] | None = None  # the process and the thread that have opened it
        self._lock = ProcessLock()  # no other thread reads bytes that are being packed, or pages that are being closed
        self._whole = True  # whether the packed bytes are those of one state of the values
        # the storage of the tensors of state_dicts that use the open pages, and of arrays that have their memory
        self._exported: weakref.ref[torch.UntypedStorage] | None = None

    @staticmethod
    def of(host: torch.Tensor) -> Packed | None:
        """The values of a host tensor, packed in memory beside it; None if too many escape, or there is no room."""
        like = packed_like(host)
        if no_room(like.nbytes) is not None:
            return None
        with _plainly():
            packed = empty_pages(like)
        return Packed(host, Backing(packed)) if pack_into(packed, host) else None

    @property
    def where(self) -> Where:
        return self._inner.where

    @property
    def is_open(self) -> bool:
        return self._writer is not None and self._writer[0] == os.getpid()  # a writer is gone after a fork

    @property
    def is_open_here(self) -> bool:
        """Whether this thread has opened it: the ops of others go on to read the packed values."""
        return self._writer == _this_thread()

    def check(self) -> None:
        self._inner.check()

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        self._inner = self._inner.make_private(name, lazily)
        self.bytes = self._inner.bytes
        return self

    def read(self, name: str) -> torch.Tensor:
        """The values, in new host memory.  Raises ChunkflowError if there is no room."""
        with self._lock():
            in_pages = not self._whole or (self._exported is not None and not self.is_open)
            return self._copied(name) if in_pages else unpacked(name, self.stored, self.host)

    def _copied(self, name: str) -> torch.Tensor:
        """A copy of the open pages.  Raises ChunkflowError if there is no room."""
        if (cause := no_room(self.host.nbytes)) is not None:
            raise ChunkflowError(_no_memory(name, self.host, cause))
        with _plainly():
            return self.host.clone()

    def exported(self, name: str) -> torch.Tensor:
        """The values in their own place, for a state_dict: what writes them there writes the weight, see :meth:`settle`.

        They lie in a scratch file on the SSD until they are written, or in host memory if that file cannot be made.
        Raises ChunkflowError if host memory has no room either.
        """
        if self.is_open_here:  # a signal handler asks in the middle of a write
            return self._copied(name)
        with self._lock(), _plainly():
            memory = None if self._exported is None else self._exported()
            if memory is None:
                exported = _at(self.host)
                ref = weakref.ref(exported.untyped_storage())
                if self._exported is None and self._whole:
                    self._map(name)
                self._exported = ref
                return exported
            return torch.empty(0, dtype=self.host.dtype).set_(memory, 0, self.host.shape, self.host.stride())

    def _map(self, name: str) -> None:
        """Let the closed pages be a private mapping of a new scratch file with the values.

        The file has no name, and its descriptor is closed at once: it lasts as long as the mapping.
        """
        values = self.read(name)
        try:
            scratch = Scratch.made(values.nbytes)
            scratch.write(0, values)
        except ChunkflowError:  # no room in the folder for temporary files
            scratch = Scratch(memory_file("chunkflow-state", whole_pages(values.nbytes)), "in host memory")
            scratch.write(0, values)
        if not map_over(self.host, scratch.file.descriptor):
            raise ChunkflowError(_no_memory(name, self.host, os.strerror(ctypes.get_errno())))

    def settle(self) -> bool:
        """Close the pages if no tensor of a state_dict uses them any more.

        Returns whether such a tensor was written since the values were packed last: then they are to be packed again, by a
        write (:meth:`opened`) that writes nothing.
        """
        with self._lock():
            if self._exported is None or self.is_open:
                return False
            unused = self._exported() is None  # asked first: nobody can write them afterwards
            if self._differs():
                return True
            if unused:
                self._close()
            return False

    def _differs(self) -> bool:
        """Whether the open pages were written, and have other values than the packed bytes."""
        with _plainly():
            if not written_pages(flat_bytes(self.host)):
                return False
            if no_room(self.host.nbytes) is not None:  # to pack them once more takes no memory
                return True
            return not same_bits(unpacked("a weight", self.stored, self.host), self.host)

    def _close(self) -> None:
        self._exported = None
        close_pages(self.host)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[None]:
        """The pages are open, and what is written to them is packed; if it does not fit, they stay open.

        Raises ChunkflowError if there is no room.
        """
        self.open(name)
        try:
            yield
        finally:
            with self._lock():
                self._whole = False
                self._whole = pack_into(self.stored, self.host)
                if self._whole:
                    self._writer = None  # first: after a Ctrl-C between the two, the packed values are right
                    if self._exported is None or self._exported() is None:
                        self._close()

    def open(self, name: str, lazily: bool = False) -> None:
        """Give the values memory again, for a write or from now on.  Raises ChunkflowError if there is no room, ``lazily``
        only if the kernel says so."""
        if self._exported is not None or not self._whole:  # they have it; not whole: a fork interrupted who packed them
            self._writer = _this_thread()
            return
        cause = None if lazily else no_room(self.host.nbytes)
        try:
            if cause is None:
                open_pages(self.host)
        except OSError as error:
            cause = error.strerror or str(error)
        if cause is not None:
            raise ChunkflowError(_no_memory(name, self.host, cause))
        opened = False
        try:
            with _threads(self.host.numel()) as run:
                unpack_into(self.stored, self.host.data, run)  # no write that anybody counts
            self._writer, opened = _this_thread(), True
        finally:
            if not opened:
                close_pages(self.host)

    def own(self) -> None:
        """Let the open pages be memory of this process, at the same address: the weight is raw from now on."""
        if self._exported is not None:
            with contextlib.suppress(OSError):  # no memory: they stay a mapping of a file that nobody else can change
                own_memory(self.host, set())


def _at(host: torch.Tensor) -> torch.Tensor:
    """A tensor in the place of another one, whose storage tells when nobody uses it any more."""
    return as_weight(torch.frombuffer(place_of(host), dtype=torch.uint8), host)


def _this_thread() -> tuple[int, int]:
    """A fork may give a new thread the number of one that is gone."""
    return os.getpid(), threading.get_ident()


def packed_like(weight: torch.Tensor) -> torch.Tensor:
    """The packed form of a weight as a tensor without memory."""
    return torch.empty(Layout.of(weight.numel()).words, dtype=torch.int32, device="meta")


def unpacked(name: str, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values of a weight, in new host memory.  ``name``: for errors.  ``like``: has its shape and dtype.

    Raises ChunkflowError if there is no room.
    """
    if (cause := no_room(like.nbytes)) is not None:
        raise ChunkflowError(_no_memory(name, like, cause))
    with _threads(like.numel()) as run:
        values = torch.empty(like.shape, dtype=like.dtype)
        unpack_into(packed, values, run)
    return values


def do_not_fit(packed: torch.Tensor) -> None:
    """Say in memory for packed values that they did not fit into it."""
    packed[-1] = _DO_NOT_FIT


def fits(packed: torch.Tensor) -> bool:
    """Whether memory for packed values has them."""
    return int(packed[-1]) != _DO_NOT_FIT


def address_space(like: torch.Tensor) -> torch.Tensor:
    """A host tensor of the shape and dtype of a dense one, in closed pages."""
    host = empty_pages(like)
    close_pages(host)
    return host


def pack_into(packed: torch.Tensor, values: torch.Tensor, cpus: frozenset[int] = frozenset()) -> bool:
    """Pack values, contiguous in host memory, with several threads.  Returns False if too many escape.

    ``cpus``: where the threads run, for the memory node of the pages that they write first; empty for anywhere.
    """
    with _threads(values.numel(), cpus) as run:
        return pack(values, packed, run)


@contextlib.contextmanager
def _threads(numel: int, cpus: frozenset[int] = frozenset()) -> Iterator[Run]:
    """Runs the parts of what packs or unpacks so many values, on the calling thread alone if they are few."""
    threads = min(_THREADS, len(os.sched_getaffinity(0)), -(-numel // _SERIAL))
    with _plainly():
        if threads < 2:
            with running_on(cpus):
                yield map
            return
        with ThreadPoolExecutor(threads, "chunkflow-pack") as pool:
            yield lambda work, items: pool.map(partial(_near, cpus, work), items)


def _near(cpus: frozenset[int], work: Callable[[int], Any], item: int) -> Any:
    with running_on(cpus):
        return work(item)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Ops on ordinary tensors of the host, whatever the caller is in: inference mode, a trace, or a default device."""
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


def _no_memory(name: str, values: torch.Tensor, cause: str) -> str:
    return (
        f"{name} is packed, and its values ({size(values.nbytes)}) find no room in host memory: {cause}. Free host memory, "
        "or place the model with pack=False."
    )
