"""The contents of an arena: which weights its memory contains, and in which version."""

from __future__ import annotations

from chunkflow_compile.passes.forms import CallEvents

from .device_base import Device


class ArenaContents:
    """The contents of an arena's memory under one placement, which assigns a slot to each weight.

    All programs with the same placement share one such object, and all calls of a cycle share one as well.

    ``events``: the events of a step, indexed by event number.  An event marks when a window opens or when copies have
    arrived.  ``next_call``: the number of the call that can run next without a prologue; None while a call runs.
    ``measured``: whether the calls of the current pass are measured.  ``measurement_requested``: whether
    :meth:`Device.measure` requested a measurement of this pass.  ``versions``: name of a weight -> the version of its values
    in the memory.
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
        memory."""
        self.versions = versions

    def begin_call(self) -> None:
        self.next_call = None

    def end_call(self, next_call: int) -> int:
        """Note that a call was issued; return the number of this call, counted from 0."""
        self.next_call, self._call_count = next_call, self._call_count + 1
        return self._call_count - 1

    def idle_before(self, number: int, begin: float, end: float) -> float:
        """Return the seconds for which no call ran before a call began: the time from the end of the previous call to
        ``begin``; 0 if the previous call was not measured.

        ``number``, ``begin``, ``end``: the number of a measured call, and the times in seconds when this call began and
        ended.  This method is called once for each measured call, in order, and keeps ``number`` and ``end`` until the next
        time.
        """
        before, self._last_end = self._last_end, (number, end)
        return max(0.0, begin - before[1]) if before is not None and before[0] == number - 1 else 0.0
