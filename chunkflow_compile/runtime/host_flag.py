"""The pause flag of policy ``host-yield``: what the paper publishes, to compare with.

The host sets it before it issues a collective and clears it behind the completion; the copy engine looks at it before each
chunk.  Where the host runs ahead of the device, it is cleared long before the collective starts, and nothing yields.
"""

from __future__ import annotations

from .streams import Bell


class HostFlag:
    """Set by the host, once for each collective in flight; looked at by the copy stream."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._set = 0

    def set(self) -> None:
        """No chunk starts from here on."""
        with self._bell.lock:
            self._set += 1

    def clear(self) -> None:
        """Chunks start again, if no other collective is in flight."""
        with self._bell.lock:
            self._set = max(0, self._set - 1)
            self._bell.ring()

    def drop(self) -> None:
        """Chunks start again, whatever is in flight."""
        with self._bell.lock:
            self._set = 0
            self._bell.ring()

    def hold(self) -> None:
        """On the copy stream, in front of a chunk: waits while the flag is set."""
        self._bell.wait_for(lambda: True if not self._set else None, lambda: not self._set)
