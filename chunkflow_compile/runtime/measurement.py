"""Measured times of steps: the times of each step as a whole, and of each window of the plan."""

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
# The name of the file with measured times.  The file is in the folder of a dump, next to the plan.
MEASURED_FILE = "measured.json"
# The maximum number of measurements to keep: one hour of steps that take one second each.  The oldest measurements are
# dropped first.
KEPT_MEASUREMENTS = 3600


class WindowSeconds(NamedTuple):
    """Seconds for each window.  There is one window per region.

    ``compute_s``: the compute time of the region.  ``exposed_s``: the time for which compute stalled before the region
    because weights had not arrived.  ``collective_s``: the duration of the collectives before the region.  ``beside_s``: the
    total duration of those collectives that overlapped a copy; it is a part of ``collective_s``.
    """

    compute_s: MutableSequence[float]
    exposed_s: MutableSequence[float]
    collective_s: MutableSequence[float]
    beside_s: MutableSequence[float]


def no_seconds(windows: int) -> WindowSeconds:
    """Return zero seconds for each of ``windows`` windows.

    The seconds are stored in arrays instead of lists, because the measurements of an hour of steps with 60 blocks take 30 MB
    as arrays, but 300 MB as lists.
    """
    zeros = bytes(8 * windows)
    return WindowSeconds(array("d", zeros), array("d", zeros), array("d", zeros), array("d", zeros))


class RegionWatch:
    """A :class:`Watch` that adds the compute time of a region to its window."""

    def __init__(self, windows: WindowSeconds, window: int) -> None:
        self._windows = windows
        self._window = window
        self._begin = 0.0

    def begins(self, at: float) -> None:
        self._begin = at

    def ends(self, at: float) -> None:
        self._windows.compute_s[self._window] += at - self._begin


class StepMeasurement(NamedTuple):
    """The measurement of one run of a program (a step).  Every measured call creates an object of this class.  The class is
    therefore a tuple, because a dataclass object takes longer to create.

    ``step_s``: seconds from the start of the step to the end of its compute.  ``exposed_h2d_s``: seconds for which compute
    stalled because weights had not arrived, including the copies of a cold start.  ``collective_s``: the total seconds of
    collectives and their completions.  ``copy_s``: the total seconds of the copies that ended in the step.  ``alone_s``,
    ``alone_bytes``: seconds and bytes of the copies from the host that overlapped neither a collective nor a pull.
    ``collectives``: the number of collectives in the step.  ``moved_bytes``: bytes of the copies that were issued in the
    step.  ``pulled_bytes``: the part of ``moved_bytes`` that came from other ranks.  ``primed_bytes``: bytes that the
    prologue copied before the step; ``moved_bytes`` does not include these bytes.
    ``read_s``, ``read_bytes``: seconds and bytes of the reads from the SSD into the ring since the previous step.
    ``idle_s``: seconds from the end of the cycle's previous call to the start of this step; 0 if the previous call was not
    measured.  ``begin_s``: the time when the step started, in seconds of the device's clock.  ``plan``: the digest of the
    plan under which the step ran, which is the plan of the program or of a cycle.
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
    """Combine the measurements of the calls of a cycle into the measurement of one step.  The time between the calls is not
    included."""
    columns = zip(*(call.windows for call in calls), strict=True)
    windows = WindowSeconds(*(list(chain.from_iterable(column)) for column in columns))
    names = [name for name in StepMeasurement._fields if name not in ("windows", "plan", "begin_s")]
    sums: dict[str, Any] = {name: sum(getattr(call, name) for call in calls) for name in names}
    return StepMeasurement(**sums, windows=windows, plan=calls[0].plan, begin_s=calls[0].begin_s)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of times over the warm steps of a program.  If all steps are cold, the medians are over the cold steps.

    ``plan``, ``problem``: digests of the plan and of the problem.  ``steps``: the number of steps over which the medians are
    taken.  ``cold``: the number of cold steps; usually, the first step is cold.
    ``copy_rate``: the rate in bytes/s of the copies from the host that overlapped neither a collective nor a pull; None if
    there were no such copies.  ``drive_rate``: the rate in bytes/s of reads from the SSD; None if there were no reads.
    ``alone_s``: for each window, the median seconds of its collectives, over the steps in which these collectives overlapped
    no copy; None if they overlapped a copy in every step.
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
        """Return timings to plan from.  The sum of their compute times and collective times is about the duration of a step
        without stalls.

        In each step, some windows take unusually long, and in the next step other windows do.  So the sum of the medians of
        all windows is smaller than the median of the total time.  The medians are therefore scaled until their sum equals the
        median of the total time.  The remaining time of the step (host overhead) is divided equally among the regions.
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
        """Read the output of :meth:`to_json`.  Raises ChunkflowError if ``text`` is not output of :meth:`to_json`, or has
        another schema."""
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
    """Return ``whole`` divided by the sum of ``parts``; 1 if the sum is 0."""
    return whole / total if (total := sum(parts)) else 1.0


class CycleTimes:
    """Measured times of the passes over the calls of a cycle.

    ``complete``: the latest complete passes, oldest first; each pass is a tuple with the measurements of all its calls.
    """

    def __init__(self, cycle: Cycle) -> None:
        self.complete: deque[tuple[StepMeasurement, ...]] = deque(maxlen=KEPT_MEASUREMENTS)
        self._current: list[StepMeasurement] = []  # the measured calls of the current, incomplete pass
        self._cycle = cycle
        self._passes_ended = 0  # the number of passes without a jump, including passes that were not measured
        self._predicted = seconds_of_calls(cycle)
        self._ranks: RankTimes | None = None  # set while the times of other ranks are awaited

    @property
    def name(self) -> str:
        """A name of the cycle.  The name is equal on all ranks, even if their weight shards have different sizes."""
        problem, count = self._cycle.problem, len(self._cycle.calls)
        block = next((r.block for r in problem.regions if r.block), "the model")
        return (
            f"{count} call{'s' * (count > 1)} from {block} ({len(problem.regions)} regions, "
            f"{len(problem.collectives)} collectives)"
        )

    @property
    def groups(self) -> list[Group]:
        """The process groups of the cycle's collectives, in the order of their first use.  The ranks of these groups run the
        cycle in lockstep."""
        graphs = [program.module.graph for program in self._cycle.calls if program.problem.collectives]
        names = dict.fromkeys(name for graph in graphs for name in group_names(graph))
        return [group for name in names if (group := group_named(name)) is not None]

    def add(self, call: int, steps: deque[StepMeasurement], counts: Counts, step: StepMeasurement) -> None:
        """Keep and count the measurement ``step`` of the call with the number ``call``.  A pass is dropped if any of its
        calls was not measured, for example because of a jump.

        ``steps``, ``counts``: the list of measurements and the counters of the call.  They are arguments because the
        executor, which calls this method after each measured step, must not keep a reference to the call site.
        """
        steps.append(step)
        counts.add_measured(
            seconds=step.step_s,
            predicted_s=self._predicted[call],
            stalled_s=step.exposed_h2d_s,
            collective_s=step.collective_s,
        )
        if call != len(self._current):
            self._current = []
        if call == len(self._current):
            self._current.append(step)
        if len(self._current) == len(self._predicted):
            self.complete.append(tuple(self._current))
            self._current = []

    def timings(self, least: int) -> Timings | None:
        """Return the median times of the warm passes so far, including the times between calls; None if there are fewer than
        ``least`` warm passes."""
        single = len(self._predicted) == 1  # The first step is skipped: it has one-time costs even if it is warm.
        warm = [calls for calls in list(self.complete)[single:] if not any(call.primed_bytes for call in calls)]
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
        """Record that a pass has ended.  If re-planning is due, return the times to re-plan from, as maxima over all ranks;
        otherwise return None.

        After every ``after`` + 1 passes without a jump, the warm passes so far are counted.  If there are at least ``after``
        warm passes, re-planning is due.  This rule depends only on counts of passes, so ranks that run the same calls re-plan
        in the same pass.  The exchange of times with the other ranks takes one more pass per process group.  Raises
        ChunkflowError if another rank does not run this cycle.
        """
        self._passes_ended += 1
        if self._ranks is None:
            if self._passes_ended % (after + 1):
                return None
            device.collect(wait=True)
            self._ranks = RankTimes(self.groups, {self.name: self.timings(after)})
        else:
            device.compute.synchronize()  # once the collectives of this pass have ended, all ranks have posted their times
            self._ranks.read()
        if self._ranks.missing:
            return None
        timings, self._ranks = self._ranks.timings[self.name], None
        return timings

    def save(self, folder: Path) -> None:
        """Write the medians of the measured times, if there are any, to the folder of a dump.  Errors of the disk or the
        device are ignored."""
        path = folder / MEASURED_FILE
        part = path.with_suffix(".part")  # renamed when it is complete, so that no reader sees an incomplete file
        with contextlib.suppress(OSError, ChunkflowError):
            part.write_text(measured(self._cycle.plan, [as_one(calls) for calls in self.complete]).to_json())
            part.replace(path)


def seconds_of_calls(cycle: Cycle) -> list[float]:
    """Return the predicted seconds from the start of each call to the start of the next call; zeros if there is no
    prediction."""
    if (predicted := cycle.plan.predicted) is None:
        return [0.0 for _ in cycle.calls]
    regions = [span.start for span in predicted.spans if span.lane == "compute"]
    begun = [regions[start] for start in cycle.starts]
    ended = [*begun[1:], begun[0] + predicted.step_s]
    return [end - begin for begin, end in zip(begun, ended, strict=True)]


def copying_share(step_s: float, exposed_s: float, copy_s: float) -> float:
    """Return the fraction of a step, from 0 to 1, during which a copy is in flight.  Stalls are left out.

    While compute stalls, a copy is always in flight.  So the time of the stalls is subtracted both from the step time and
    from the copy time.
    """
    work_s = step_s - exposed_s
    return min(1.0, max(0.0, copy_s - exposed_s) / work_s) if work_s > 0 else 0.0


def measured(plan: Plan, steps: Sequence[StepMeasurement]) -> Measured:
    """Return the medians of the times of those ``steps`` that ran under ``plan``.  Cold steps are left out, unless all of
    these steps are cold.

    Raises ChunkflowError if no step ran under ``plan``.
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
