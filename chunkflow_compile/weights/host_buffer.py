"""The host memory of one weight: where its values are, what copies of them exist, and who may write them.

All views of a weight have one.  It may be in the store of a placed model; else it is memory and a count of writes.

Note: the places of a weight's bytes
------------------------------------
The values are in ``HostBuffer.host``, a tensor on the CPU.  Its pages are at one of four places (:class:`Where`):

* OWN: pages of this process.  Ops on the weight write them, and so do tensors of a state_dict, which no count sees.
* SHARED: pages of a memfd that the ranks of a machine map.  The loader writes them, before any weight is in them.
* FILE: a private mapping of a checkpoint or of a scratch file, which the loader writes.  Copies read the file itself.
* FILE_WRITTEN: the same mapping, of which a tensor of a state_dict has written pages, which are this process's now.

Those of a packed weight are in ``HostBuffer.stored``, at one of the first three places; ``host`` is address space without
pages then, see ``packed.py``.  A write opens it and packs it again; if the values do not fit, the weight is OWN and raw.

:class:`WeightLoader` chooses the first place.  From there bytes move one way, to OWN, at the same address, so that views stay
views: ``make_private``, before a write, before pages that may change are pinned, and when a shared one is restored.  A weight
that gets other memory (``p.data = ...``) gets another HostBuffer.

Copies of the values, none of which is written by anybody but its maker:

* on the devices of the ranks of a node, a piece on each (``pieces``), until the weight is written on this rank; not read
  while a tensor of a state_dict may write it;
* on the device, one that stays (``resident``), refreshed when ``version`` has changed, or slots of an arena, filled in each
  step;
* in an op outside programs, one for that op; of a packed weight also on the CPU;
* in a state_dict, the memory itself (``exported``), whose writes :meth:`HostBuffer.settle` takes; of SHARED pages a mapping
  that copies a page when it is written, and whose writes are not the model's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.problem import Source
from chunkflow_compile.private_torch import core
from chunkflow_compile.units import size

from .backing import Backing, Where
from .bytes import alias, flat_bytes, in_one_memory, part_of, place_of
from .limits import no_room
from .locks import ProcessLock
from .mapping import close_pages
from .packed import Packed
from .pieces import Pieces
from .pinning import HostReader, Pins
from .source import Bytes
from .staging import GpuStagings
from .store import Export, Store


class Form(Enum):
    """The form in which the values of a weight are stored."""

    RAW = "raw, for good"
    COMPRESSIBLE = "raw, and may be compressed"
    COMPRESSED = "compressed"


class Life:
    """Lives as long as the weight that it is an attribute of.

    Weak references go to it and not to the weight, because torch exchanges no tensor that has one (torch.utils.swap_tensors).
    ``state``: another object after each change of the buffer that the version of its host tensor does not count.  It is
    deleted when the weight leaves its store.
    """

    def __init__(self) -> None:
        self.state = object()

    def change(self) -> None:
        self.state = object()

    def leave_store(self) -> None:
        self.__dict__.pop("state", None)


class HostBuffer:
    """The host memory of one weight.

    ``host``: its values, on the CPU.  ``written``: counts the writes through weights; those to the memory itself are in its
    tensor's ``_version``.  ``names``: all its names in the model.  ``origin``: the device that it came from.  ``grad``: the
    gradient that it had.  ``fill``: writes what the weight is to have at the next call, for one that a module fills; None for
    any other.  ``pieces``: those on the devices of the ranks of a node, or None.  ``keeps_pieces``: whether they stay while a
    tensor of a state_dict has the memory, which may write it; copies do not read them then.
    ``backing``: where its bytes lie.  ``form``: in which form; one that is compressible has whole pages of its own.
    """

    def __init__(
        self, host: torch.Tensor, backing: Backing | None = None, name: str = "a weight", compressible: bool = False
    ) -> None:
        self.host = host
        self.written = 0
        self.names: tuple[str, ...] = (name,)
        self.origin = host.device
        self.grad: torch.Tensor | None = None
        self.fill: Callable[[], None] | None = None
        self.pieces: Pieces | None = None
        self.keeps_pieces = False
        self.backing = Backing(host) if backing is None else backing  # only _back changes it
        raw = Form.COMPRESSIBLE if compressible else Form.RAW
        self.form = Form.COMPRESSED if self.backing.compressed else raw
        self._lock = ProcessLock()  # for what reads the form of the values, and what changes it
        self._writing = ProcessLock()  # held for a write, longer than the other one
        self._copied_from = weakref.WeakValueDictionary[int, Any]()  # the raw memory, as programs refer to it
        self.exposed = False  # whether code of other compilers has used it
        self._uses = 0  # of the memory, by this and the weight, as ``uses`` counts them
        self._store: Store | None = None
        self._life: Callable[[], Life | None] = lambda: None
        self._writes: torch.Tensor | None = None  # has the version of the weight, and nothing else
        self._resident: tuple[int, weakref.ref[torch.Tensor]] | None = None
        self._resident_in: weakref.WeakSet[object] = weakref.WeakSet()  # the arenas whose programs read it
        self._pins = Pins()

    def enter(
        self,
        store: Store,
        names: tuple[str, ...],
        origin: torch.device,
        host: torch.Tensor,
        weight: Any,
        grad: torch.Tensor | None = None,
    ) -> None:
        """Be in a store from now on, as the memory of the HostWeight ``weight``, whose values are in ``host``.

        ``grad``: the gradient of the weight that it replaces, or None.
        """
        self.host, self.names, self.origin = host, names, origin
        self.grad = self.grad if grad is None else grad
        weight.life = life = Life()
        self._store, self._life = store, weakref.ref(life)
        self._writes = alias(weight)
        self._writes.__dict__.clear()
        self._uses = self._own_uses(weight.host)

    def _own_uses(self, view: torch.Tensor) -> int:
        """Uses of the memory by this and by a weight whose host tensor is ``view``, as :func:`uses` counts them: each tensor,
        that of which it is a view, and the storage that is asked."""
        tensors = (self.host, view, self.host._base, view._base)
        return 1 + len({id(tensor) for tensor in tensors if tensor is not None})

    def is_only_used_by(self, view: torch.Tensor) -> bool:
        """Whether the memory is all of its storage, and nobody but a weight whose host tensor is ``view`` uses it."""
        return self._is_whole and core.storage_uses(self.host) <= self._own_uses(view) and not self._copied_from

    @property
    def _is_whole(self) -> bool:
        return self.host.untyped_storage().nbytes() == self.host.nbytes

    def leave(self) -> None:
        """Be in no store from now on: its weight is in no placed model."""
        self._store, self.pieces, self.keeps_pieces = None, None, False
        if (life := self.life) is not None:
            life.leave_store()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def store(self) -> Store:
        """That of the placed model.  Only a weight that :func:`buffer_of` finds has one."""
        assert self._store is not None
        return self._store

    @property
    def order(self) -> tuple[int, int]:
        """In which order an op that writes several weights locks models, and weights in each: two threads never wait for each
        other."""
        return id(self._store), id(self)

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
    def compressed(self) -> bool:
        return self.form is Form.COMPRESSED

    @property
    def stored(self) -> torch.Tensor:
        """What copies to the device read: the packed values, int32 [Layout.words], or the host tensor."""
        return self.backing.stored if self.backing.compressed else self.host

    @property
    def source(self) -> Source:
        """Where programs that start now copy it from, and in which form."""
        return Source(
            file=self.backing.file_bytes is not None,
            values=self.host.nbytes if self.compressed else 0,
            ranks=0 if self.pieces is None else len(self.pieces.held),
        )

    @property
    def bytes(self) -> Bytes:
        """The bytes that programs copy.  Raises as :meth:`write` for a weight on the drive that was written unseen."""
        if self.backing.where is Where.FILE_WRITTEN:
            self.make_private()
        return self.bytes_now

    @property
    def bytes_now(self) -> Bytes:
        """The same, unless the weight was written unseen.  What was written is no longer what the pieces have."""
        if (pieces := self.pieces) is not None and pieces.version == self.version:
            return pieces
        if not self.keeps_pieces:
            self.pieces = None
        if (in_file := self.backing.file_bytes) is not None:
            return in_file
        if self.compressed or not self.host.nbytes:
            return flat_bytes(self.stored)
        place = place_of(self.host)
        self._copied_from[id(place)] = place
        return torch.frombuffer(place, dtype=torch.uint8)  # its storage is its own, so it is no use of the weight's

    @property
    def nbytes(self) -> int:
        """Bytes that are stored, and copied."""
        return self.stored.nbytes

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
                renewed = stale.copy_(self.stored)
        else:
            renewed = stagings.brought(self.stored, self.store.device, copy=True)
        self._resident = version, weakref.ref(renewed)
        return renewed

    def check(self) -> None:
        """Raise ChunkflowError if the host tensor is a mapping of a file on the drive that has changed.

        That also matters once it was written, as through a tensor of ``state_dict``: pages that were not are the file's.
        """
        self.backing.check()

    def read(self, nbytes: int) -> None:
        """An op outside programs reads the values."""
        if self._store is not None:
            self.check()
            self._store.count(self.name, nbytes)

    def warn_of_compiler(self, backend: str) -> None:
        """Another backend compiles code that copies the values in each of its calls."""
        if self._store is not None:
            self._store.warn_of_compiler(self.name, backend)

    def values(self, view: torch.Tensor) -> torch.Tensor:
        """A view of the host tensor as an ordinary tensor, to be read; of a packed weight it is a copy.

        Raises ChunkflowError if there is no room for a copy, or if it is a mapping of a file that has changed.
        """
        self.check()
        with self._lock():
            backing = self.backing
            if not isinstance(backing, Packed) or backing.is_open_here:
                with unset_fake_temporarily():
                    return view.detach()
        return part_of(backing.read(self.name), view)

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """The values of a view of the host tensor, in memory of their own.  Raises as :meth:`values`."""
        values = self.values(view)
        whole = values.untyped_storage().nbytes() == view.nbytes
        return values if whole and not in_one_memory(values, view) else values.clone()

    def export_view(self, view: torch.Tensor) -> torch.Tensor:
        """A view of the values, for a state_dict: what writes it writes the weight, see :meth:`settle`.

        Of memory that other ranks read it is a copy.  Raises ChunkflowError if there is no room.
        """
        self.check()
        backing = self.backing
        if isinstance(backing, Packed):
            with self._writing():
                if backing is not self.backing:
                    return self.export_view(view)
                exported = part_of(backing.exported(self.name), view)
            if self._store is not None:
                self._store.exported[Export(weakref.ref(exported.untyped_storage()), weakref.ref(self))] = None
            return exported
        exported = backing.view_to_write(view)
        if backing is not self.backing:  # another thread has written it
            return self.export_view(view)
        if self._store is not None and self.backing.where is not Where.SHARED:
            self._store.exported[Export(weakref.ref(exported), weakref.ref(self))] = None
        return exported

    def fill_with(self, fill: Callable[[], None]) -> None:
        """Before each call of a program that reads it, ``fill`` writes its values."""
        self.fill = fill

    def count_write(self) -> None:
        """Its values were written through a weight."""
        self.written += 1
        self._changed()

    def expose(self) -> None:
        """The code of another compiler gets the memory.  What it writes is counted by the version of the weight alone."""
        if not self.exposed:
            self.exposed = True
            self._changed()

    def _changed(self) -> None:
        """Give the weight another state, which programs compare."""
        if (life := self.life) is not None:
            life.change()
            if self._store is None:  # asked last: another thread may make it leave
                life.leave_store()

    def _set_form(self, form: Form) -> None:
        if form is not self.form:
            self.form = form
            self._changed()

    def shard_into(self, pieces: Pieces) -> None:
        """From now on, programs read these pieces on the devices of the ranks, until the weight is written."""
        self.pieces = pieces

    def regain_pieces(self, same: Callable[[HostBuffer, Pieces], bool] | None) -> None:
        """Only its model can write it again.  Its pieces may have its values although writes were counted.

        ``same``: returns whether pieces have the values of a weight on all ranks; None if there are no other ranks.
        """
        self.keeps_pieces, pieces = False, self.pieces
        if same is not None and pieces is not None and pieces.version != self.version and same(self, pieces):
            self.pieces = replace(pieces, version=self.version)

    def settle(self) -> bool:
        """Take what was written to tensors of a state_dict since this was called last: it counts as a write from now on.

        Pieces are kept until :meth:`regain_pieces`, because they may have these values.
        Returns whether programs may have copied older values.  Raises as :meth:`write`.
        """
        self.keeps_pieces = True
        changed = self.backing.settle()
        if changed and self.compressed:
            with self.write():
                pass
        if changed:
            self.count_write()
        return changed

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """No step of the model's programs runs, and no other thread writes the weight."""
        with contextlib.nullcontext() if self._store is None else self._store.quiet(), self._writing():
            yield

    @contextlib.contextmanager
    def write(self, leaves: bool = False) -> Iterator[None]:
        """Hold the steps of the model's programs, wait for the copies that read the weight, and make it private.

        A packed weight is packed again after it; if the values do not fit, it is raw, and the programs of the model end.
        ``leaves``: whether it gets other memory instead: what it had stays as it is then.
        Raises ChunkflowError if there is no room, or the checkpoint has changed.
        """
        with self._quiet():
            self.sync_copies()
            if leaves:
                self.on_storage_replaced()
            else:
                self.make_private()
            backing = self.backing
            if leaves or not isinstance(backing, Packed) or backing.is_open_here:
                yield
                return
            try:
                with backing.opened(self.name):
                    yield
            finally:
                if backing.is_open:  # it does not fit, or was interrupted
                    self._become_raw()
                    if self._store is not None:
                        self._store.warn_of_raw(self)
                        self._store.end_programs()

    def pack(self) -> bool:
        """Pack the values, in place of their memory: views stay views.  Returns whether they are packed now.

        They cannot be if too many escape, if another tensor or array has the memory, such as one of a state_dict, or if there
        is no room for a moment.  Holds up programs as :meth:`write`.
        """
        if self.form is not Form.COMPRESSIBLE:
            return self.compressed
        with self._quiet():
            self.sync_copies()
            raw = self.backing
            if self._used and self._store is not None:
                self._store.end_programs()  # they refer to what they copy
            able = self.fill is None and not self._used and raw.where is Where.OWN
            packed = Packed.of(self.host) if able else None
            if packed is not None:
                self.unpin()
                self._back(packed)
                if self._used:  # since then, by an op of another thread
                    self._back(raw)
                else:
                    close_pages(self.host)
            if packed is None:
                self._set_form(Form.RAW)
        return self.compressed

    def unpack(self, leaves: bool = False, lazily: bool = False) -> None:
        """Let the weight be raw from now on, at the same address.  Holds up programs as :meth:`write`.

        ``leaves``: whether it leaves the store.  ``lazily``: whether it takes its memory where there may be no room.
        Raises ChunkflowError if there is no room, or the file has changed.
        """
        with self._quiet():
            self.sync_copies()
            backing = self.backing
            if isinstance(backing, Packed):
                self.check()
                try:
                    backing.open(self.name, lazily)
                finally:
                    if backing.is_open:  # also after an interrupt
                        self._become_raw()
                if self._store is not None and not leaves:
                    self._store.warn_over_bound(self.name, "is no longer packed")
            self._set_form(Form.RAW)

    def _become_raw(self) -> None:
        """The pages of a packed weight stay open."""
        if isinstance(self.backing, Packed):
            self.backing.own()
        self._back(Backing(self.host))
        self.unpin()

    def _back(self, backing: Backing) -> None:
        """Have the bytes there from now on."""
        with self._lock():
            if self.compressed != backing.compressed:
                self._set_form(Form.COMPRESSED if backing.compressed else Form.RAW)
                self._resident, self.pieces = None, None
            self.backing = backing

    @property
    def _used(self) -> bool:
        """Whether a program, a view, or an op of another thread has the memory, which must not lose its pages then."""
        return core.storage_uses(self.host) > self._uses or bool(self._copied_from)

    @property
    def is_lent(self) -> bool:
        """Whether a view of raw values is in use, such as an array that was made of a tensor of a state_dict.

        False where the weight has only a part of its storage: the other parts have users of their own.
        """
        return not self.compressed and self._is_whole and core.storage_uses(self.host) > self._uses

    def on_storage_replaced(self) -> None:
        """The weight gets other memory, which is not on the drive."""
        if self._store is not None and self.backing.file_bytes is not None:
            how = "got other memory, as by .to(dtype), p.data = ... or load_state_dict(assign=True)"
            self._store.warn_over_bound(self.name, f"{how}, and is no longer on the drive", self.nbytes)

    def make_private(self, lazily: bool = False) -> None:
        """Give the weight memory of its own, at the same address.  No copy reads it now.

        ``lazily``: where there is no room, a page takes memory when it is written.  Raises ChunkflowError as :meth:`write`.
        """
        if (before := self.backing.where) is Where.OWN:
            return
        self.check()
        if before is Where.SHARED:
            self.unpin()  # the pages that a device reads are those at the address when they were pinned
            self.count_write()  # programs pin it again, also if there is no memory
        self._back(self.backing.make_private(self.name, lazily))
        if before is not Where.SHARED and self._store is not None:
            self._store.warn_over_bound(self.name, "is written, and goes from the drive into host memory for that")

    def check_room_for_copy(self, nbytes: int) -> None:
        """The values are about to be copied into so many bytes of host memory.

        Raises ChunkflowError if they are on the drive, and there is no room.
        """
        if self.backing.file_bytes is not None and (cause := no_room(nbytes)) is not None:
            raise ChunkflowError(
                f"{self.name} is on the drive, and a copy of it ({size(nbytes)}) finds no room in host memory: {cause}. Free "
                "host memory, or load the model once more, or in another dtype, with host_memory=."
            )

    @property
    def pinned(self) -> bool:
        return self._pins.pinned

    @property
    def should_pin(self) -> bool:
        """Whether there is host memory to pin, and it is not pinned."""
        return not self.pinned and self.store.pins and isinstance(self.bytes_now, torch.Tensor)

    def pin(self, device: HostReader, fits: bool = True) -> None:
        """Pin the host memory for the device's copies, once; if that fails, the store warns.

        ``fits``: whether there is room for it; if not, the device copies it as it is.
        """
        self._pins.add(device)
        if not self.should_pin:
            return
        if self.backing.where is Where.FILE_WRITTEN:
            self.make_private()  # the pages must not change under a device
        if not fits:
            return
        try:
            self._pins.pin(self.stored, device, self, again=self.backing.where is Where.SHARED)
        except OSError as error:
            self.store.disable_pinning(self, str(error))

    def unpin(self) -> None:
        self._pins.unpin()

    def sync_copies(self) -> None:
        """Wait for the copies that read the host memory for steps that have returned."""
        self._pins.sync_copies()


def buffer_of(tensor: object) -> HostBuffer | None:
    """The memory of an offloaded weight that is in a store, None for any other object, also for a view of one."""
    buffer = getattr(tensor, "__dict__", {}).get("buffer")
    return buffer if isinstance(buffer, HostBuffer) and buffer.is_of(tensor) else None


def store_of(tensor: object) -> Store | None:
    """The store of an offloaded weight, None for any other object, and for a weight that another thread has restored."""
    buffer = buffer_of(tensor)
    return None if buffer is None else buffer._store
