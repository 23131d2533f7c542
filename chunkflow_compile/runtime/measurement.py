"""What really happened, in the plan's own terms."""

from __future__ import annotations

import json
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from chunkflow_compile.passes.errors import ChunkflowError

SCHEMA = 1
# In the folder of a dump, beside the plan.
MEASURED_FILE = "measured.json"


class WindowSeconds(NamedTuple):
    """Seconds by window, which is by region: its compute, what it waited for weights, and the collectives in front of it."""

    compute_s: MutableSequence[float]
    exposed_s: MutableSequence[float]
    collective_s: MutableSequence[float]


def no_seconds(windows: int) -> WindowSeconds:
    """Zeros to add to.  Arrays: an hour of steps of 60 blocks is 30 MB instead of 300."""
    return WindowSeconds(*(array("d", bytes(8 * windows)) for _ in WindowSeconds._fields))


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """One run of a program.

    ``step_s``: seconds from call to return.  ``exposed_h2d_s``: seconds that compute waited for weights, priming of a
    cold start included.  ``collective_s``: seconds in collectives and their completion.  ``copy_s``: seconds that copies
    ran meanwhile.  ``moved_bytes``: bytes of the copies issued in the step; ``primed_bytes``: bytes issued in front of a
    cold step on top of that.
    """

    step_s: float
    exposed_h2d_s: float
    collective_s: float
    copy_s: float
    collectives: int
    moved_bytes: int
    primed_bytes: int
    windows: WindowSeconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over the warm steps of a program, or its cold ones if all are.  ``plan``: digest of its plan.

    ``steps``: those that the medians are of; ``cold``: all that began with nothing in the slots, the first among them.
    """

    plan: str
    steps: int
    step_s: float
    compute_s: float
    exposed_s: float
    collective_s: float
    copy_s: float
    moved_bytes: int
    windows: WindowSeconds
    cold: int = 0

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self), "windows": self.windows._asdict()}, indent=1) + "\n"

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


def measured(plan: str, steps: Sequence[StepMeasurement]) -> Measured:
    """The medians of ``steps``, cold ones left out where there are others.  Raises ChunkflowError if there are none."""
    if not steps:
        raise ChunkflowError("Nothing was measured yet: call the compiled model first.")
    warm = [s for s in steps if not s.primed_bytes] or list(steps)
    windows = WindowSeconds(
        *([median(column) for column in zip(*(s.windows[i] for s in warm), strict=True)] for i in range(3))
    )
    return Measured(
        plan=plan,
        steps=len(warm),
        step_s=median(s.step_s for s in warm),
        compute_s=median(sum(s.windows.compute_s) for s in warm),
        exposed_s=median(s.exposed_h2d_s for s in warm),
        collective_s=median(s.collective_s for s in warm),
        copy_s=median(s.copy_s for s in warm),
        moved_bytes=warm[-1].moved_bytes,
        windows=windows,
        cold=sum(s.primed_bytes > 0 for s in steps),
    )
