"""The flag of policy ``host-yield``, which holds copies back."""

from __future__ import annotations

import threading


class HostFlag:
    """The pause flag of policy ``host-yield``: the mechanism that the paper publishes, for comparison.

    The host sets the flag before it issues a collective and clears it after it has issued the completion.  The copy stream
    checks it before each chunk.  If the host runs ahead of the device, the flag is cleared long before the collective
    starts, and nothing yields.
    """

    def __init__(self) -> None:
        self._clear = threading.Event()
        self._inside = 0  # collectives in flight, counted by the thread that issues
        self.drop()

    def set(self) -> None:
        """Add a collective in flight: no chunk starts from here on."""
        self._inside += 1
        self._clear.clear()

    def clear(self) -> None:
        """Remove a collective in flight: chunks start again if no other is left."""
        self._inside -= 1
        if self._inside <= 0:
            self.drop()

    def drop(self) -> None:
        """Remove all collectives in flight: chunks start again."""
        self._inside = 0
        self._clear.set()

    def hold(self) -> None:
        """Wait while the flag is set; called on the copy stream before a chunk."""
        while not self._clear.is_set():  # it may be set again before this thread wakes up
            self._clear.wait()
