"""Measured times of steps, by the windows of the plan."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.groups import Group, group_named

from .device_base import Device
from .rank_times import RankTimes

SCHEMA = 2
# The file name of a measurement in the folder of a dump, next to the plan.
MEASURED_FILE = "measured.json"
# One hour of steps of one second.  Older measurements are dropped.
KEPT_MEASUREMENTS = 3600


class WindowSeconds(NamedTuple):
    """Seconds for each window.  There is one window per region.

    ``compute_s``: compute of the region.  ``exposed_s``: stalls of the region for weights.  ``collective_s``: the collectives
    before the region.  ``beside_s``: the part of ``collective_s`` in collectives that overlapped a copy.
    """

    compute_s: MutableSequence[float]
    exposed_s: MutableSequence[float]
    collective_s: MutableSequence[float]
    beside_s: MutableSequence[float]


def no_seconds(windows: int) -> WindowSeconds:
    """Zero seconds for each window.

    They are arrays, because an hour of steps with 60 blocks takes 30 MB in arrays, but 300 MB in lists.
    """
    zeros = bytes(8 * windows)
    return WindowSeconds(array("d", zeros), array("d", zeros), array("d", zeros), array("d", zeros))


class RegionWatch:
    """Adds the compute time of a region to its window."""

    def __init__(self, windows: WindowSeconds, window: int) -> None:
        self._windows = windows
        self._window = window
        self._begin = 0.0

    def begins(self, at: float) -> None:
        self._begin = at

    def ends(self, at: float) -> None:
        self._windows.compute_s[self._window] += at - self._begin


class StepMeasurement(NamedTuple):
    """The measurement of one run of a program.  It is a tuple, because one is made in every call.

    ``step_s``: seconds from the start of the step to the end of its compute.  ``exposed_h2d_s``: seconds that compute
    stalled for weights, including the copies before a cold start.  ``collective_s``: seconds of collectives and their
    completions.  ``copy_s``: seconds of the copies that ended in the step.  ``alone_s``, ``alone_bytes``: seconds and bytes
    of those copies from the host that overlapped no collective and no pull.  ``moved_bytes``: bytes of the copies issued in
    the step.  ``pulled_bytes``: the part of ``moved_bytes`` that came from other ranks.  ``primed_bytes``: further bytes that
    were copied before a cold step.
    ``read_s``, ``read_bytes``: seconds and bytes of reads from the SSD, ahead of copies, since the previous step.
    ``idle_s``: seconds from the end of the previous call in its cycle to its start; 0 if not known.  ``begin_s``: the time of
    its start, by the device's clock.  ``plan``: digest of the plan that it ran under, which is its own plan or a cycle's.
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
    read_s: float = 0.0
    read_bytes: int = 0
    idle_s: float = 0.0
    plan: str = ""
    begin_s: float = 0.0
    pulled_bytes: int = 0


def as_one(calls: Sequence[StepMeasurement]) -> StepMeasurement:
    """Combine the measurements of the calls of a cycle into one step, without the time between the calls."""
    columns = zip(*(call.windows for call in calls), strict=True)
    windows = WindowSeconds(*(list(chain.from_iterable(column)) for column in columns))
    names = [name for name in StepMeasurement._fields if name not in ("windows", "plan", "begin_s")]
    sums: dict[str, Any] = {name: sum(getattr(call, name) for call in calls) for name in names}
    return StepMeasurement(**sums, windows=windows, plan=calls[0].plan, begin_s=calls[0].begin_s)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over the warm steps of a program, or over its cold steps if all are cold.

    ``plan``, ``problem``: digests of the plan and the problem.  ``steps``: the number of steps in the medians.  ``cold``: the
    number of cold steps; the first step is always cold.
    ``copy_rate``: bytes/s of the copies that overlapped no collective; None if there were none.  ``drive_rate``: bytes/s of
    reads from the SSD; None if there were none.  ``alone_s``: for each window, seconds of its collectives in steps where they
    overlapped no copy; None for a window without such a step.
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
    drive_rate: float | None = None
    cold: int = 0

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self), "windows": self.windows._asdict()}, indent=1) + "\n"

    def timings(self) -> Timings:
        """Timings to plan from, which add up to the time of the step.

        The medians of many windows add up to less than the median of the step, because now and then a window takes long.
        So the medians are scaled to the sum of the step.  The host's share of the step is spread evenly over the regions.
        """
        windows = self.windows
        rest = self.step_s - self.compute_s - self.exposed_s - self.collective_s
        share = max(0.0, rest) / len(windows.compute_s)
        compute, collective = _ratio(self.compute_s, windows.compute_s), _ratio(self.collective_s, windows.collective_s)
        return Timings(
            problem=self.problem,
            compute_s=tuple(compute * s + share for s in windows.compute_s),
            collective_s=tuple(None if s is None else collective * s for s in self.alone_s),
            copy_rate=self.copy_rate,
            drive_rate=self.drive_rate,
            copying=copying_share(self.step_s, self.exposed_s, self.copy_s),
        )

    @staticmethod
    def from_json(text: str) -> Measured:
        """Read the output of :meth:`to_json`.  Raises ChunkflowError if ``text`` is not such output or has another schema."""
        try:
            body: dict[str, Any] = json.loads(text)
            schema = body.pop("schema")
            if schema != SCHEMA:
                raise ChunkflowError(
                    f"The measurement has schema {schema!r}, this version reads {SCHEMA}: measure again with it."
                )
            return Measured(**{**body, "windows": WindowSeconds(**body["windows"])})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ChunkflowError(
                f"This is not a measurement of ChunkFlow ({error!r}): use {MEASURED_FILE} from the dump of a run."
            ) from error


def _ratio(whole: float, parts: Sequence[float]) -> float:
    """``whole`` over the sum of ``parts``; 1 if the sum is 0."""
    return whole / total if (total := sum(parts)) else 1.0


class CycleTimes:
    """Measured times of the passes over the calls of a cycle.

    ``whole``: the latest complete passes, oldest first; each consists of the measurements of its calls.
    """

    def __init__(self, cycle: Cycle) -> None:
        self.whole: deque[tuple[StepMeasurement, ...]] = deque(maxlen=KEPT_MEASUREMENTS)
        self._cycle = cycle
        self._newest: list[StepMeasurement] = []  # the calls of the current pass, until it is complete
        self._predicted = seconds_of_calls(cycle)
        self._ended = 0  # number of passes without a jump, measured or not
        self._ranks: RankTimes | None = None  # set while the times of other ranks are awaited

    @property
    def name(self) -> str:
        """A name of the cycle that is equal on all ranks, although their shards may differ in size."""
        problem, count = self._cycle.problem, len(self._cycle.calls)
        block = next((r.block for r in problem.regions if r.block), "the model")
        return (
            f"{count} call{'s' * (count > 1)} from {block} ({len(problem.regions)} regions, "
            f"{len(problem.collectives)} collectives)"
        )

    @property
    def groups(self) -> list[Group]:
        """The process groups of the cycle's collectives, in the order of their first use.  Their ranks run it in step."""
        graphs = [program.module.graph for program in self._cycle.calls if program.problem.collectives]
        names = dict.fromkeys(name for graph in graphs for name in group_names(graph))
        return [group for name in names if (group := group_named(name)) is not None]

    def add(self, call: int, steps: deque[StepMeasurement], counts: Counts, step: StepMeasurement) -> None:
        """Keep and count the measurement of a call.  A pass that ends in a jump, or lacks a call, is dropped.

        ``steps``, ``counts``: the measurements and counters of the call.  They are passed in, because its executor must not
        keep the call alive.
        """
        steps.append(step)
        counts.add_measured(
            seconds=step.step_s,
            predicted_s=self._predicted[call],
            stalled_s=step.exposed_h2d_s,
            collective_s=step.collective_s,
        )
        if call != len(self._newest):
            self._newest = []
        if call == len(self._newest):
            self._newest.append(step)
        if len(self._newest) == len(self._predicted):
            self.whole.append(tuple(self._newest))
            self._newest = []

    def timings(self, least: int) -> Timings | None:
        """The times of the warm passes so far, and the times between calls; None if there are fewer than ``least`` passes."""
        single = len(self._predicted) == 1  # its first step may count as warm, but includes one-time costs
        warm = [calls for calls in list(self.whole)[single:] if not any(call.primed_bytes for call in calls)]
        if len(warm) < least:
            return None
        timings = measured(self._cycle.plan, [as_one(calls) for calls in warm]).timings()
        if single:
            return timings
        idle = [0.0] * len(timings.compute_s)
        for start, calls in zip(self._cycle.starts, zip(*warm, strict=True), strict=True):
            idle[start - 1] += median(call.idle_s for call in calls)
        return replace(timings, idle_s=tuple(idle))

    def due(self, after: int, device: Device) -> Timings | None:
        """Note that a pass has ended.  Return the times to re-plan from, the maximum over all ranks, if re-planning is due.

        It is due after every ``after`` + 1 complete passes, until ``after`` of them were warm.  This depends on counts only,
        so ranks that run the same calls re-plan in the same pass.  They need one more pass for each of their groups.
        Raises ChunkflowError if another rank will never have times for this cycle.
        """
        self._ended += 1
        if self._ranks is None:
            if self._ended % (after + 1):
                return None
            device.collect(wait=True)
            self._ranks = RankTimes(self.groups, {self.name: self.timings(after)})
        else:
            device.compute.synchronize()  # the host may run ahead of the collectives of the pass
            self._ranks.read()
        if self._ranks.missing:
            return None
        timings, self._ranks = self._ranks.timings[self.name], None
        return timings

    def save(self, folder: Path) -> None:
        """Write the medians to the folder of a dump, if there are any.  A full disk or a failed device raises no error."""
        path = folder / MEASURED_FILE
        part = path.with_suffix(".part")  # renamed below: a reader never sees half a file
        with contextlib.suppress(OSError, ChunkflowError):
            part.write_text(measured(self._cycle.plan, [as_one(calls) for calls in self.whole]).to_json())
            part.replace(path)


def seconds_of_calls(cycle: Cycle) -> list[float]:
    """Predicted seconds of each call, up to the start of the next call; 0 without a prediction."""
    if (predicted := cycle.plan.predicted) is None:
        return [0.0 for _ in cycle.calls]
    regions = [span.start for span in predicted.spans if span.lane == "compute"]
    begun = [regions[start] for start in cycle.starts]
    ended = [*begun[1:], begun[0] + predicted.step_s]
    return [end - begin for begin, end in zip(begun, ended, strict=True)]


def copying_share(step_s: float, exposed_s: float, copy_s: float) -> float:
    """The share, from 0 to 1, of compute and collective time that overlaps a copy.

    A copy is in flight whenever compute stalls, so stalls are subtracted from both times.
    """
    work_s = step_s - exposed_s
    return min(1.0, max(0.0, copy_s - exposed_s) / work_s) if work_s > 0 else 0.0


def measured(plan: Plan, steps: Sequence[StepMeasurement]) -> Measured:
    """The medians over the ``steps`` that ran under ``plan``.  Cold steps count only if all steps are cold.

    Raises ChunkflowError if there are no such steps.
    """
    digest = plan.digest
    steps = [step for step in steps if step.plan == digest]
    if not steps:
        raise ChunkflowError("No step was measured yet: call the compiled model first.")
    warm = [s for s in steps if not s.primed_bytes] or list(steps)
    columns = zip(*(step.windows for step in warm), strict=True)
    windows = WindowSeconds(*([median(seconds) for seconds in zip(*column, strict=True)] for column in columns))
    undisturbed = [
        [s.windows.collective_s[k] for s in warm if not s.windows.beside_s[k]] for k in range(len(windows.compute_s))
    ]
    alone_s, read_s = sum(s.alone_s for s in warm), sum(s.read_s for s in warm)
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
        alone_s=[median(seconds) if seconds else None for seconds in undisturbed],
        copy_rate=sum(s.alone_bytes for s in warm) / alone_s if alone_s else None,
        drive_rate=sum(s.read_bytes for s in warm) / read_s if read_s else None,
        cold=sum(s.primed_bytes > 0 for s in steps),
    )
