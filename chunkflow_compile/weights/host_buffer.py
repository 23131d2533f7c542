"""The host memory of one weight: where its values are, what copies of them exist, and who may write them.

All views of a weight have one.  It may be in the store of a placed model; else it is memory and a count of writes.

Note: the places of a weight's bytes
------------------------------------
The values are in ``HostBuffer.host``, a tensor on the CPU.  Its pages are at one of four places (:class:`Where`):

* OWN: pages of this process.  Ops on the weight write them, and so do tensors of a state_dict, which no count sees.
* SHARED: pages of a memfd that the ranks of a machine map.  The loader writes them, before any weight is in them.
* FILE: a private mapping of a checkpoint or of a scratch file, which the loader writes.  Copies read the file itself.
* FILE_WRITTEN: the same mapping, of which a tensor of a state_dict has written pages, which are this process's now.

:class:`WeightLoader` chooses the first place.  From there bytes move one way, to OWN, at the same address, so that views stay
views: ``make_private``, before a write, before pages that may change are pinned, and when a shared one is restored.  A weight
that gets other memory (``p.data = ...``) gets another HostBuffer.

Copies of the values, none of which is written by anybody but its maker:

* on the device, one that stays (``resident``), refreshed when ``version`` has changed, or slots of an arena, filled in each
  step;
* in an op outside programs, one for that op;
* in a state_dict, the memory itself (``exported``); of SHARED pages a mapping that copies a page when it is written.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .backing import Backing, Where
from .bytes import alias, flat_bytes
from .counts import Counts
from .limits import Room, no_room
from .source import DriveBytes, Source
from .staging import GpuStagings

# Until pages are pinned again that another rank may have been pinning: as long as it takes for a large weight.
_RETRY_S = 0.2


class HostReader(Protocol):
    """A device whose copies read host memory; the devices are in ``runtime``.  ``closed``: whether its streams are closed."""

    name: str
    closed: bool

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Let the copy engine read a host tensor directly; return a function to undo it.  Raises OSError on failure."""

    def sync_copies(self) -> None:
        """Wait for the copies that delivered steps read: after that the host may write to their source."""


class Store(Protocol):
    """A placed model, as its weights know it.  The store knows more (host_store.py)."""

    device: torch.device
    pins: bool
    turn: tuple[int, int] | None
    counts: Counts
    exported: list[tuple[weakref.ref[torch.Tensor], weakref.ref[HostBuffer]]]

    def quiet(self) -> AbstractContextManager[object]: ...

    def mark_exported_dirty(self) -> None: ...

    @property
    def root(self) -> Any: ...

    def room(self, budget: int | None) -> Room: ...

    def disable_pinning(self, buffer: HostBuffer, cause: str) -> None: ...

    def warn_over_bound(self, name: str, how: str, more: int = 0) -> None: ...

    def count(self, name: str, nbytes: int) -> None: ...


class Life:
    """Lives as long as the weight that it is an attribute of.

    Weak references go to it and not to the weight, because torch exchanges no tensor that has one (torch.utils.swap_tensors).
    """

    def __init__(self) -> None:
        self.in_store = True


class HostBuffer:
    """The host memory of one weight.

    ``host``: its values, on the CPU.  ``written``: counts the writes through weights; those to the memory itself are in its
    tensor's ``_version``.  ``names``: all its names in the model.  ``origin``: the device that it came from.  ``grad``: the
    gradient that it had.  ``fill``: writes what the weight is to have at the next call, for one that a module fills; None for
    any other.
    """

    def __init__(self, host: torch.Tensor, backing: Backing | None = None, name: str = "a weight") -> None:
        self.host = host
        self.written = 0
        self.names: tuple[str, ...] = (name,)
        self.origin = host.device
        self.grad: torch.Tensor | None = None
        self.fill: Callable[[], None] | None = None
        self._backing = Backing(host) if backing is None else backing  # only make_private changes it
        self._store: Store | None = None
        self._life: Callable[[], Life | None] = lambda: None
        self._writes: torch.Tensor | None = None  # has the version of the weight, and nothing else
        self._resident: tuple[int, weakref.ref[torch.Tensor]] | None = None
        self._resident_in: weakref.WeakSet[object] = weakref.WeakSet()  # the arenas whose programs read it
        self._unpin: weakref.finalize[[list[HostReader], Callable[[], None]], HostBuffer] | None = None
        self._copied_by: list[HostReader] = []

    def join(self, store: Store, names: tuple[str, ...], origin: torch.device, host: torch.Tensor, weight: Any) -> None:
        """Be in a store from now on, as the memory of the HostWeight ``weight``, whose values are in ``host``."""
        self.host, self.names, self.origin = host, names, origin
        weight.life = life = Life()
        self._store, self._life = store, weakref.ref(life)
        self._writes = alias(weight)
        self._writes.__dict__.clear()

    def leave(self) -> None:
        """Be in no store from now on: its weight is in no placed model."""
        self._store = None
        if (life := self.life) is not None:
            del life.in_store

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def store(self) -> Store:
        """That of the placed model.  Only a weight that :func:`buffer_of` finds has one."""
        assert self._store is not None
        return self._store

    @property
    def order(self) -> int:
        """In which order an op that writes several weights holds up programs: two threads never hold each other up."""
        return id(self._store)

    @property
    def life(self) -> Life | None:
        """That of the weight; None if it was dropped or got other memory."""
        return self._life()

    def is_alive_in(self, store: object) -> bool:
        """Whether it is in this store, and its weight exists."""
        return self._store is store and self.life is not None

    def is_of(self, weight: Any) -> bool:
        """Whether it is in a store as the memory of this weight, and not of a view."""
        return self._store is not None and (life := self.life) is not None and weight.__dict__.get("life") is life

    @property
    def version(self) -> int:
        """Changes with every write to the values, through a weight or to the host tensor itself."""
        return self.written + self.host._version + (0 if self._writes is None else self._writes._version)

    @property
    def where(self) -> Where:
        """The place of the bytes."""
        return self._backing.where

    @property
    def scratch(self) -> bool:
        """Whether the host tensor is a mapping of a scratch file."""
        return self._backing.scratch

    @property
    def drive(self) -> DriveBytes | None:
        """The bytes on the drive, None if the values are in host memory."""
        return self._backing.bytes if self.where is Where.FILE else None

    @property
    def source(self) -> Source:
        """The bytes that programs copy.  Raises as :meth:`write` for a weight on the drive that was written unseen."""
        if self.where is Where.FILE_WRITTEN:
            self.make_private()
        return self.drive or flat_bytes(self.host)

    @property
    def nbytes(self) -> int:
        return self.host.numel() * self.host.element_size()

    @property
    def on_device(self) -> torch.Tensor | None:
        """The copy of the values on the store's device that programs use now, None if there is none."""
        version, ref = self._resident or (None, None)
        return None if ref is None or version != self.version else ref()

    def resident(self, stagings: GpuStagings, arena: object) -> torch.Tensor:
        """A copy of the values on the store's device, shared by all programs that use it at the same time.

        ``arena``: theirs, where no step runs now.  The copy gets new values in place if no program of another one reads it.
        """
        current, version = self.on_device, self.version  # before the copy: newer values need another
        stale = None if self._resident is None else self._resident[1]()
        only_here = not self._resident_in - {arena}
        self._resident_in.add(arena)
        if current is not None:
            return current
        self.check()
        if stale is not None and only_here:
            with torch.inference_mode(stale.is_inference()), torch.no_grad():
                renewed = stale.copy_(self.host)
        else:
            renewed = stagings.brought(self.host, self.store.device, copy=True)
        self._resident = version, weakref.ref(renewed)
        return renewed

    def check(self) -> None:
        """Raise ChunkflowError if the host tensor is a mapping of a file on the drive that has changed.

        That also matters once it was written, as through a tensor of ``state_dict``: pages that were not are the file's.
        """
        self._backing.check()

    def read(self, nbytes: int) -> None:
        """An op outside programs reads the values."""
        if self._store is not None:
            self.check()
            self._store.count(self.name, nbytes)

    def export_view(self, view: torch.Tensor) -> torch.Tensor:
        """A view of the values, for a state_dict: what writes it may go unnoticed, see :meth:`Store.mark_exported_dirty`.

        Of memory that other ranks read, it is a copy.  Raises ChunkflowError if there is no memory for that.
        """
        self.check()
        backing = self._backing
        exported = backing.view_to_write(view)
        if backing is not self._backing:  # another thread has written it
            return self.export_view(view)
        if self._store is not None and self.where is not Where.SHARED:
            self._store.exported.append((weakref.ref(exported), weakref.ref(self)))
        return exported

    @contextlib.contextmanager
    def write(self, leaves: bool = False) -> Iterator[None]:
        """Hold the steps of the model's programs, wait for the copies that read the weight, and make it private.

        ``leaves``: whether it gets other memory instead: what it had stays as it is then.
        Raises ChunkflowError if there is no room, or the checkpoint has changed.
        """
        with contextlib.nullcontext() if self._store is None else self._store.quiet():
            self.sync_copies()
            if leaves:
                self.on_storage_replaced()
            else:
                self.make_private()
            yield

    def on_storage_replaced(self) -> None:
        """The weight gets other memory, which is not on the drive."""
        if self._store is not None and self.drive is not None:
            how = "got other memory, as by .to(dtype), p.data = ... or load_state_dict(assign=True)"
            self._store.warn_over_bound(self.name, f"{how}, and is no longer on the drive", self.nbytes)

    def make_private(self, lazily: bool = False) -> None:
        """Give the weight memory of its own, at the same address.  No copy reads it now.

        ``lazily``: where there is no room, a page takes memory when it is written.  Raises ChunkflowError as :meth:`write`.
        """
        if (before := self.where) is Where.OWN:
            return
        self.check()
        if before is Where.SHARED:
            self.unpin()  # the pages that a device reads are those at the address when they were pinned
            self.written += 1  # programs pin it again, also if there is no memory
        self._backing.make_private(self.name, lazily)
        self._backing = Backing(self.host)
        if before is not Where.SHARED and self._store is not None:
            self._store.warn_over_bound(self.name, "is written, and goes from the drive into host memory for that")

    def check_room_for_copy(self, nbytes: int) -> None:
        """The values are about to be copied into so many bytes of host memory.

        Raises ChunkflowError if they are on the drive, and there is no room.
        """
        if self.drive is not None and (cause := no_room(nbytes)) is not None:
            raise ChunkflowError(
                f"{self.name} is on the drive, and a copy of it ({size(nbytes)}) finds no room in host memory: {cause}. Free "
                "host memory, or load the model once more, or in another dtype, with host_memory=."
            )

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    @property
    def should_pin(self) -> bool:
        """Whether there is host memory to pin, and it is not pinned."""
        return self._unpin is None and self.store.pins and self.drive is None

    def pin(self, device: HostReader, fits: bool = True) -> None:
        """Pin the host memory for the device's copies, once; if that fails, the store warns.

        ``fits``: whether there is room for it; if not, the device copies it as it is.
        """
        self._copied_by[:] = [d for d in self._copied_by if d is not device and not d.closed] + [device]
        if not self.should_pin:
            return
        if self.where is Where.FILE_WRITTEN:
            self.make_private()  # the pages must not change under a device
        if not fits:
            return
        try:
            # a model that is dropped without restore must not leave its pages pinned after they are unmapped
            self._unpin = weakref.finalize(self, _unpin, self._copied_by, self._pinned(device))
            self._unpin.atexit = False
        except OSError as error:
            self.store.disable_pinning(self, str(error))

    def _pinned(self, device: HostReader) -> Callable[[], None]:
        """Pin, twice if need be: the kernel may refuse pages that another rank pins at the moment."""
        try:
            return device.pin(self.host)
        except OSError:
            if self.where is not Where.SHARED:
                raise
            time.sleep(_RETRY_S)
            return device.pin(self.host)

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def sync_copies(self) -> None:
        """Wait for the copies that read the host memory for steps that have returned."""
        for device in self._copied_by:
            device.sync_copies()


def buffer_of(tensor: object) -> HostBuffer | None:
    """The memory of an offloaded weight that is in a store, None for any other object, also for a view of one."""
    buffer = getattr(tensor, "__dict__", {}).get("buffer")
    return buffer if isinstance(buffer, HostBuffer) and buffer.is_of(tensor) else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpin(devices: Sequence[HostReader], undo: Callable[[], None]) -> None:
    """Unpin after the copies that read the memory.  A failed device must not prevent restoring the model."""
    try:
        for device in devices:
            with contextlib.suppress(ChunkflowError):
                device.sync_copies()
    finally:
        try:
            undo()
        except OSError as error:
            warnings.warn(f"Host memory could not be unpinned and stays pinned: {error}.", stacklevel=2)
