"""The pause flag of policy ``host-yield``: the mechanism that the paper publishes, for comparison.

The host sets the flag before it issues a collective and clears it after it has issued the completion.  The copy stream
checks it before each chunk.  If the host runs ahead of the device, the flag is cleared long before the collective
starts, and nothing yields.
"""

from __future__ import annotations

from .streams import Bell


class HostFlag:
    """Set by the host, once for each collective in flight; checked by the copy stream."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._set = 0

    def set(self) -> None:
        """Add a collective in flight: no chunk starts from here on."""
        with self._bell.lock:
            self._set += 1

    def clear(self) -> None:
        """Remove a collective in flight: chunks start again if no other is left."""
        with self._bell.lock:
            self._set = max(0, self._set - 1)
            self._bell.ring()

    def drop(self) -> None:
        """Remove all collectives in flight: chunks start again."""
        with self._bell.lock:
            self._set = 0
            self._bell.ring()

    def hold(self) -> None:
        """Wait while the flag is set; called on the copy stream before a chunk."""
        self._bell.wait_for(lambda: True if not self._set else None, lambda: not self._set)
