"""The home of one offloaded weight: where its values are, and what copies of them exist."""

from __future__ import annotations

import contextlib
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
from .host_bytes import HostBytes
from .host_weight import HostWeight
from .limits import no_room
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
    _drive: tuple[DriveBytes, int] | None = None  # and the version of the host tensor that it has the values of
    _resident: tuple[int, weakref.ref[torch.Tensor]] | None = None
    _unpin: weakref.finalize[[list[HostReader], Callable[[], None]], Home] | None = None
    _copied_by: list[HostReader] = field(default_factory=list)

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
        """The bytes on the drive, None if the values are in host memory: the file does not see a write to its mapping."""
        return self._drive[0] if self._drive is not None and self._drive[1] == self.host._version else None

    @property
    def source(self) -> Source:
        """The bytes that programs copy.  Raises as :meth:`may_change` for a weight on the drive that was written unseen."""
        if self.drive is None:
            self._leave_drive()
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
        self._leave_drive()  # the pages must not change under a device
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
        return self.cell.shared is not None or (self.cell.scratch and self.drive is not None)

    def may_change(self) -> None:
        """The values are about to be written: a weight on the drive goes to host memory for that, whatever the file.

        Raises ChunkflowError if there is no room, or the checkpoint has changed.
        """
        self.check()
        self._leave_drive()

    def _leave_drive(self) -> None:
        """Give a weight on the drive host memory, at the same address, because it is or was written."""
        if self._drive is not None:
            self.check()
            self.store.leave_drive(self)
            self._drive, self.cell.scratch = None, False

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
