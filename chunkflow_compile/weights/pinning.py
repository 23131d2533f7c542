"""Pinned host memory of one weight, and the protocol by which this package knows the devices that copy from it."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError

from .locks import when_collected

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


class Pins:
    """The devices that copy from the host memory of a weight, and whether it is pinned for them."""

    def __init__(self) -> None:
        self._unpin: weakref.finalize[..., Any] | None = None
        self._copied_by: list[HostReader] = []

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def add(self, device: HostReader) -> None:
        """A device copies from it."""
        self._copied_by[:] = [d for d in self._copied_by if d is not device and not d.closed] + [device]

    def pin(self, host: torch.Tensor, device: HostReader, owner: object, again: bool) -> None:
        """Pin it until ``owner`` is gone.  Raises OSError on failure.

        ``again``: whether to try twice, because the kernel may refuse pages that another rank pins at the moment.
        """
        # a model that is dropped without restore must not leave its pages pinned after they are unmapped
        self._unpin = when_collected(owner, _unpin, self._copied_by, _pinned(host, device, again))

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def sync_copies(self) -> None:
        """Wait for the copies that read the host memory for steps that have returned."""
        for device in self._copied_by:
            device.sync_copies()


def _pinned(host: torch.Tensor, device: HostReader, again: bool) -> Callable[[], None]:
    try:
        return device.pin(host)
    except OSError:
        if not again:
            raise
        time.sleep(_RETRY_S)
        return device.pin(host)


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
