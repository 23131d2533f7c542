"""Combine the measurements of all ranks into a record, and format the record as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, quantiles

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.hardware.stopwatch import why_uneven
from chunkflow_compile.report.record import ArmRecord, ComparisonRecord, as_json, prose, seconds, table
from chunkflow_compile.runtime.measurement import StepMeasurement
from chunkflow_compile.units import size

from .job import RESIDENT, ArmRun, Job, ProgramRun, RankRun
from .link_load import LinkError, LinkLoad

# If compute takes longer than its fixed duration by more than this share, the machine was busy.  On two idle cores, the
# excess is below 1 %.
_OVERRUN = 0.03


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """The result of a measurement, with figures by arm.

    ``settings``: the calls that set up each arm, as text.  ``predicted``: the simulated figures.  ``steps_s``: the
    seconds per step in each turn, on the slowest rank of the turn.  ``compute_s``: the seconds of compute per step, on
    the slowest rank; alternatives are left out.  ``inflation``: the slowdown of collectives relative to the resident arm
    (0.05 for 5 %), excluding the time in which ranks wait for each other; None without a resident arm or without
    collectives.  ``host_s``: the host time per call in seconds.  ``host_bounds``: the arms for which ``host_s`` is an
    upper bound.  ``copy_rate``: the bytes/s while copies run.  ``peak_bytes``: the peak bytes that torch has allocated on
    the device, or None on the CPU.  ``difference``: the maximum difference from the outputs of the resident arm, divided
    by their maximum value.  ``link``: the accuracy of the emulated link on the least accurate rank.
    """

    record: ComparisonRecord
    settings: Mapping[str, str]
    predicted: Mapping[str, ArmRecord]
    steps_s: Mapping[str, tuple[float, ...]]
    compute_s: Mapping[str, tuple[float, ...]]
    inflation: Mapping[str, float | None]
    host_s: Mapping[str, float]
    host_bounds: tuple[str, ...]
    copy_rate: Mapping[str, float | None]
    peak_bytes: Mapping[str, int | None]
    difference: Mapping[str, float | None]
    link: LinkError | None
    load: LinkLoad | None
    machine: str

    @property
    def steps(self) -> int:
        """The number of measured turns per arm."""
        return len(next(iter(self.steps_s.values())))

    @property
    def quartiles_s(self) -> dict[str, tuple[float, float]]:
        """The first and third quartiles of each arm's step times."""
        return {name: _quartiles(steps) for name, steps in self.steps_s.items()}

    @property
    def off(self) -> dict[str, float]:
        """The relative error of each predicted step: 0.05 if the prediction is 5 % longer than the measured step."""
        steps = {name: arm.step_s for name, arm in self.record.arms.items()}
        return {n: p.step_s / s - 1 for n, p in self.predicted.items() if p.step_s and (s := steps[n])}

    def ratio(self, arm: str, base: str) -> float:
        """Return the ratio of the step times of ``arm`` and ``base``: the median over all rounds.

        A round contains one step of every arm.  If other processes slow down the machine for some seconds, they slow down
        both arms in a round and hardly change their ratio.
        """
        return median(self.ratios(arm, base))

    def ratios(self, arm: str, base: str) -> list[float]:
        """Return the ratio of the step times of ``arm`` and ``base`` in each round."""
        return [a / b for a, b in zip(self.steps_s[arm], self.steps_s[base], strict=True)]

    def middle(self, arm: str, base: str) -> tuple[float, float]:
        """Return the first and third quartiles of :meth:`ratios`.  If they are far apart, the machine was busy."""
        return _quartiles(self.ratios(arm, base))

    def host(self, arm: str) -> str:
        """Return the host time per call of an arm as text."""
        return f"{'at most ' if arm in self.host_bounds else ''}{seconds(self.host_s[arm])}"

    def to_json(self) -> str:
        body = {name: value for name, value in asdict(self).items() if name not in ("record", "inflation")}
        record = self.record.body
        return as_json(
            {
                **{name: record[name] for name in ("schema", "model", "degree", "arms")},
                **body,
                "quartiles_s": self.quartiles_s,
                "to_resident": {n: self.ratio(n, RESIDENT) for n in self.steps_s} if RESIDENT in self.steps_s else None,
                "collective_inflation": self.inflation,
                "steps": self.steps,
            }
        )


def summarise(job: Job, ranks: Sequence[RankRun]) -> BenchRecord:
    """Return the record of a job.  Times are medians over the steps, on the slowest rank."""
    arms = {name: [rank.arms[name] for rank in ranks] for name in ranks[0].arms}
    ran = {name: [run.program for run in arm if run.program is not None] for name, arm in arms.items()}
    programs = {name: runs for name, runs in ran.items() if runs}
    total = ranks[0].total_bytes
    base = _collective_seconds(programs[RESIDENT]) if RESIDENT in programs else None
    measured = {name: _measured_record(arm, ran[name], total) for name, arm in arms.items()}
    links = [rank.link for rank in ranks if rank.link is not None]
    return BenchRecord(
        record=ComparisonRecord(model=_title(job), degree=job.ranks, arms=measured),
        settings={name: arm[0].settings for name, arm in arms.items()},
        predicted={name: _predicted(runs, total) for name, runs in programs.items()},
        steps_s={
            name: tuple(max(s) for s in zip(*(r.steps_s for r in arm), strict=True)) for name, arm in arms.items()
        },
        compute_s={name: _compute_seconds(runs) for name, runs in programs.items()},
        inflation={name: _collective_seconds(runs) / base - 1 if base else None for name, runs in programs.items()},
        host_s={name: max(median(r.host_s) for r in arm) for name, arm in arms.items()},
        host_bounds=tuple(name for name, arm in arms.items() if not min(r.host_waits for r in arm)),
        copy_rate={name: _copy_rate(runs) for name, runs in programs.items()},
        peak_bytes={name: arm[0].peak_bytes for name, arm in arms.items()},
        difference={name: arm[0].difference for name, arm in arms.items()},
        link=max(links, key=lambda link: abs(link.shared / link.requested - 1), default=None),
        load=ranks[0].load,
        machine=ranks[0].machine,
    )


def _title(job: Job) -> str:
    """Return a line that describes the model and its emulated link."""
    size, link = job.regime.size, "" if job.link is None else ", on an emulated link"
    if job.link is not None and job.link.shared:
        link += " that all ranks share"
    if job.model is not None and job.model in PRESETS:
        return f"{job.model}, {PRESETS[job.model].workload(job.sizes)}, random weights{link}"
    if job.model is not None:
        return f"{job.model}{link}"
    blocks = f"{size.layers} blocks" if job.regime.family == "wan" else f"{size.layers} + {size.singles} blocks"
    return f"{job.regime.family}, {blocks}, {size.heads * size.head_dim} wide, random weights{link}"


def conditions(job: Job, record: BenchRecord) -> str:
    """Return the lines above the table, which describe the model, the ranks, the device, and the emulated link."""
    stood = " (one process stands for all)" if job.processes < job.ranks else ""
    machine = f" ({record.machine})" if job.device == "cuda" else ""
    text = (
        f"{record.record.model}; {job.ranks} rank{'s' * (job.ranks > 1)}{stood}, device {job.device}{machine}, "
        f"medians of {record.steps} {f'turns of {job.turn} steps in a row' if job.turn > 1 else 'steps'}, slowest rank"
    )
    return "\n".join(prose(str(line)) for line in (text, record.link, record.load) if line is not None)


def why_busy(record: BenchRecord) -> str:
    """Return a clause with the evidence that other processes used the processors during a measurement; empty if there is
    no evidence."""
    signs = []
    held_s = record.load.compute_s if record.load is not None and record.load.pace is not None else None
    over = [s / held_s - 1 for steps in record.compute_s.values() for s in steps] if held_s else []
    if late := [x for x in over if x > _OVERRUN]:
        signs.append(
            f"compute overran its fixed duration in {len(late)} of {len(over)} steps, by up to {100 * max(late):.0f} %"
        )
    if uneven := why_uneven("resident steps", record.steps_s.get(RESIDENT, ())):
        signs.append(uneven)
    return ", and ".join(signs)


def bench_table(record: BenchRecord) -> str:
    """Return a table of measured and predicted figures, with one row per arm."""
    arms = record.record.arms
    columns: dict[str, dict[str, object]] = {
        "middle half": {n: f"{a * 1e3:.0f} to {b * 1e3:.0f}" for n, (a, b) in record.quartiles_s.items()}
    }
    for base in (RESIDENT, "layerwise", "chunkflow"):
        if base in arms and (base != "chunkflow" or any(name.startswith("chunkflow+groups") for name in arms)):
            columns[f"to {base}"] = {n: f"{record.ratio(n, base):.3f}" for n in arms}
    if any(x is not None for x in record.inflation.values()):
        columns["collectives inflated"] = {n: _percent(x) for n, x in record.inflation.items()}
    if any(peak is not None for peak in record.peak_bytes.values()):
        columns["peak"] = {n: size(peak) for n, peak in record.peak_bytes.items()}
        columns["host"] = {n: record.host(n) for n in record.host_s}
        columns["copied at"] = {n: "-" if r is None else f"{r / 1e9:.1f} GB/s" for n, r in record.copy_rate.items()}
        columns["differs by"] = {
            n: "-" if d is None else f"{d:.1e}" if d else "0" for n, d in record.difference.items()
        }
    columns["predicted step"] = {n: seconds(a.step_s) for n, a in record.predicted.items()}
    columns["off"] = {n: _percent(record.off.get(n)) for n in record.predicted}
    columns["predicted wait"] = {n: seconds(a.exposed_h2d_s) for n, a in record.predicted.items()}
    return table(record.record, columns)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _copy_rate(ranks: Sequence[ProgramRun]) -> float | None:
    """Return the copy rate of the slowest rank in bytes/s, over the time in which copies ran; None if nothing was
    copied."""
    rates = [
        sum(m.moved_bytes for m in rank.measurements) / seconds
        for rank in ranks
        if (seconds := sum(m.copy_s for m in rank.measurements))
    ]
    return min(rates, default=None)


def _measured_record(ranks: Sequence[ArmRun], programs: Sequence[ProgramRun], total: int) -> ArmRecord:
    """Return the measured figures of an arm.  ``programs``: the program of each rank; empty for an alternative."""
    record = ArmRecord(step_s=max(median(r.steps_s) for r in ranks), weights_total_bytes=total)
    if not programs:
        return record

    def slowest(figure: Callable[[StepMeasurement], float]) -> float:
        return max(median(map(figure, p.measurements)) for p in programs)

    return replace(
        record,
        exposed_h2d_s=slowest(lambda m: m.exposed_h2d_s),
        collective_s=slowest(lambda m: m.collective_s),
        weights_device_bytes=programs[0].plan.device_bytes,
        moved_bytes_per_step=programs[0].plan.moved_bytes,
        equal_to_resident=None if ranks[0].difference is None else all(r.difference == 0.0 for r in ranks),
    )


def _predicted(ranks: Sequence[ProgramRun], total: int) -> ArmRecord:
    slow = max(ranks, key=lambda r: r.predicted.step_s)
    return ArmRecord.predicted(slow.plan, slow.predicted, total)


def _collective_seconds(ranks: Sequence[ProgramRun]) -> float:
    """Return the seconds of collectives per step.  Each collective is timed on the rank that started it last, because the
    other ranks were waiting."""
    steps_s: list[float] = []
    for step in zip(*(r.measurements for r in ranks), strict=True):
        columns = zip(*(m.windows.collective_s for m in step), strict=True)
        steps_s.append(sum(min(column) for column in columns))
    return median(steps_s)


def _compute_seconds(ranks: Sequence[ProgramRun]) -> tuple[float, ...]:
    """Return the seconds of compute in each step, on the rank that computed longest."""
    steps = zip(*(r.measurements for r in ranks), strict=True)
    return tuple(max(sum(m.windows.compute_s) for m in step) for step in steps)


def _quartiles(steps_s: Sequence[float]) -> tuple[float, float]:
    if len(steps_s) < 2:
        return steps_s[0], steps_s[0]
    low, _, high = quantiles(steps_s, n=4, method="inclusive")
    return low, high
