"""The host memory of one weight: where its values are, what copies of them exist, and who may write them.

All views of a weight have one.  It may be in the store of a placed model; else it is memory and a count of writes.
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

from .backing import Backing, FileSlice, SharedMemory
from .bytes import alias, flat_bytes
from .counts import Counts
from .limits import Room, no_room
from .source import DriveBytes, Source
from .staging import GpuStagings

# Until pages are pinned again that another rank may have been pinning: as long as it takes for a large weight.
_AGAIN_S = 0.2


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
    lent: list[tuple[weakref.ref[torch.Tensor], weakref.ref[HostBuffer]]]

    def quiet(self) -> AbstractContextManager[object]: ...

    def reclaim(self) -> None: ...

    @property
    def root(self) -> Any: ...

    def room(self, budget: int | None) -> Room: ...

    def pageable(self, buffer: HostBuffer, cause: str) -> None: ...

    def entered(self, name: str, how: str, more: int = 0) -> None: ...

    def count(self, name: str, nbytes: int) -> None: ...


class Life:
    """Lives as long as the weight that it is an attribute of.

    Weak references go to it and not to the weight, because torch exchanges no tensor that has one (torch.utils.swap_tensors).
    """

    def __init__(self) -> None:
        self.in_store = True


class HostBuffer:
    """The host memory of one weight.

    ``host``: its values, on the CPU.  ``backing``: where they lie, None for memory of this process alone.  ``written``:
    counts the writes through weights; those to the memory itself are in its tensor's ``_version``.  ``names``: all its names
    in the model.  ``origin``: the device that it came from.  ``grad``: the gradient that it had.  ``fill``: writes what the
    weight is to have at the next call, for one that a module fills; None for any other.
    """

    def __init__(self, host: torch.Tensor, backing: Backing | None = None, name: str = "a weight") -> None:
        self.host = host
        self.backing = backing
        self.written = 0
        self.names: tuple[str, ...] = (name,)
        self.origin = host.device
        self.grad: torch.Tensor | None = None
        self.fill: Callable[[], None] | None = None
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

    def lasts_in(self, store: object) -> bool:
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
    def shared(self) -> SharedMemory | None:
        """The memory, if other ranks map it too."""
        return self.backing if isinstance(self.backing, SharedMemory) else None

    @property
    def scratch(self) -> bool:
        """Whether the host tensor is a mapping of a scratch file."""
        return isinstance(self.backing, FileSlice) and self.backing.scratch

    @property
    def drive(self) -> DriveBytes | None:
        """The bytes on the drive, None if the values are in host memory."""
        return self.backing.bytes if isinstance(self.backing, FileSlice) else None

    @property
    def source(self) -> Source:
        """The bytes that programs copy.  Raises as :meth:`write` for a weight on the drive that was written unseen."""
        if self.drive is None and isinstance(self.backing, FileSlice):
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
        found, version = self.on_device, self.version  # before the copy: newer values need another
        stale = None if self._resident is None else self._resident[1]()
        alone = not self._resident_in - {arena}
        self._resident_in.add(arena)
        if found is not None:
            return found
        self.check()
        if stale is not None and alone:
            with torch.inference_mode(stale.is_inference()), torch.no_grad():
                made = stale.copy_(self.host)
        else:
            made = stagings.brought(self.host, self.store.device, copy=True)
        self._resident = version, weakref.ref(made)
        return made

    def check(self) -> None:
        """Raise ChunkflowError if the host tensor is a mapping of a file on the drive that has changed.

        That also matters once it was written, as through a tensor of ``state_dict``: pages that were not are the file's.
        """
        if isinstance(self.backing, FileSlice):
            self.backing.check()

    def read(self, nbytes: int) -> None:
        """An op outside programs reads the values."""
        if self._store is not None:
            self.check()
            self._store.count(self.name, nbytes)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of its memory that a state_dict has: what writes it may go unnoticed, see :meth:`Store.reclaim`."""
        if self._store is not None:
            self._store.lent.append((weakref.ref(tensor), weakref.ref(self)))
        return tensor

    @contextlib.contextmanager
    def write(self, leaves: bool = False) -> Iterator[None]:
        """Hold the steps of the model's programs, wait for the copies that read the weight, and make it private.

        ``leaves``: whether it gets other memory instead: what it had stays as it is then.
        Raises ChunkflowError if there is no room, or the checkpoint has changed.
        """
        with contextlib.nullcontext() if self._store is None else self._store.quiet():
            self.settle()
            if leaves:
                self.replaced()
            else:
                self.make_private()
            yield

    def replaced(self) -> None:
        """The weight gets other memory, which is not on the drive."""
        if self._store is not None and self.drive is not None:
            how = "got other memory, as by .to(dtype), p.data = ... or load_state_dict(assign=True)"
            self._store.entered(self.name, f"{how}, and is no longer on the drive", self.nbytes)

    def make_private(self) -> None:
        """Give the weight memory of its own, if other ranks share it or it is on the drive.  No copy reads it now."""
        if self.backing is None:
            return
        self.check()
        if self.shared is not None:
            self.unpin()  # the pages that a device reads are those at the address when they were pinned
            self.written += 1  # programs pin it again, also if there is no memory
        self.backing.make_private(self.name)
        came, self.backing = isinstance(self.backing, FileSlice), None
        if came and self._store is not None:
            self._store.entered(self.name, "is written, and goes from the drive into host memory for that")

    def copied(self, nbytes: int) -> None:
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
    def pins(self) -> bool:
        """Whether there is host memory to pin, and it is not pinned."""
        return self._unpin is None and self.store.pins and self.drive is None

    def pin(self, device: HostReader, fits: bool = True) -> None:
        """Pin the host memory for the device's copies, once; if that fails, the store warns.

        ``fits``: whether there is room for it; if not, the device copies it as it is.
        """
        self._copied_by[:] = [d for d in self._copied_by if d is not device and not d.closed] + [device]
        if not self.pins:
            return
        if isinstance(self.backing, FileSlice):
            self.make_private()  # the pages must not change under a device
        if not fits:
            return
        try:
            # a model that is dropped without restore must not leave its pages pinned after they are unmapped
            self._unpin = weakref.finalize(self, _unpin, self._copied_by, self._pinned(device))
            self._unpin.atexit = False
        except OSError as error:
            self.store.pageable(self, str(error))

    def _pinned(self, device: HostReader) -> Callable[[], None]:
        """Pin, twice if need be: the kernel may refuse pages that another rank pins at the moment."""
        try:
            return device.pin(self.host)
        except OSError:
            if self.shared is None:
                raise
            time.sleep(_AGAIN_S)
            return device.pin(self.host)

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def settle(self) -> None:
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
