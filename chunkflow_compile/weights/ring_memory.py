"""The memory of the ring: host pages, pinned where the device can, of this process or of all ranks that read together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch

from .host_memory import empty_pages

Pin = Callable[[torch.Tensor], Callable[[], None]]


class RingMemory:
    """Whole pages, uint8, which stay pinned as long as this lasts.  ``bytes``: the pages."""

    def __init__(self, pages: torch.Tensor, pin: Pin) -> None:
        self.bytes = pages
        with contextlib.suppress(OSError):  # copies from memory that is not pinned are slower, and as right
            weakref.finalize(self, _unpinned, pin(pages)).atexit = False

    @staticmethod
    def own(nbytes: int, pin: Pin) -> RingMemory:
        """For this process alone."""
        return RingMemory(empty_pages(torch.empty(nbytes, dtype=torch.uint8, device="meta")), pin)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpinned(undo: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # the device has failed
        undo()
