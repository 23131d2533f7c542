"""What the ranks measured, as one record and one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

from chunkflow_compile.report.record import SCHEMA, ArmRecord, Record, seconds, table

from .link_error import LinkError
from .ranks import RESIDENT, ArmRun, Job, RankRun


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """``predicted``: in the terms of ``record``.  ``quartiles_s``: of the step, of the slowest rank, by arm.

    ``inflation``: how much longer collectives took than with all weights resident, 0.05 for a twentieth; without the time
    that one rank waited for the other.  None without a resident arm.
    """

    record: Record
    predicted: Mapping[str, ArmRecord]
    quartiles_s: Mapping[str, tuple[float, float]]
    inflation: Mapping[str, float | None]
    link: LinkError
    steps: int

    def to_json(self) -> str:
        body = {
            "schema": SCHEMA,
            "model": self.record.model,
            "degree": self.record.degree,
            "arms": {n: asdict(a) for n, a in self.record.arms.items()},
            "predicted": {n: asdict(a) for n, a in self.predicted.items()},
            "quartiles_s": self.quartiles_s,
            "collective_inflation": self.inflation,
            "link": asdict(self.link),
            "steps": self.steps,
        }
        return json.dumps(body, indent=1) + "\n"


def summarise(model: str, ranks: Sequence[RankRun]) -> BenchRecord:
    """Medians over the steps, of the slowest rank."""
    names = list(ranks[0].arms)
    runs = {name: [rank.arms[name] for rank in ranks] for name in names}
    total = ranks[0].total_bytes
    base = _exchanges(runs[RESIDENT]) if RESIDENT in runs else None
    steps = {name: max((r.steps_s for r in arm), key=median) for name, arm in runs.items()}
    record = Record(
        model=model,
        degree=len(ranks),
        arms={name: _measured(arm, total, base is not None) for name, arm in runs.items()},
    )
    return BenchRecord(
        record=record,
        predicted={name: _predicted(arm, total) for name, arm in runs.items()},
        quartiles_s={name: _quartiles(found) for name, found in steps.items()},
        inflation={name: _exchanges(arm) / base - 1 if base else None for name, arm in runs.items()},
        link=max((r.link for r in ranks), key=lambda link: abs(link.shared / link.requested - 1)),
        steps=len(steps[names[0]]),
    )


def title(job: Job) -> str:
    """What was measured, in a line."""
    size = job.regime.size
    if job.model is not None:
        return f"{job.model} on an emulated link"
    blocks = f"{size.layers} blocks" if job.regime.family == "wan" else f"{size.layers} + {size.singles} blocks"
    return f"{job.regime.family}, {blocks}, {size.heads * size.head_dim} wide, random weights, on an emulated link"


def describe(job: Job, found: BenchRecord) -> str:
    """What stands above the table."""
    return (
        f"{found.record.model}; {job.ranks} rank{'s' * (job.ranks > 1)}, device {job.device}, "
        f"medians of {found.steps} steps, slowest rank\n{found.link}"
    )


def bench_table(found: BenchRecord) -> str:
    """An arm a row, measured beside predicted."""
    arms = found.record.arms
    columns: dict[str, dict[str, object]] = {
        "middle half": {n: f"{a * 1e3:.0f} to {b * 1e3:.0f}" for n, (a, b) in found.quartiles_s.items()}
    }
    for base in (RESIDENT, "layerwise"):
        whole = arms[base].step_s if base in arms else None
        if whole:
            columns[f"to {base}"] = {n: f"{(a.step_s or 0) / whole:.3f}" for n, a in arms.items()}
    columns["collectives inflated"] = {n: "-" if x is None else f"{100 * x:+.1f} %" for n, x in found.inflation.items()}
    columns["predicted step"] = {n: seconds(a.step_s) for n, a in found.predicted.items()}
    columns["off"] = {n: _off(found.predicted[n].step_s, a.step_s) for n, a in arms.items()}
    columns["predicted wait"] = {n: seconds(a.exposed_h2d_s) for n, a in found.predicted.items()}
    return table(found.record, columns)


def _off(predicted: float | None, measured: float | None) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %" if predicted and measured else "-"


def _measured(ranks: Sequence[ArmRun], total: int, compared: bool) -> ArmRecord:
    def slowest(figure: Callable[[ArmRun], Sequence[float]]) -> float:
        return max(median(figure(rank)) for rank in ranks)

    plan = ranks[0].plan
    return ArmRecord(
        step_s=slowest(lambda r: r.steps_s),
        exposed_h2d_s=slowest(lambda r: [m.exposed_h2d_s for m in r.measurements]),
        collective_s=slowest(lambda r: [m.collective_s for m in r.measurements]),
        weights_device_bytes=plan.device_bytes,
        weights_total_bytes=total,
        moved_bytes_per_step=plan.moved_bytes,
        equal_to_resident=all(r.equal for r in ranks) if compared else None,
    )


def _predicted(ranks: Sequence[ArmRun], total: int) -> ArmRecord:
    slow = max(ranks, key=lambda r: r.predicted.step_s)
    return ArmRecord(
        step_s=slow.predicted.step_s,
        exposed_h2d_s=slow.predicted.exposed_s,
        collective_s=slow.predicted.collective_s,
        weights_device_bytes=slow.plan.device_bytes,
        weights_total_bytes=total,
        moved_bytes_per_step=slow.plan.moved_bytes,
        equal_to_resident=None,
    )


def _exchanges(ranks: Sequence[ArmRun]) -> float:
    """Seconds a step in collectives, each as long as the rank that came last to it saw it: the others waited for that."""
    found: list[float] = []
    for step in zip(*(r.measurements for r in ranks), strict=True):
        columns = zip(*(m.windows.collective_s for m in step), strict=True)
        found.append(sum(min(column) for column in columns))
    return median(found)


def _quartiles(found: Sequence[float]) -> tuple[float, float]:
    if len(found) < 2:
        return found[0], found[0]
    low, _, high = quantiles(found, n=4, method="inclusive")
    return low, high
