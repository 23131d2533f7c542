"""Contents of an arena: the state of the chunks in its memory, for programs that place weights in the same way."""

from __future__ import annotations

from chunkflow_compile.passes.forms import CallEvents

from .device_base import Device


class ArenaContents:
    """The state of the chunks in an arena's memory, for one placement of weights.

    Programs with the same placement share it, and so do the calls of a cycle.

    ``events``: the events of a step by their numbers; they mark the openings of windows and the arrivals of copies.
    ``next_call``: the call of the cycle that can run on the chunks as they are; None while a call runs.
    ``measured``: whether the calls of the current pass are measured.  ``measurement_requested``: whether this pass was
    requested through :meth:`Device.measure`.
    ``versions``: name of a weight -> the version of its values in the memory at the start of a call.
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
        # the number of the latest measured call, and the time of its end
        self._last_end: tuple[int, float] | None = None

    def begin_pass(self, measured: bool, requested: bool) -> None:
        self.measured, self.measurement_requested = measured, requested

    def fill(self, versions: dict[str, int]) -> None:
        """Note that copies were issued, after which the weights in the memory have these versions."""
        self.versions = versions

    def begin_call(self) -> None:
        self.next_call = None

    def end_call(self, next_call: int) -> int:
        """Note that a call was issued; return its number."""
        self.next_call, self._call_count = next_call, self._call_count + 1
        return self._call_count - 1

    def idle_before(self, number: int, begin: float, end: float) -> float:
        """The seconds from the end of the previous call to ``begin``; 0 if the previous call was not measured.

        ``number``, ``begin``, ``end``: the number and the times of this call; they are kept for the next one.
        """
        before, self._last_end = self._last_end, (number, end)
        return max(0.0, begin - before[1]) if before is not None and before[0] == number - 1 else 0.0
