"""Measured times of several ranks: each plans from the largest, so that all run the same plan.

Ranks that meet in the collectives of a program run it in step.  Each posts its times in the store of their process group at
the end of the same pass.  A collective of the next pass ends on no rank before all have begun that pass; so at its end all
times are there, and no rank waits for another.  One that has posted none runs something else, and then the others keep
their plans.  With several groups, such as the two dimensions of a mesh, the largest of each are posted to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.groups import Group, numbers


class RankTimes:
    """Times of some cycles, by name, on this rank and on those that it meets; None for one that has none yet.

    All ranks create one for the same cycles in the same order.  ``timings``: so far.  ``missing``: the groups of which
    they are not known.
    """

    def __init__(self, groups: Iterable[Group], timings: Mapping[str, Timings | None]) -> None:
        """Raises ChunkflowError if the store cannot be reached."""
        self.timings = dict(timings)
        self.missing = deque({group.ranks: group for group in groups}.values())
        self._post()

    def read(self, wait: bool = False) -> None:
        """Take those of the next group.  ``wait``: for ranks that have posted none so far, as long as a collective would.

        Raises ChunkflowError, with their numbers, if there are such ranks.
        """
        group = self.missing.popleft()
        seconds = group.timeout.total_seconds() if wait else 0.0
        posted = group.posted(self._key, seconds)
        late = group.missing(posted)
        if late and wait:
            raise ChunkflowError(
                f"{numbers(late).capitalize()} did not call replan(as_measured=True) within {seconds:g} s: ranks plan from "
                f"measured times together, so all of {numbers(group.ranks)} call it."
            )
        if late:
            raise ChunkflowError(
                f"{numbers(late)} runs other calls than this one, and ranks plan from measured times together."
            )
        for name, own in self.timings.items():
            others = [ranks[name] for ranks in posted.values()]
            complete = own is not None and None not in others
            self.timings[name] = own.largest(map(Timings.of, others)) if own is not None and complete else None
        self._post()

    def _post(self) -> None:
        if self.missing:
            times = {name: None if t is None else asdict(t) for name, t in self.timings.items()}
            self._key = self.missing[0].post(", ".join(times), times)
