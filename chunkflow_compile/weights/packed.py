"""Weights whose bytes are packed without loss, in about twelve bits per value; see ``passes/packing.py``.

The host tensor of a packed weight is *address space without pages*.  It has the shape, the strides, the storage and the
version counter of the values, so a view of the host tensor is a view of the weight.  Accessing its memory causes a
segmentation fault.
A reader gets the values in a temporary tensor.  A writer first *opens* the pages, that is, makes them accessible and
unpacks the values into them, and *closes* them after the write.

``state_dict()`` opens the pages, too, because its tensors share the memory of the weight, as they do in any module.  The
pages are then a private mapping of a scratch file, so a page takes no memory until it is written.  The kernel reports which
pages were written, even through a pointer or by NumPy.  :meth:`Packed.settle` detects these writes, and closes the
pages after the last of the tensors is gone.
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
from .bytes import as_array, as_weight, flat_bytes, same_bits
from .drive import Scratch
from .host_memory import empty_pages, running_on
from .limits import no_room
from .locks import ProcessLock
from .mapping import close_pages, map_over, memory_file, open_pages, own_memory, whole_pages, written_pages

# Maximum number of threads that pack a weight; more threads would not increase the memory bandwidth.
_THREADS = 16
# Written to the last word of the packed form if the values do not fit in it.  That word otherwise contains the base
# exponent, which is never negative.
_DO_NOT_FIT = -1
# Up to this many values are packed by one thread, because starting more threads would take longer.
_SERIAL = 1 << 20


class Packed(Backing):
    """Packed values, whose bytes are stored in ``inner``.  ``host``: the address space of the values.

    ``is_open``: whether a write has opened the pages.  If so, the pages contain the values, and the packed bytes are
    outdated.  Only one write may run at a time: the callers of :meth:`open`, :meth:`opened` and :meth:`exported` exclude
    other threads.
    """

    compressed = True

    def __init__(self, host: torch.Tensor, inner: Backing) -> None:
        super().__init__(host, inner.host)
        self.bytes = inner.bytes
        self._inner = inner
        # the process and the thread that have opened the pages
        self._writer: tuple[int, int] | None = None
        # held while values are read or packed, and during the call that makes the pages inaccessible
        self._lock = ProcessLock()
        # False while values are packed, and after the packing was interrupted
        self._whole = True
        # the storage that the tensors of a state_dict share; its memory consists of the open pages
        self._exported: weakref.ref[torch.UntypedStorage] | None = None

    @staticmethod
    def of(host: torch.Tensor) -> Packed | None:
        """Pack the values of a host tensor into new memory.  Returns None if the values do not fit in the packed form,
        or if the packed form does not fit in host memory."""
        like = packed_like(host)
        if no_room(like.nbytes) is not None:
            return None
        with _ordinary_mode():
            packed = empty_pages(like)
        return Packed(host, Backing(packed)) if pack_into(packed, host) else None

    @property
    def where(self) -> Where:
        return self._inner.where

    @property
    def is_open(self) -> bool:
        # a forked child does not have the thread that opened the pages
        return self._writer is not None and self._writer[0] == os.getpid()

    @property
    def is_open_here(self) -> bool:
        """Whether this thread has opened the pages.  Until it closes them, ops of other threads read the packed values."""
        return self._writer == _this_thread()

    def check(self) -> None:
        self._inner.check()

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        self._inner = self._inner.make_private(name, lazily)
        self.bytes = self._inner.bytes
        return self

    def read(self, name: str) -> torch.Tensor:
        """Return the values in new host memory.  Raises ChunkflowError if the values do not fit there."""
        with self._lock():
            in_pages = not self._whole or (self._exported is not None and not self.is_open)
            return self._copied(name) if in_pages else unpacked(name, self.stored, self.host)

    def _copied(self, name: str) -> torch.Tensor:
        """Return a copy of the open pages.  Raises ChunkflowError if the copy does not fit in host memory."""
        if (cause := no_room(self.host.nbytes)) is not None:
            raise ChunkflowError(_no_memory(name, self.host, cause))
        with _ordinary_mode():
            return self.host.clone()

    def exported(self, name: str) -> torch.Tensor:
        """Return a tensor for a state_dict, which has the values and the address of the weight.  Writes to this tensor are
        writes to the weight; see :meth:`settle`.

        The values are stored in a scratch file on the SSD, or in host memory if this file cannot be created.  Pages
        that are written become private memory.  Raises ChunkflowError if the values do not fit in host memory, either.
        """

        if self.is_open_here:  # a signal handler has called this method in the middle of a write
            return self._copied(name)
        with self._lock(), _ordinary_mode():
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
        """Write the values to a new scratch file, and map the file privately over the closed pages.

        The file has no name, and its descriptor is closed at once, so the file lasts as long as the mapping.
        """
        values = self.read(name)
        try:
            scratch = Scratch.made(values.nbytes)
            scratch.write(0, values)
        except ChunkflowError:  # the folder for temporary files is full or missing
            scratch = Scratch(memory_file("chunkflow-state", whole_pages(values.nbytes)), "in host memory")
            scratch.write(0, values)
        if not map_over(self.host, scratch.file.descriptor):
            raise ChunkflowError(_no_memory(name, self.host, os.strerror(ctypes.get_errno())))

    def settle(self) -> bool:
        """Close the pages if no tensor of a state_dict uses them any more.

        Returns whether the values were changed through such a tensor since they were last packed.  If so, the caller
        must enter and leave an :meth:`opened` context, which packs the values again.
        """
        with self._lock():
            if self._exported is None or self.is_open:
                return False
            # checked before the values are compared: if there is no user now, nobody can write the pages afterwards
            unused = self._exported() is None
            if self._differs():
                return True
            if unused:
                self._close()
            return False

    def _differs(self) -> bool:
        """Whether the open pages were written and now differ from the packed values."""
        with _ordinary_mode():
            if not written_pages(flat_bytes(self.host)):
                return False
            # if host memory is too short to compare the values, they count as changed, and are packed again
            if no_room(self.host.nbytes) is not None:
                return True
            return not same_bits(unpacked("a weight", self.stored, self.host), self.host)

    def _close(self) -> None:
        self._exported = None
        close_pages(self.host)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[None]:
        """A context in which the pages are open.  At the end of the context, the values are packed again.  If they do not
        fit in the packed form, the pages stay open.

        Raises ChunkflowError if the values do not fit in host memory.
        """
        self.open(name)
        try:
            yield
        finally:
            with self._lock():
                self._whole = False
                self._whole = pack_into(self.stored, self.host)
                if self._whole:
                    self._writer = None  # set before the pages are closed, so that Ctrl-C in between does no harm
                    if self._exported is None or self._exported() is None:
                        self._close()

    def open(self, name: str, lazily: bool = False) -> None:
        """Open the pages, for a write or to unpack the weight permanently.

        Raises ChunkflowError if the pages do not fit in host memory; with ``lazily``, only if the kernel reports an
        error.
        """

        # the pages already contain the values, because they were opened for a state_dict, or because a fork has
        # interrupted the packing (in this case, ``_whole`` is False)
        if self._exported is not None or not self._whole:
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
                # through .data, so that the version counter does not count a write
                unpack_into(self.stored, self.host.data, run)
            self._writer, opened = _this_thread(), True
        finally:
            if not opened:
                close_pages(self.host)

    def own(self) -> None:
        """Turn the open pages into private memory of this process, because the weight is unpacked permanently.  The
        address of the pages does not change."""
        if self._exported is not None:
            # if memory is short, the pages stay mapped to the scratch file, which no other process can change
            with contextlib.suppress(OSError):
                own_memory(self.host, set())


def _at(host: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the address of ``host`` with a separate storage, whose lifetime shows whether the tensor is
    still in use."""
    return as_weight(torch.frombuffer(as_array(host), dtype=torch.uint8), host)


def _this_thread() -> tuple[int, int]:
    """Return the ids of this process and this thread.  After a fork, a thread of the child may have the same id as a
    thread of the parent, so the thread id alone is ambiguous."""
    return os.getpid(), threading.get_ident()


def packed_like(weight: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of a weight's packed form."""
    return torch.empty(Layout.of(weight.numel()).words, dtype=torch.int32, device="meta")


def unpacked(name: str, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight in new host memory.  ``name``: the weight's name, for error messages.  ``like``: a
    tensor with the shape and dtype of the weight.

    Raises ChunkflowError if the values do not fit in host memory.
    """
    if (cause := no_room(like.nbytes)) is not None:
        raise ChunkflowError(_no_memory(name, like, cause))
    with _threads(like.numel()) as run:
        values = torch.empty(like.shape, dtype=like.dtype)
        unpack_into(packed, values, run)
    return values


def mark_unfit(packed: torch.Tensor) -> None:
    """Mark memory for packed values as unusable, because the values did not fit in it."""
    packed[-1] = _DO_NOT_FIT


def fits(packed: torch.Tensor) -> bool:
    """Whether the memory contains packed values; False if they did not fit (see :func:`mark_unfit`)."""
    return int(packed[-1]) != _DO_NOT_FIT


def address_space(like: torch.Tensor) -> torch.Tensor:
    """Return a host tensor on closed pages, with the shape, strides and dtype of the dense tensor ``like``."""
    host = empty_pages(like)
    close_pages(host)
    return host


def pack_into(packed: torch.Tensor, values: torch.Tensor, cpus: frozenset[int] = frozenset()) -> bool:
    """Pack ``values``, which are contiguous in host memory, into ``packed`` with several threads.  Returns False if
    they do not fit.

    ``cpus``: the CPUs on which the threads run; empty for any CPUs.  New pages are allocated on the NUMA node of these
    CPUs.
    """
    with _threads(values.numel(), cpus) as run:
        return pack(values, packed, run)


@contextlib.contextmanager
def _threads(numel: int, cpus: frozenset[int] = frozenset()) -> Iterator[Run]:
    """A context that yields a function like ``map``, for packing or unpacking ``numel`` values.  The yielded function
    uses several threads, or only the calling thread if ``numel`` is small."""
    threads = min(_THREADS, len(os.sched_getaffinity(0)), -(-numel // _SERIAL))
    with _ordinary_mode():
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
def _ordinary_mode() -> Iterator[None]:
    """A context for ordinary ops on host tensors, whatever state the caller is in: inference mode, a trace, or a default
    device."""
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


def _no_memory(name: str, values: torch.Tensor, cause: str) -> str:
    return (
        f"{name} is packed, and its values ({size(values.nbytes)}) find no room in host memory: {cause}. Free host memory, "
        "or place the model with pack=False."
    )
