"""What really happened, in the plan's own terms."""

from __future__ import annotations

import json
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan

SCHEMA = 2
# In the folder of a dump, beside the plan.
MEASURED_FILE = "measured.json"


class WindowSeconds(NamedTuple):
    """Seconds by window, which is by region: its compute, what it waited for weights, and the collectives in front of it,
    ``beside_s`` of them with a copy beside them."""

    compute_s: MutableSequence[float]
    exposed_s: MutableSequence[float]
    collective_s: MutableSequence[float]
    beside_s: MutableSequence[float]


def no_seconds(windows: int) -> WindowSeconds:
    """Zeros to add to.  Arrays: an hour of steps of 60 blocks is 30 MB instead of 300."""
    return WindowSeconds(*(array("d", bytes(8 * windows)) for _ in WindowSeconds._fields))


class RegionWatch:
    """Counts a region's seconds to its window."""

    def __init__(self, windows: WindowSeconds, window: int) -> None:
        self._windows = windows
        self._window = window
        self._begin = 0.0

    def begins(self, at: float) -> None:
        self._begin = at

    def ends(self, at: float) -> None:
        self._windows.compute_s[self._window] += at - self._begin


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """One run of a program.

    ``step_s``: seconds from call to return.  ``exposed_h2d_s``: seconds that compute waited for weights, priming of a
    cold start included.  ``collective_s``: seconds in collectives and their completion.  ``copy_s``: seconds that copies
    ran meanwhile; ``alone_s`` and ``alone_bytes``: of those that no collective ran beside.  ``moved_bytes``: bytes of the
    copies issued in the step; ``primed_bytes``: bytes issued in front of a cold step on top of that.
    """

    step_s: float
    exposed_h2d_s: float
    collective_s: float
    copy_s: float
    alone_s: float
    alone_bytes: int
    collectives: int
    moved_bytes: int
    primed_bytes: int
    windows: WindowSeconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over the warm steps of a program, or its cold ones if all are.  ``plan``, ``problem``: digests.

    ``steps``: those that the medians are of; ``cold``: all that began with nothing in the slots, the first among them.
    ``copy_rate``: bytes/s of the copies that no collective ran beside; ``alone_s``: by window, seconds of the collectives
    when no copy ran beside them.  Both None where that never was.
    """

    plan: str
    problem: str
    steps: int
    step_s: float
    compute_s: float
    exposed_s: float
    collective_s: float
    copy_s: float
    moved_bytes: int
    windows: WindowSeconds
    alone_s: Sequence[float | None]
    copy_rate: float | None = None
    cold: int = 0

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self), "windows": self.windows._asdict()}, indent=1) + "\n"

    def timings(self) -> Timings:
        """What a plan can be made from: it adds up to the step.

        A median is less than the mean of the same times, where now and then one is long, and medians of many windows add up
        to less than the step's: they are stretched to its own.  The host's share of the step is spread over the regions.
        """
        seen = self.windows
        rest = self.step_s - self.compute_s - self.exposed_s - self.collective_s
        share = max(0.0, rest) / len(seen.compute_s)
        compute, collective = _ratio(self.compute_s, seen.compute_s), _ratio(self.collective_s, seen.collective_s)
        return Timings(
            problem=self.problem,
            compute_s=tuple(compute * s + share for s in seen.compute_s),
            collective_s=tuple(None if s is None else collective * s for s in self.alone_s),
            copy_rate=self.copy_rate,
            copying=copying_share(self.step_s, self.exposed_s, self.copy_s),
        )

    @staticmethod
    def from_json(text: str) -> Measured:
        """Raises ChunkflowError if it is no such file, or one of another version."""
        try:
            body: dict[str, Any] = json.loads(text)
            schema = body.pop("schema")
            if schema != SCHEMA:
                raise ChunkflowError(f"The measurement has schema {schema!r}, this version reads {SCHEMA}.")
            return Measured(**{**body, "windows": WindowSeconds(**body["windows"])})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ChunkflowError(f"This is not a measurement of ChunkFlow: {error!r}.") from error


def _ratio(whole: float, parts: Sequence[float]) -> float:
    """1 where there is nothing to compare."""
    return whole / total if (total := sum(parts)) else 1.0


def copying_share(step_s: float, exposed_s: float, copy_s: float) -> float:
    """The share, 0 to 1, of compute and collectives with a copy beside them.  While compute waits, one is under way."""
    work_s = step_s - exposed_s
    return min(1.0, max(0.0, copy_s - exposed_s) / work_s) if work_s > 0 else 0.0


def measured(plan: Plan, steps: Sequence[StepMeasurement]) -> Measured:
    """The medians of ``steps``, cold ones left out where there are others.  Raises ChunkflowError if there are none."""
    if not steps:
        raise ChunkflowError("Nothing was measured yet: call the compiled model first.")
    warm = [s for s in steps if not s.primed_bytes] or list(steps)
    windows = WindowSeconds(
        *(
            [median(column) for column in zip(*(s.windows[i] for s in warm), strict=True)]
            for i in range(len(WindowSeconds._fields))
        )
    )
    alone = [
        [s.windows.collective_s[k] for s in warm if not s.windows.beside_s[k]] for k in range(len(windows.compute_s))
    ]
    alone_s = sum(s.alone_s for s in warm)
    return Measured(
        plan=plan.digest,
        problem=plan.problem,
        steps=len(warm),
        step_s=median(s.step_s for s in warm),
        compute_s=median(sum(s.windows.compute_s) for s in warm),
        exposed_s=median(s.exposed_h2d_s for s in warm),
        collective_s=median(s.collective_s for s in warm),
        copy_s=median(s.copy_s for s in warm),
        moved_bytes=warm[-1].moved_bytes,
        windows=windows,
        alone_s=[median(found) if found else None for found in alone],
        copy_rate=sum(s.alone_bytes for s in warm) / alone_s if alone_s else None,
        cold=sum(s.primed_bytes > 0 for s in steps),
    )
