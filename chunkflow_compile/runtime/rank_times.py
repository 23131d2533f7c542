"""Measured times of several ranks.  Each rank plans from the maxima over all ranks, so that all ranks run the same plan.

Ranks that share the collectives of a program run the program in lockstep.  At the end of a pass, each rank posts its times to
the store of the process group.  A collective of the next pass completes only after all ranks have begun the next pass.  So
after this collective, all ranks have posted their times, and no rank has to wait for times.  If the times of a rank are still
missing at this point, that rank runs other calls than the other ranks do.  The other ranks then keep their plans.  If there
are several groups, such as the two dimensions of a mesh, the maxima over the ranks of one group are posted to the ranks of
the next group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.groups import Group, numbers


class RankTimes:
    """Measured times of one or more cycles, combined over the ranks of several process groups.

    All ranks create a RankTimes for the same cycles in the same order.  ``timings``: name of a cycle -> the maxima of its
    times over all ranks whose times have been read so far; None if one of these ranks has no times for the cycle yet.
    ``missing``: the groups whose times have not been read yet.
    """

    def __init__(self, groups: Iterable[Group], timings: Mapping[str, Timings | None]) -> None:
        """``timings``: name of a cycle -> the times that this rank has measured, or None.  Raises ChunkflowError if the
        store of the process group cannot be reached."""
        self.timings = dict(timings)
        self.missing = deque({group.ranks: group for group in groups}.values())
        self._post()

    def read(self, wait: bool = False) -> None:
        """Read the times that the ranks of the next group have posted.

        ``wait``: whether to wait for ranks that have not posted their times yet, up to the timeout of a collective.  Raises
        ChunkflowError if the times of a rank are missing; the message names all ranks whose times are missing.
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
