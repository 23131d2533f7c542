"""The record of an arena's contents: which weights the arena's memory contains, and in which versions."""

from __future__ import annotations

from chunkflow_compile.passes.forms import CallEvents

from .device_base import Device


class ArenaContents:
    """A record of the contents of an arena's memory under one placement, which assigns a slot to each weight.

    All programs with the same placement share one record, and so do all calls of a cycle.

    ``events``: the events that the ops of a step record and wait for, indexed by event number.  ``next_call``: the number of
    the call that can run next without a prologue; None before the first call, and while a call is being issued.
    ``measured``: whether the calls of the current pass are measured.  ``measurement_requested``: whether
    :meth:`Device.measure` requested a measurement of this pass.  ``versions``: name of a weight -> the version of its values
    in the arena's memory.
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
        # the number of the latest measured call, and the time in seconds when this call ended
        self._last_end: tuple[int, float] | None = None

    def begin_pass(self, measured: bool, requested: bool) -> None:
        self.measured, self.measurement_requested = measured, requested

    def fill(self, versions: dict[str, int]) -> None:
        """Record that all copies of a prologue were issued.  ``versions``: the versions of the weights that are now in the
        arena's memory."""
        self.versions = versions

    def begin_call(self) -> None:
        self.next_call = None

    def end_call(self, next_call: int) -> int:
        """Record that a call was issued; return the number of this call, counted from 0.  ``next_call``: the number, in the
        cycle, of the call that can run next without a prologue."""
        self.next_call, self._call_count = next_call, self._call_count + 1
        return self._call_count - 1

    def idle_before(self, number: int, begin: float, end: float) -> float:
        """Return the seconds for which no call ran between the previous call and a measured call; 0 if the previous call was
        not measured.

        ``number``: the number of the measured call.  ``begin``, ``end``: the times in seconds when the measured call began
        and ended.  The caller calls this method once for each measured call, in order, because the method keeps ``number``
        and ``end`` for the next measured call.
        """
        before, self._last_end = self._last_end, (number, end)
        return max(0.0, begin - before[1]) if before is not None and before[0] == number - 1 else 0.0
