"""The home of one offloaded weight: where its values are, and what copies of them exist."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .bytes import flat_bytes
from .checkpoint import Mapped
from .drive import WRITING, Drive
from .filling import Placed
from .holes import Place
from .host_bytes import HostBytes
from .host_weight import HostWeight
from .limits import no_room
from .mapping import own_memory, whole_pages
from .reader import HostReader
from .source import DriveBytes, Source
from .staging import GpuStagings

if TYPE_CHECKING:
    from .host_store import HostStore


# Until pages are pinned again that another rank may have been pinning: as long as it takes for a large weight.
_AGAIN_S = 0.2


@dataclass(eq=False)
class Home:
    """The place of one weight in a store; it ends with the weight.

    ``names``: all its names in the model.  ``host``: its values, on the CPU.  ``cell``: counts the writes to them.
    ``left``: the place in a file of all ranks that it had before this rank wrote it.
    ``origin``: the device that it came from.  ``grad``: the gradient that it had.  ``before``: where it lay, while it moves.
    """

    names: tuple[str, ...]
    host: torch.Tensor
    cell: HostBytes
    store: HostStore
    origin: torch.device
    _weight: weakref.ref[HostWeight]
    grad: torch.Tensor | None = None
    before: Mapped | None = None
    left: Place | None = None
    was_shared: bool = False
    through: bool = False  # writes to the host tensor go to the drive
    _drive: tuple[DriveBytes, int] | None = None  # and the version of the host tensor that it has the values of
    _resident: tuple[int, weakref.ref[torch.Tensor]] | None = None
    _unpin: weakref.finalize[[list[HostReader], Callable[[], None]], Home] | None = None
    _copied_by: list[HostReader] = field(default_factory=list)
    _process: int = field(default_factory=os.getpid)  # that has placed it

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def weight(self) -> HostWeight | None:
        """The weight, None if it was dropped or got other memory."""
        weight = self._weight()
        return weight if home_of(weight) is self else None

    @property
    def version(self) -> int:
        """Changes with every write to the values, through a weight or to the host tensor itself."""
        weight = self._weight()
        return self.cell.version + self.host._version if weight is None else weight.writes

    @property
    def drive(self) -> DriveBytes | None:
        """The bytes on the drive, None if the values are in host memory.

        A mapping of a checkpoint, or of a scratch file that ranks share, is the process's own: the file does not see a write
        to it.  A scratch file of this rank alone does.
        """
        if self._drive is None or (not self.through and self._drive[1] != self.host._version):
            return None
        return self._drive[0]

    @property
    def source(self) -> Source:
        """The bytes that programs copy.  Raises as :meth:`may_change` for a part of a checkpoint that was written unseen."""
        if self.drive is None:
            self._leave_checkpoint()
        return self.drive or flat_bytes(self.host)

    @property
    def nbytes(self) -> int:
        return self.host.numel() * self.host.element_size()

    @property
    def on_device(self) -> torch.Tensor | None:
        """The copy of the values on the store's device that programs use now, None if there is none."""
        version, ref = self._resident or (None, None)
        return None if ref is None or version != self.version else ref()

    def resident(self, stagings: GpuStagings) -> torch.Tensor:
        """A copy of the values on the store's device, shared by all programs that use it at the same time."""
        if (found := self.on_device) is not None:
            return found
        self.check()
        version = self.version  # before the copy: newer values need another
        made = stagings.brought(self.host, self.store.device, copy=True)
        self._resident = version, weakref.ref(made)
        return made

    def check(self) -> None:
        """Raise ChunkflowError if the host tensor is a mapping of a file on the drive that has changed.

        That also matters once it was written, as through a tensor of ``state_dict``: pages that were not are the file's.
        """
        if self._drive is not None:
            self._drive[0].file.check()

    def copied(self, nbytes: int) -> None:
        """The values are about to be copied into so many bytes of host memory.

        Raises ChunkflowError if they are on the drive, and there is no room.
        """
        if self.drive is not None and (cause := no_room(nbytes)) is not None:
            raise ChunkflowError(
                f"{self.name} is on the drive, and a copy of it ({nbytes} bytes) finds no room in host memory: {cause}. Free "
                "host memory, or load the model once more, or in another dtype, with host_memory=."
            )

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
        self._leave_checkpoint()  # the pages must not change under a device
        if not fits:
            return
        try:
            # a model that is dropped without restore must not leave its pages pinned after they are unmapped
            self._unpin = weakref.finalize(self, _unpin, self._copied_by, self._pinned(device))
            self._unpin.atexit = False
        except OSError as error:
            self.store.pageable(self, error)

    def _pinned(self, device: HostReader) -> Callable[[], None]:
        """Pin, twice if need be: the kernel may refuse pages that another rank pins at the moment."""
        try:
            return device.pin(self.host)
        except OSError:
            if self.cell.shared is None:
                raise
            time.sleep(_AGAIN_S)
            return device.pin(self.host)

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    @property
    def shares(self) -> bool:
        """Whether other ranks have the same memory, or the same bytes on the drive."""
        return self.cell.shared is not None or (self.cell.scratch and not self.through and self.drive is not None)

    def share(self, placed: Placed) -> None:
        """Replace the memory by the same bytes where other ranks have them, at the same address, if they do.

        No program of the model may run.
        """
        if placed.through or (placed.shared is None and placed.drive is None):
            return
        self.settle()
        self.unpin()
        self.cell.version += 1  # programs pin it again
        # What is shared is noted before it is mapped.  Ctrl-C between the two leaves the same bytes where no other rank
        # writes; after a mapping that is not noted, a write would reach the other ranks.
        if placed.shared is not None:
            self.cell.shared = placed.shared.at(self.host)
            self.cell.shared.map()
        elif placed.drive is not None:
            own = self._drive[0].place if self.through and self._drive is not None else None
            self._drive, self.through = (placed.drive, self.host._version), False
            placed.drive.map_over(self.host, mmap.MAP_PRIVATE)
            if own is not None and not own.seen:
                own.clear()  # no other rank has this file

    def may_change(self) -> None:
        """The values are about to be written: a scratch file of this rank sees it, and any other file does not.

        A weight in a scratch file of all ranks goes to one of this rank first, and a part of a checkpoint to host memory, as
        does a weight that a child of this process writes.
        Raises ChunkflowError if there is no room, or the checkpoint has changed.
        """
        self.check()
        if self.drive is not None and self.cell.scratch and self._process != os.getpid():
            self._leave_parent()
        elif self.drive is not None and self.cell.scratch and not self.through:
            drive, place = self.store.drive or Drive(fix=WRITING), self.drive.place
            self.store.drive = drive
            self._drive, self.through = (drive.keep_in_place(self.host), self.host._version), True
            self.left = place
        if self.through and self._drive is not None:
            self._drive[0].may_change()
        else:
            self._leave_checkpoint()
            self._drive = None  # of a mapping of a scratch file of all ranks, which stays one

    def _leave_parent(self) -> None:
        """Give a weight in a scratch file host memory, in a child of the process that has placed it: both have the file."""
        self.copied(self.nbytes)
        try:
            own_memory(self.host.data_ptr(), self.nbytes, whole_pages(self.nbytes))
        except OSError as error:
            raise ChunkflowError(f"{self.name} ({self.nbytes} bytes) cannot be written: {error.strerror}.") from error
        self._drive, self.through = None, False

    def _leave_checkpoint(self) -> None:
        """Give a part of a checkpoint host memory, because it is or was written.  Any other weight stays where it is."""
        if self._drive is not None and not self.cell.scratch:
            self.check()
            self.store.leave_checkpoint(self)
            self._drive = None

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def settle(self) -> None:
        """Wait for the copies that read the host memory for steps that have returned."""
        for device in self._copied_by:
            device.settle()


def home_of(tensor: object) -> Home | None:
    """The home of an offloaded weight, None for any other object."""
    return tensor.home if isinstance(tensor, HostWeight) else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpin(devices: Sequence[HostReader], undo: Callable[[], None]) -> None:
    """Unpin after the copies that read the memory.  A failed device must not prevent restoring the model."""
    try:
        for device in devices:
            with contextlib.suppress(ChunkflowError):
                device.settle()
    finally:
        try:
            undo()
        except OSError as error:
            warnings.warn(f"Host memory could not be unpinned and stays pinned: {error}.", stacklevel=2)
