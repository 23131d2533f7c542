"""Reading together: the first rank of a machine reads the drive, into a ring that all its ranks map.

Each rank copies out of the ring for its own device, and tells the first one how far it is: the room of a read is free when
the last rank's copy has ended.  A rank that has ended takes up no room.

A rank begins with reads of its own, as if it were alone.  At each call it tells the first rank where in the order its
copies are.  Where both run the same plan, and are at the same place of it in the same call, the first one offers it what it
is about to read; there its own reading ends.  So no rank waits for one that does something else, and one that starts anew
alone, as after a write, goes on alone until their orders meet again.

Ranks read together only if collectives of their programs, in which all of them meet, keep them in step (``Executor``).  Then
no wait is new: the graph of the waits between ranks maps onto that of one rank, in which each read waits for copies of
earlier reads only.  Where only some of them meet, as in each of two Ulysses groups, every rank reads for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.passes.program.course import Course
from chunkflow_compile.weights.links import Links
from chunkflow_compile.weights.meeting import ranks_of

from .follower import Follower
from .leader import Leader

Together = Leader | Follower


def in_step(course: Course, ranks: Sequence[int]) -> bool:
    """Whether the collectives of a course keep ``ranks`` in step: all of them meet in one, so each finds the same."""
    graphs = [call.module.graph for call in course.calls if call.problem.collectives]
    return any(set(ranks_of(name)).issuperset(ranks) for graph in graphs for name in group_names(graph))


def together(links: Links, reader: Any) -> Together | None:
    """This rank's part, for the one reader that reads over the links; None for another."""
    if not links.claim(reader):
        return None
    if links.together is None:
        links.together = Leader(links) if links.leads else Follower(links)
    found: Together = links.together
    return found
