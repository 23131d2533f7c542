"""Weights whose bytes are packed, without loss: twelve bits a value, see ``passes/packing.py``.

The host tensor of such a weight is *address space without pages*: it has the shape, the strides, the storage and the version
of the values, so that a view of it is a view of the weight, but to touch it would end the process.  Whoever reads gets the
values in a temporary.  Whoever writes opens the pages, and closes them after it.
"""

from __future__ import annotations

import contextlib
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
from .drive import Scratch
from .host_memory import empty_pages, running_on
from .limits import no_room
from .mapping import close_pages, open_pages

# Threads that pack a weight, at most: a few fill the memory bus.
_THREADS = 16
# In the place of the base, which is at least 0.
_DO_NOT_FIT = -1
# Values of a weight that one thread packs sooner than others start.
_SERIAL = 1 << 20


class Packed(Backing):
    """Packed values, whose bytes lie where those of ``inner`` do.  ``host``: the address space of the values.

    ``is_open``: whether a write has opened the pages.  Then they have the values, and the packed bytes are old.
    """

    packed: torch.Tensor

    def __init__(self, host: torch.Tensor, inner: Backing) -> None:
        super().__init__(host)
        self.packed, self.bytes, self.scratch = inner.host, inner.bytes, inner.scratch
        self._inner = inner
        self._writer: int | None = None  # the thread that has opened it
        self._packing = threading.Lock()  # no other thread reads bytes that are being packed
        self._whole = True  # whether the packed bytes are those of one state of the values
        self._exported: tuple[int, int, weakref.ref[torch.Tensor]] | None = None

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
        return self._writer is not None

    @property
    def is_open_here(self) -> bool:
        """Whether this thread has opened it: the ops of others go on to read the packed values."""
        return self._writer == threading.get_ident()

    def check(self) -> None:
        self._inner.check()

    def make_private(self, name: str, lazily: bool = False) -> Backing:
        return Packed(self.host, self._inner.make_private(name, lazily))

    def read(self, name: str) -> torch.Tensor:
        """The values, in new host memory.  Raises ChunkflowError if there is no room."""
        with self._packing:
            return unpacked(name, self.packed, self.host) if self._whole else self.host.clone()

    def exported(self, name: str, version: int) -> torch.Tensor:
        """The values in a mapping of a scratch file, or in host memory where there is no drive; the same ones as long as they
        are in use, nobody has written them, and ``version`` is that of the weight.

        Raises ChunkflowError if there is no room there either.
        """
        before, writes, ref = self._exported or (None, 0, None)
        exported = ref() if ref is not None and before == version else None
        if exported is None or exported._version != writes:
            exported = self.read(name)
            with contextlib.suppress(ChunkflowError), _plainly():  # no room in the folder for temporary files
                # without a name, and its descriptor is closed at once: it lasts as long as the mapping
                exported = Scratch.made(exported.nbytes).keep(exported).host
            self._exported = version, exported._version, weakref.ref(exported)
        return exported

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[None]:
        """The pages are open, and what is written to them is packed; if it does not fit, they stay open.

        Raises ChunkflowError if there is no room.
        """
        self.open(name)
        try:
            yield
        finally:
            with self._packing:
                self._whole = False
                self._whole = pack_into(self.packed, self.host)
                if self._whole:
                    self._writer = None  # first: after a Ctrl-C between the two, the packed values are right
                    close_pages(self.host)

    def open(self, name: str, lazily: bool = False) -> None:
        """Give the values memory again, for a write or from now on.  Raises ChunkflowError if there is no room, ``lazily``
        only if the kernel says so."""
        cause = None if lazily else no_room(self.host.nbytes)
        try:
            if cause is None:
                open_pages(self.host)
        except OSError as error:
            cause = error.strerror or str(error)
        if cause is not None:
            raise ChunkflowError(_no_memory(name, self.host, cause))
        try:
            with _threads(self.host.numel()) as run:
                unpack_into(self.packed, self.host.data, run)  # no write that anybody counts
            self._writer = threading.get_ident()
        finally:
            if not self.is_open:
                close_pages(self.host)


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
