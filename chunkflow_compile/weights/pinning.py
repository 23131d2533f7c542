"""The pinned host memory of one weight, and the protocol for the devices that copy from it."""

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

# Delay in seconds before pinning is retried once, because another rank may be pinning the same pages.  It is about the
# time that pinning a large weight takes.
_RETRY_S = 0.2


class HostReader(Protocol):
    """A device whose copies read host memory; ``runtime`` defines the devices.  ``closed``: whether its streams are
    closed."""

    name: str
    closed: bool

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Pin a host tensor, so that the copy engine reads it directly, and return a function that unpins it.  Raises
        OSError on failure."""

    def sync_copies(self) -> None:
        """Wait for the copies from host memory that earlier steps have enqueued.  After that, the host may write to the
        memory."""


class Pins:
    """The devices that copy from the host memory of a weight, and whether the memory is pinned."""

    def __init__(self) -> None:
        self._unpin: weakref.finalize[..., Any] | None = None
        self._copied_by: list[HostReader] = []

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def add(self, device: HostReader) -> None:
        """Add a device that copies from the memory."""
        self._copied_by[:] = [d for d in self._copied_by if d is not device and not d.closed] + [device]

    def pin(self, host: torch.Tensor, device: HostReader, owner: object, again: bool) -> None:
        """Pin the memory until ``owner`` is freed.  Raises OSError on failure.

        ``again``: whether to try a second time after a failure.  This helps if the first try failed because another
        rank was pinning the same pages at that moment.
        """

        # a finalizer, so that a model that is dropped without a restore unpins its pages before they are unmapped
        self._unpin = when_collected(owner, _unpin, self._copied_by, _pinned(host, device, again))

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def sync_copies(self) -> None:
        """Wait for the copies from the host memory that earlier steps have enqueued."""
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the garbage collector may run it in any thread
def _unpin(devices: Sequence[HostReader], undo: Callable[[], None]) -> None:
    """Unpin the memory after all copies from it have finished.  Errors of a failed device are ignored, so that the
    model can be restored."""
    try:
        for device in devices:
            with contextlib.suppress(ChunkflowError):
                device.sync_copies()
    finally:
        try:
            undo()
        except OSError as error:
            warnings.warn(f"Host memory could not be unpinned and stays pinned: {error}.", stacklevel=2)
