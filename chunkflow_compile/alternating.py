"""Phases that take turns in every step, such as a ControlNet and a transformer: they share the device, and none gives way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from chunkflow_compile.phase import Phase

# A phase that begins so often in a generation alternates with others.  Encoders begin twice, for the negative prompt.
_TURNS = 3


class Alternating:
    """The phases that alternate, learnt in each generation.

    ``members``: those that share the device now, each with the least bytes of streamed weights that its plans take.
    """

    def __init__(self) -> None:
        self.members: Mapping[Phase, int] = {}
        self._begun: Counter[Phase] | None = None  # in this generation, None outside of one
        self._apart: set[frozenset[Phase]] = set()  # that have no room beside each other

    def generation(self) -> None:
        """A generation begins."""
        self._begun = Counter()

    def ended(self) -> bool:
        """A generation ends.  Returns whether some of the members ran in it, and others did not."""
        begun, self._begun = self._begun or Counter(), None
        return len({begun[phase] > 0 for phase in self.members}) > 1

    def begins(self, phase: Phase) -> frozenset[Phase]:
        """A phase begins after another.  Returns the phases that are found to alternate now, besides the members."""
        if self._begun is None:
            return frozenset()
        self._begun[phase] += 1
        found = frozenset(
            p for p, count in self._begun.items() if count >= _TURNS and p.goal is not None and p.arena.tenants
        )
        new = len(found) > 1 and not found <= self.members.keys() and found not in self._apart
        return found if new else frozenset()

    def join(self, phases: Iterable[Phase]) -> None:
        """From now on they share the device."""
        self.members = {p: max(0, p.least - p.kept) for p in phases}

    def part(self, for_good: bool = False) -> list[Phase]:
        """They no longer share the device; return them.  ``for_good``: they have no room beside each other."""
        if for_good:
            self._apart.add(frozenset(self.members))
        found, self.members = [*self.members], {}
        return found

    def forget(self, phase: Phase) -> None:
        """A phase is removed."""
        self._apart = {phases for phases in self._apart if phase not in phases}
        if self._begun is not None:
            self._begun.pop(phase, None)

    def shares(self, room: int) -> Mapping[Phase, int] | None:
        """Bytes of streamed weights for each member: the least, and a part of the rest by what its weights have more than
        that.  None if ``room`` is less than the least of all."""
        spare = room - sum(self.members.values())
        more = {phase: phase.streamed - least for phase, least in self.members.items()}
        total = max(1, sum(more.values()))
        if spare < 0:
            return None
        return {phase: least + spare * more[phase] // total for phase, least in self.members.items()}
