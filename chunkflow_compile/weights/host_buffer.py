"""The host memory of one weight and the copies of it on devices, as a part of the store of a placed model.

All views of a weight share one HostBuffer.  A HostBuffer without a store only holds memory and counts writes.
``weight_memory.py`` describes where the bytes of a weight are stored.

Note: which copies of a weight exist
------------------------------------
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

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from chunkflow_compile.passes.problem import Source

from .backing import Backing, Where
from .bytes import alias, flat_bytes
from .peer_pieces import Pieces
from .pinning import HostReader
from .resident_copy import ResidentCopy
from .source import Bytes
from .staging import GpuStagings
from .store import Store
from .weight_memory import WeightMemory
from .weight_token import WeightToken


class HostBuffer(WeightMemory):
    """The host memory of one weight.

    ``written``: the number of writes through HostWeights; ``host._version`` counts writes to the host tensor itself.
    ``origin``: the device of the weight before it was offloaded.  ``grad``: the gradient of the weight before it was
    offloaded, or None.
    ``pieces``: the pieces of the weight on the devices of the ranks, or None.
    ``keeps_pieces``: whether pieces are kept although a write was counted.  Kept pieces are not read until
    :meth:`regain_pieces` finds that they still have the values of the weight.
    ``exposed``: whether code that another backend compiled has used the memory.
    """

    def __init__(
        self, host: torch.Tensor, backing: Backing | None = None, name: str = "a weight", compressible: bool = False
    ) -> None:
        super().__init__(host, backing, name, compressible)
        self.written = 0
        self.origin = host.device
        self.grad: torch.Tensor | None = None
        self.pieces: Pieces | None = None
        self.keeps_pieces = False
        self.exposed = False
        self._token: Callable[[], WeightToken | None] = lambda: None
        self._writes: torch.Tensor | None = None  # a tensor that shares the version counter of the weight
        self._resident_copy = ResidentCopy()

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

    def leave(self) -> None:
        """Remove this buffer from its store, because its weight is no longer part of a placed model."""
        self._store, self.pieces, self.keeps_pieces = None, None, False
        if (token := self.token) is not None:
            token.leave_store()

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

    def _drop_copies(self) -> None:
        self._resident_copy.drop()
        self.pieces = None

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
