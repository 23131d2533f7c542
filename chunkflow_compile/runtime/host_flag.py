"""The pause flag of policy ``host-yield``: what the paper publishes, to compare with.

The host sets it while it issues a collective and its completion; the copy engine looks at it before each chunk.  Where the
host runs ahead of the device, it is cleared long before the collective starts, and nothing yields.
"""

from __future__ import annotations

import threading


class HostFlag:
    """Set by the host, looked at by the copy stream."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def set(self) -> None:
        """No chunk starts from here on."""
        self._open.clear()

    def clear(self) -> None:
        """Chunks start again."""
        self._open.set()

    def hold(self) -> None:
        """On the copy stream, in front of a chunk: waits while the flag is set."""
        self._open.wait()
