"""The memory of one weight: where its bytes are stored, in which form, and who may write them.

Note: where the bytes of a weight are stored
--------------------------------------------
The values are in ``WeightMemory.host``, a tensor on the CPU.  Its pages are of one of four types (:class:`Where`):

* OWN: private pages of this process.  Ops on the weight write to them.  Users may also write to them through the tensors
  of a state_dict, and some of these writes change no version counter.
* SHARED: pages of a memfd that the ranks of a machine map.  Only the loader writes them, before any weight uses them.
* FILE: a private mapping of a checkpoint, or of a scratch file that the loader has written.  Programs copy from the
  file itself.
* FILE_WRITTEN: a mapping as for FILE, after a write through a tensor of a state_dict; the written pages are private to
  this process.

The bytes of a packed weight are in ``WeightMemory.stored``, in pages of one of the first three types.  The ``host`` of a
packed weight is address space without pages; see ``packed.py``.  During a write, ``host`` has pages with the unpacked
values.  After the write, the new values are packed.  If they do not fit in the packed form, the weight is OWN and
unpacked from then on.

:class:`WeightLoader` chooses the initial type.  After that, the bytes can only move to OWN pages.  The bytes keep
their address, so that views remain valid.  ``make_private`` moves the bytes before a write, before the pages of a written
mapping are pinned or read by programs, and when a shared weight is restored.  A weight that is given other memory
(``p.data = ...``) gets a new HostBuffer.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .backing import Backing, Where
from .bytes import part_of, share_storage
from .limits import no_room
from .locks import ProcessLock
from .mapping import close_pages
from .memory_uses import MemoryUses
from .packed import Packed
from .pinning import Pins
from .store import Export, Store


class Form(Enum):
    """The form in which the values of a weight are stored."""

    RAW = "raw, for good"
    COMPRESSIBLE = "raw, and may be compressed"
    COMPRESSED = "compressed"


class WeightMemory(ABC):
    """The memory of one weight, without the copies of its values on devices.  ``HostBuffer`` extends this class by these
    copies and by the membership in a store.

    ``host``: the values, on the CPU.  ``names``: all names of the weight in the model.  ``fill``: for a weight whose values a
    module computes, a function that writes the values before each call of a program; None for other weights.
    ``backing``: the storage of the bytes.  ``form``: the form of the bytes.  The pages of a compressible weight contain
    only the bytes of this weight.
    """

    def __init__(
        self, host: torch.Tensor, backing: Backing | None = None, name: str = "a weight", compressible: bool = False
    ) -> None:
        self.host = host
        self.names: tuple[str, ...] = (name,)
        self.fill: Callable[[], None] | None = None
        self.backing = Backing(host) if backing is None else backing  # changed by _set_backing only
        raw = Form.COMPRESSIBLE if compressible else Form.RAW
        self.form = Form.COMPRESSED if self.backing.compressed else raw
        # held while the form of the values is read or changed
        self._lock = ProcessLock()
        # held during a whole write, unlike ``_lock``
        self._writing = ProcessLock()
        self._uses = MemoryUses()
        self._store: Store | None = None
        self._pins = Pins()

    @abstractmethod
    def count_write(self) -> None:
        """Count a write to the values through a weight."""

    @abstractmethod
    def _changed(self) -> None:
        """Let programs detect that the weight has changed.  This method is called after each change of the form."""

    @abstractmethod
    def _drop_copies(self) -> None:
        """Drop the copies on devices, which have the same form as the bytes.  This method is called when the weight
        is packed or unpacked."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def compressed(self) -> bool:
        return self.form is Form.COMPRESSED

    @property
    def stored(self) -> torch.Tensor:
        """The tensor from which the device copies: the packed values (int32, [Layout.words]), or the host tensor."""
        return self.backing.stored if self.backing.compressed else self.host

    @property
    def nbytes(self) -> int:
        """The number of bytes that are stored and copied."""
        return self.stored.nbytes

    def is_only_used_by(self, view: torch.Tensor) -> bool:
        """Whether the memory is a whole storage that nothing uses except this buffer and the weight whose host tensor is
        ``view``."""
        return self._uses.is_only(self.host, view)

    @property
    def is_lent(self) -> bool:
        """Whether a view of unpacked values is in use, such as an array made from a tensor of a state_dict.

        Always False if the weight is only a part of its storage, because users of the other parts would be counted,
        too.
        """
        return not self.compressed and self._uses.has_views(self.host)

    def check(self) -> None:
        """Raise ChunkflowError if the host tensor is a mapping of a file that has changed.

        A weight that was written, for example through a tensor of a state_dict, is checked as well, because its
        unwritten pages are still read from the file.
        """
        self.backing.check()

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
        """Return a view of the values for a state_dict.  Writes to the view are writes to the weight, see
        :meth:`HostBuffer.settle`.

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

    def _set_form(self, form: Form) -> None:
        if form is not self.form:
            self.form = form
            self._changed()

    def _set_backing(self, backing: Backing) -> None:
        """Set the storage of the bytes, and the form that they have in this storage."""
        with self._lock():
            if self.compressed != backing.compressed:
                self._set_form(Form.COMPRESSED if backing.compressed else Form.RAW)
                self._drop_copies()
            self.backing = backing

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

    def unpin(self) -> None:
        self._pins.unpin()

    def sync_copies(self) -> None:
        """Wait for the copies from the host memory that earlier steps have enqueued."""
        self._pins.sync_copies()
