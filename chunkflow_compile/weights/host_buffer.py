"""The host memory of one weight: where its values are stored, which copies of them exist, and who may write them.

All views of a weight share one HostBuffer.  A HostBuffer may belong to the store of a placed model.  A HostBuffer
without a store only holds memory and counts writes.

Note: where the bytes of a weight are stored
--------------------------------------------
The values are in ``HostBuffer.host``, a tensor on the CPU.  Its pages are of one of four types (:class:`Where`):

* OWN: private pages of this process.  Ops on the weight write to them.  Users may also write to them through the tensors
  of a state_dict, and some of these writes change no version counter.
* SHARED: pages of a memfd that the ranks of a machine map.  Only the loader writes them, before any weight uses them.
* FILE: a private mapping of a checkpoint, or of a scratch file that the loader has written.  Programs copy from the
  file itself.
* FILE_WRITTEN: a mapping as for FILE, after a write through a tensor of a state_dict; the written pages are private to
  this process.

The bytes of a packed weight are in ``HostBuffer.stored``, in pages of one of the first three types.  The ``host`` of a
packed weight is address space without pages; see ``packed.py``.  During a write, ``host`` has pages with the unpacked
values.  After the write, the new values are packed.  If they do not fit in the packed form, the weight is OWN and
unpacked from then on.

:class:`WeightLoader` chooses the initial type.  After that, the bytes can only move to OWN pages.  The bytes keep
their address, so that views remain valid.  ``make_private`` moves the bytes before a write, before the pages of a written
mapping are pinned or read by programs, and when a shared weight is restored.  A weight that is given other memory
(``p.data = ...``) gets a new HostBuffer.

The following copies of the values may exist.  Of these copies, users can write only to the tensors of a state_dict:

* Pieces on the devices of the ranks of a node, one per rank (``pieces``), until the weight is written on this rank.
  This rank does not read the pieces while the weight may be written through a tensor of a state_dict.
* On the device of this rank, either a resident copy (``resident``), which is refreshed when ``version`` has changed, or
  slots of an arena, which are filled in each step.
* For an op outside programs, a temporary copy that only this op reads.  For a packed weight, even an op on the CPU gets
  such a copy.
* In a state_dict, tensors that share the memory of the weight itself (``exported``); :meth:`HostBuffer.settle` detects
  writes to them.  For SHARED pages, these tensors are copy-on-write mappings, and writes to them do not reach the
  model.
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
from chunkflow_compile.units import size

from .backing import Backing, Where
from .bytes import alias, flat_bytes, part_of, share_storage
from .limits import no_room
from .locks import ProcessLock
from .mapping import close_pages
from .memory_uses import MemoryUses
from .packed import Packed
from .peer_pieces import Pieces
from .pinning import HostReader, Pins
from .resident_copy import ResidentCopy
from .source import Bytes
from .staging import GpuStagings
from .store import Export, Store
from .weight_token import WeightToken


class Form(Enum):
    """The form in which the values of a weight are stored."""

    RAW = "raw, for good"
    COMPRESSIBLE = "raw, and may be compressed"
    COMPRESSED = "compressed"


class HostBuffer:
    """The host memory of one weight.

    ``host``: the values, on the CPU.  ``written``: the number of writes through HostWeights; ``host._version`` counts
    writes to the host tensor itself.
    ``names``: all names of the weight in the model.  ``origin``: the device of the weight before it was offloaded.
    ``grad``: the gradient of the weight before it was offloaded, or None.
    ``fill``: for a weight whose values a module computes, a function that writes the values before each call of a
    program; None for other weights.  ``pieces``: the pieces of the weight on the devices of the ranks, or None.
    ``keeps_pieces``: whether pieces are kept although a write was counted.  Kept pieces are not read until
    :meth:`regain_pieces` finds that they still have the values of the weight.
    ``backing``: the storage of the bytes.  ``form``: the form of the bytes.  The pages of a compressible weight contain
    only the bytes of this weight.
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
        self.backing = Backing(host) if backing is None else backing  # changed by _set_backing only
        raw = Form.COMPRESSIBLE if compressible else Form.RAW
        self.form = Form.COMPRESSED if self.backing.compressed else raw
        # held while the form of the values is read or changed
        self._lock = ProcessLock()
        # held during a whole write, unlike ``_lock``
        self._writing = ProcessLock()
        # whether code compiled by other backends has used the memory
        self.exposed = False
        self._uses = MemoryUses()
        self._store: Store | None = None
        self._token: Callable[[], WeightToken | None] = lambda: None
        self._writes: torch.Tensor | None = None  # a tensor that shares the version counter of the weight
        self._resident_copy = ResidentCopy()
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
        """Add this buffer to a store, as the memory of the HostWeight ``weight``, whose values are in ``host``.

        ``grad``: the gradient of the tensor that ``weight`` replaces, or None.
        """
        self.host, self.names, self.origin = host, names, origin
        self.grad = self.grad if grad is None else grad
        weight.token = token = WeightToken()
        self._store, self._token = store, weakref.ref(token)
        self._writes = alias(weight)
        self._writes.__dict__.clear()
        self._uses.count_own(self.host, weight.host)

    def is_only_used_by(self, view: torch.Tensor) -> bool:
        """Whether the memory is a whole storage that nothing uses except this buffer and the weight whose host tensor is
        ``view``."""
        return self._uses.is_only(self.host, view)

    def leave(self) -> None:
        """Remove this buffer from its store, because its weight is no longer part of a placed model."""
        self._store, self.pieces, self.keeps_pieces = None, None, False
        if (token := self.token) is not None:
            token.leave_store()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def store(self) -> Store:
        """The store of the placed model.  Use this property only for a buffer from :func:`buffer_of`, because every buffer
        that this function returns has a store."""
        assert self._store is not None
        return self._store

    @property
    def order(self) -> tuple[int, int]:
        """A sort key for locks.  An op that writes several weights locks the models, and the weights of each model, in the
        order of this key, so that two threads never deadlock."""
        return id(self._store), id(self)

    @property
    def token(self) -> WeightToken | None:
        """The token of the weight; None if the weight was dropped or was given other memory."""
        return self._token()

    def is_alive_in(self, store: object) -> bool:
        """Whether the buffer is in this store, and its weight still exists."""
        return self._store is store and self.token is not None

    def backs(self, weight: Any) -> bool:
        """Whether the buffer is in a store, and ``weight`` is the weight itself and not a view of it."""
        return self._store is not None and (token := self.token) is not None and weight.__dict__.get("token") is token

    @property
    def version(self) -> int:
        """A number that changes with every write to the values, whether to a HostWeight or to the host tensor itself."""
        return self.written + self.host._version + (0 if self._writes is None else self._writes._version)

    @property
    def compressed(self) -> bool:
        return self.form is Form.COMPRESSED

    @property
    def stored(self) -> torch.Tensor:
        """The tensor from which the device copies: the packed values (int32, [Layout.words]), or the host tensor."""
        return self.backing.stored if self.backing.compressed else self.host

    @property
    def source(self) -> Source:
        """The location from which newly started programs copy the weight, and the form of its bytes."""
        return Source(
            file=self.backing.file_bytes is not None,
            values=self.host.nbytes if self.compressed else 0,
            ranks=0 if self.pieces is None else len(self.pieces.held),
        )

    @property
    def bytes(self) -> Bytes:
        """The bytes that programs copy.  If the weight is on the SSD and its mapping was written, the weight is first moved
        to private memory.  If the move fails, raises the same errors as :meth:`write`."""
        if self.backing.where is Where.FILE_WRITTEN:
            self.make_private()
        return self.bytes_now

    @property
    def bytes_now(self) -> Bytes:
        """The bytes that programs copy.  Unlike ``bytes``, this property never moves the weight.  It drops outdated
        pieces, unless ``keeps_pieces`` is set."""
        if (pieces := self.pieces) is not None and pieces.version == self.version:
            return pieces
        if not self.keeps_pieces:
            self.pieces = None
        if (in_file := self.backing.file_bytes) is not None:
            return in_file
        if self.compressed or not self.host.nbytes:
            return flat_bytes(self.stored)
        return self._uses.lend(self.host)

    @property
    def nbytes(self) -> int:
        """The number of bytes that are stored and copied."""
        return self.stored.nbytes

    @property
    def on_device(self) -> torch.Tensor | None:
        """The copy on the store's device that programs read, or None if no copy has the current values."""
        return self._resident_copy.at(self.version)

    def resident(self, stagings: GpuStagings, arena: object) -> torch.Tensor:
        """Return a copy of the values on the store's device.  All programs that read the weight as resident share this
        copy.

        ``arena``: the arena of the programs that are about to read the copy; no step may be running in this arena.  An
        outdated copy is updated in place if no program of another arena reads it.
        """

        version = self.version  # read before the values, so that a write during the copy makes the copy outdated
        self._resident_copy.add_reader(arena)
        if (current := self._resident_copy.at(version)) is not None:
            return current
        self.check()
        return self._resident_copy.renew(version, arena, self.stored, self.store.device, stagings)

    def check(self) -> None:
        """Raise ChunkflowError if the host tensor is a mapping of a file that has changed.

        A weight that was written, for example through a tensor of a state_dict, is checked as well, because its
        unwritten pages are still read from the file.
        """
        self.backing.check()

    def read(self, nbytes: int) -> None:
        """Check that the weight can be read, and count its bytes, before an op outside programs reads the values."""
        if self._store is not None:
            self.check()
            self._store.count(self.name, nbytes)

    def warn_of_compiler(self, backend: str) -> None:
        """Warn that another backend compiles code that reads the weight, and that this code copies the values in every
        call."""
        if self._store is not None:
            self._store.warn_of_compiler(self.name, backend)

    def values(self, view: torch.Tensor) -> torch.Tensor:
        """Return ``view``, a view of the host tensor, as an ordinary tensor for reading.  For a packed weight, return a copy
        of its values instead.

        Raises ChunkflowError if a copy does not fit in host memory, or if the tensor maps a file that has changed.
        """
        self.check()
        with self._lock():
            backing = self.backing
            if not isinstance(backing, Packed) or backing.is_open_here:
                with unset_fake_temporarily():
                    return view.detach()
        return part_of(backing.read(self.name), view)

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """Return a copy, in separate memory, of the values in a view of the host tensor.  Raises the same errors as
        :meth:`values`."""
        values = self.values(view)
        whole = values.untyped_storage().nbytes() == view.nbytes
        return values if whole and not share_storage(values, view) else values.clone()

    def export_view(self, view: torch.Tensor) -> torch.Tensor:
        """Return a view of the values for a state_dict.  Writes to the view are writes to the weight; see
        :meth:`settle`.

        If other ranks read the memory, return a copy instead; writes to the copy do not reach the weight.  Raises
        ChunkflowError if the copy does not fit in host memory.
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
        if backing is not self.backing:  # another thread has moved or packed the weight meanwhile
            return self.export_view(view)
        if self._store is not None and self.backing.where is not Where.SHARED:
            self._store.exported[Export(weakref.ref(exported), weakref.ref(self))] = None
        return exported

    def fill_with(self, fill: Callable[[], None]) -> None:
        """Set the function ``fill``, which writes the values before each call of a program that reads them."""
        self.fill = fill

    def count_write(self) -> None:
        """Count a write to the values through a weight."""
        self.written += 1
        self._changed()

    def expose(self) -> None:
        """Record that code compiled by another backend uses the memory.  The only trace of a write by such code is the
        weight's own ``_version``: neither ``written`` nor ``host._version`` changes."""
        if not self.exposed:
            self.exposed = True
            self._changed()

    def _changed(self) -> None:
        """Replace the state object of the weight.  Programs compare state objects to detect changes of a weight."""
        if (token := self.token) is not None:
            token.change()
            if self._store is None:  # checked last, because another thread may remove the buffer from the store
                token.leave_store()

    def _set_form(self, form: Form) -> None:
        if form is not self.form:
            self.form = form
            self._changed()

    def shard_into(self, pieces: Pieces) -> None:
        """Let programs read the weight from ``pieces``, on the devices of the ranks, until the weight is written."""
        self.pieces = pieces

    def regain_pieces(self, same: Callable[[HostBuffer, Pieces], bool] | None) -> None:
        """Use outdated pieces again if they still have the values of the weight.  Pieces may be outdated although no value
        has changed, because ``settle`` may count a write that changed nothing.

        The caller makes sure that no tensor of a state_dict shares the memory of the weight any more.  ``same``: a
        function that returns whether the pieces of all ranks have the values of the weight; None if there are no other
        ranks.
        """
        self.keeps_pieces, pieces = False, self.pieces
        if same is not None and pieces is not None and pieces.version != self.version and same(self, pieces):
            self.pieces = replace(pieces, version=self.version)

    def settle(self) -> bool:
        """If tensors of a state_dict may have been written since the last call of this method, count one write to the
        weight.

        Pieces are kept until :meth:`regain_pieces`, because the values may turn out to be unchanged.
        Returns whether programs may have copied outdated values.  Raises the same errors as :meth:`write`.
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
    def _paused(self) -> Iterator[None]:
        """A context in which no step of the model's programs runs, and no other thread writes the weight."""
        with contextlib.nullcontext() if self._store is None else self._store.quiet(), self._writing():
            yield

    @contextlib.contextmanager
    def write(self, replacing: bool = False) -> Iterator[None]:
        """A context for a write.  It pauses the model's programs, waits for the copies that read the weight, and moves the
        weight to private memory.

        At the end of the context, a packed weight is packed again.  If its values no longer fit in the packed form, the
        weight stays unpacked, and the programs of the model are ended.
        ``replacing``: whether the weight gets other memory instead of new values; its old memory is then left
        unchanged.
        Raises ChunkflowError if the bytes do not fit in host memory, or if the checkpoint has changed.
        """
        with self._paused():
            self.sync_copies()
            if replacing:
                self.on_storage_replaced()
            else:
                self.make_private()
            backing = self.backing
            if replacing or not isinstance(backing, Packed) or backing.is_open_here:
                yield
                return
            try:
                with backing.opened(self.name):
                    yield
            finally:
                if backing.is_open:  # the values do not fit, or the write was interrupted
                    self._become_raw()
                    if self._store is not None:
                        self._store.warn_of_raw(self)
                        self._store.end_programs()

    def pack(self) -> bool:
        """Pack the values and free their memory; views remain valid.  Returns whether the weight is packed now.

        Packing fails if the values do not fit in the packed form, if another tensor or array uses the memory (such as a
        tensor of a state_dict), or if host memory is too short to hold both forms during packing.  Like :meth:`write`,
        this pauses the model's programs.
        """
        if self.form is not Form.COMPRESSIBLE:
            return self.compressed
        with self._paused():
            self.sync_copies()
            raw = self.backing
            if self._uses.any(self.host) and self._store is not None:
                self._store.end_programs()  # running programs refer to the memory from which they copy
            able = self.fill is None and not self._uses.any(self.host) and raw.where is Where.OWN
            packed = Packed.of(self.host) if able else None
            if packed is not None:
                self.unpin()
                self._set_backing(packed)
                if self._uses.any(self.host):  # an op of another thread has begun to use the memory
                    self._set_backing(raw)
                else:
                    close_pages(self.host)
            if packed is None:
                self._set_form(Form.RAW)
        return self.compressed

    def unpack(self, leaving: bool = False, lazily: bool = False) -> None:
        """Unpack the weight permanently, without changing its address.  Like :meth:`write`, this pauses the model's
        programs.

        ``leaving``: whether the weight is about to leave the store.  ``lazily``: whether to allocate the memory even if
        host memory is short.
        Raises ChunkflowError if the values do not fit in host memory, or if the file has changed.
        """
        with self._paused():
            self.sync_copies()
            backing = self.backing
            if isinstance(backing, Packed):
                self.check()
                try:
                    backing.open(self.name, lazily)
                finally:
                    if backing.is_open:  # also true if ``open`` was interrupted after it had unpacked the values
                        self._become_raw()
                if self._store is not None and not leaving:
                    self._store.warn_over_bound(self.name, "is no longer packed")
            self._set_form(Form.RAW)

    def _become_raw(self) -> None:
        """Record that a packed weight is unpacked from now on.  Its pages stay open."""
        if isinstance(self.backing, Packed):
            self.backing.own()
        self._set_backing(Backing(self.host))
        self.unpin()

    def _set_backing(self, backing: Backing) -> None:
        """Set the storage of the bytes, and the form that they have in this storage."""
        with self._lock():
            if self.compressed != backing.compressed:
                self._set_form(Form.COMPRESSED if backing.compressed else Form.RAW)
                self._resident_copy.drop()
                self.pieces = None
            self.backing = backing

    @property
    def is_lent(self) -> bool:
        """Whether a view of unpacked values is in use, such as an array made from a tensor of a state_dict.

        Always False if the weight is only a part of its storage, because users of the other parts would be counted,
        too.
        """
        return not self.compressed and self._uses.has_views(self.host)

    def on_storage_replaced(self) -> None:
        """Warn if the weight leaves the SSD and the weights of the model then exceed the limit on host memory.

        Call this method before the weight gets a tensor in host memory as its new storage.
        """
        if self._store is not None and self.backing.file_bytes is not None:
            how = "got other memory, as by .to(dtype), p.data = ... or load_state_dict(assign=True)"
            self._store.warn_over_bound(self.name, f"{how}, and is no longer on the drive", self.nbytes)

    def make_private(self, lazily: bool = False) -> None:
        """Move the weight to private memory without changing its address.  No copy may read the weight during the move.

        ``lazily``: if host memory is short, allocate each page only when it is written.  Raises the same errors as
        :meth:`write`.
        """
        if (before := self.backing.where) is Where.OWN:
            return
        self.check()
        if before is Where.SHARED:
            # a device would go on reading the pages that were at this address when the memory was pinned
            self.unpin()
            # the counted write makes programs pin the weight again, even if the move below fails
            self.count_write()
        self._set_backing(self.backing.make_private(self.name, lazily))
        if before is not Where.SHARED and self._store is not None:
            self._store.warn_over_bound(self.name, "is written, and goes from the drive into host memory for that")

    def check_room_for_copy(self, nbytes: int) -> None:
        """Raise ChunkflowError if the weight is on the SSD and a copy of ``nbytes`` does not fit in host memory."""
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
        """Whether the weight has host memory that can be pinned and is not pinned yet."""
        return not self.pinned and self.store.pins and isinstance(self.bytes_now, torch.Tensor)

    def pin(self, device: HostReader, fits: bool = True) -> None:
        """Pin the host memory for copies by ``device``, unless it is pinned already.  If pinning fails, the store
        warns.

        ``fits``: whether the weight is within the limit on pinned memory; if not, the device copies from pageable
        memory.
        """
        self._pins.add(device)
        if not self.should_pin:
            return
        if self.backing.where is Where.FILE_WRITTEN:
            self.make_private()  # a write to the mapping would replace pages that the device reads
        if not fits:
            return
        try:
            self._pins.pin(self.stored, device, self, again=self.backing.where is Where.SHARED)
        except OSError as error:
            self.store.disable_pinning(self, str(error))

    def unpin(self) -> None:
        self._pins.unpin()

    def sync_copies(self) -> None:
        """Wait for the copies from the host memory that earlier steps have enqueued."""
        self._pins.sync_copies()


def buffer_of(tensor: object) -> HostBuffer | None:
    """Return the buffer of an offloaded weight that is in a store; None for all other objects, including views of a
    weight."""
    buffer = getattr(tensor, "__dict__", {}).get("buffer")
    return buffer if isinstance(buffer, HostBuffer) and buffer.backs(tensor) else None


def store_of(tensor: object) -> Store | None:
    """Return the store of an offloaded weight; None for all other objects, and for a weight that another thread has
    restored."""
    buffer = buffer_of(tensor)
    return None if buffer is None else buffer._store
