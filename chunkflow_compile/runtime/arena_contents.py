"""Contents of an arena: the chunks in its memory, as the programs with one placement of weights have left them."""

from __future__ import annotations

from chunkflow_compile.passes.forms import CallEvents

from .device_base import Device


class ArenaContents:
    """The chunks in the memory, for one placement of weights.  Programs with the same placement share it, and the programs
    of a cycle.

    ``events``: by their numbers in the step: the openings of windows and the arrivals of copies.
    ``next_call``: the call of the cycle for which the chunks are in order, None while a call runs.  ``measured``: whether the
    calls of the current pass are measured; ``measurement_requested``: by :meth:`Device.measure`.  ``versions``: name of a
    weight -> the version of its values in the memory when a call begins.
    """

    def __init__(self, device: Device, events: CallEvents) -> None:
        self.events = [
            device.read_event() if number in events.reads else device.event() for number in range(events.count)
        ]
        self.next_call: int | None = None
        self.measured = True
        self.measurement_requested = False
        self.versions: dict[str, int] = {}
        self._call_count = 0
        # the newest measured call by its number, and the time of its end
        self._last_end: tuple[int, float] | None = None

    def begin_pass(self, measured: bool, requested: bool) -> None:
        self.measured, self.measurement_requested = measured, requested

    def fill(self, versions: dict[str, int]) -> None:
        """The newest copies, after which its weights have these versions, are issued."""
        self.versions = versions

    def begin_call(self) -> None:
        self.next_call = None

    def end_call(self, next_call: int) -> int:
        """A call is issued; return its number."""
        self.next_call, self._call_count = next_call, self._call_count + 1
        return self._call_count - 1

    def idle_before(self, number: int, begin: float, end: float) -> float:
        """The seconds between the call before this one and its begin, 0 if that one was not measured.  Keeps the ``end``."""
        before, self._last_end = self._last_end, (number, end)
        return max(0.0, begin - before[1]) if before is not None and before[0] == number - 1 else 0.0
