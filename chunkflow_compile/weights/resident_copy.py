"""The copy of a resident weight on the device."""

from __future__ import annotations

import weakref

import torch

from .staging import GpuStagings


class ResidentCopy:
    """The copy of a weight on the device.  All programs that keep this weight resident share the copy.  It is freed
    when no program uses it any more."""

    def __init__(self) -> None:
        # the version of the values in the copy, and a weak reference to the copy
        self._copy: tuple[int, weakref.ref[torch.Tensor]] | None = None
        self._arenas: weakref.WeakSet[object] = weakref.WeakSet()  # the arenas of the programs that use the copy

    def at(self, version: int) -> torch.Tensor | None:
        """Return the copy if it has the values of this version, and otherwise None."""
        held, ref = self._copy or (None, None)
        return None if ref is None or held != version else ref()

    def add_reader(self, arena: object) -> None:
        """Record that programs in ``arena`` use the copy."""
        self._arenas.add(arena)

    def renew(
        self, version: int, arena: object, stored: torch.Tensor, device: torch.device, stagings: GpuStagings
    ) -> torch.Tensor:
        """Copy ``stored``, the values of ``version``, to the device, and return the copy.

        An outdated copy is updated in place if only programs in ``arena`` use it.  No step may be running in ``arena``.
        """
        stale = None if self._copy is None else self._copy[1]()
        if stale is not None and not self._arenas - {arena}:
            with torch.inference_mode(stale.is_inference()), torch.no_grad():
                renewed = stale.copy_(stored)
        else:
            renewed = stagings.copied_to(stored, device, copy=True)
        self._copy = version, weakref.ref(renewed)
        return renewed

    def drop(self) -> None:
        """Forget the copy, so that programs that start from now on get a new one."""
        self._copy = None
