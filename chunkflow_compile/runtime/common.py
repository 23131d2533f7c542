"""The settings of a course: what those of its calls have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chunkflow_compile.passes.pipeline import Settings

from .route import Route

if TYPE_CHECKING:
    from .session import Session


def bare(settings: Settings) -> Settings:
    """Without what differs between sizes of one call, and between calls."""
    return replace(settings, likes=(), part=False, outside=0)


def serves(route: Route, settings: Settings) -> bool:
    """Whether the plan of a course is the best for these settings of a call too.

    It is if they differ only in the budget, and it fits one that is no larger than its own.
    """
    planned, memory = route.settings, settings.memory
    if replace(bare(planned), memory=None) != replace(bare(settings), memory=None):
        return False
    if memory is None or planned.memory is None:
        return memory is planned.memory
    return route.course.plan.device_bytes + planned.outside <= memory <= planned.memory


def common(sessions: Sequence[Session]) -> Settings | None:
    """The settings of a course, None if those of its calls do not agree.  The budget is the largest."""
    shared = [replace(bare(s.code.settings), memory=None) for s in sessions]
    if any(s != shared[0] for s in shared):
        return None
    memory = max((m for s in sessions if (m := s.code.settings.memory) is not None), default=None)
    return replace(shared[0], memory=memory, outside=_outside(sessions))


def _outside(sessions: Sequence[Session]) -> int:
    """Bytes on the device of the weights of these models that none of the calls reads."""
    left: dict[int, int] = {}
    for session in {id(s.key): s for s in sessions}.values():
        left[session.model] = (
            left.get(session.model, session.code.settings.outside + session.in_place) - session.in_place
        )
    return sum(max(0, nbytes) for nbytes in left.values())
