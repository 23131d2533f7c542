"""The picture of a measurement: what each arm's step consists of, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .pictures import new_axes, save_figure
from .record import ArmRecord, ComparisonRecord

_PART_COLOURS = {"compute, and the host": "#4c78a8", "collectives": "#f2a541", "waiting for weights": "#d64545"}


def draw_arms(record: ComparisonRecord, predicted: Mapping[str, ArmRecord], path: Path) -> None:
    """Draw a bar for each arm, a diamond at its predicted step, and a dotted line at the step of the resident arm."""
    names = list(record.arms)
    figure, axes = new_axes(8.0, 1.5 + 0.42 * len(names))
    begins = [0.0] * len(names)
    for part, colour in _PART_COLOURS.items():
        lengths = [1e3 * _part(record.arms[name], part) for name in names]
        axes.barh(names, lengths, left=begins, color=colour, label=part, height=0.62)
        begins = [a + b for a, b in zip(begins, lengths, strict=True)]
    steps = {name: 1e3 * (p.step_s or 0.0) for name, p in predicted.items()}
    axes.plot(list(steps.values()), list(steps), "D", color="black", markersize=4, label="predicted step")
    for name, end in zip(names, begins, strict=True):
        arm = record.arms[name]
        if arm.weights_device_bytes is None:
            continue
        share = arm.weights_device_bytes / (arm.weights_total_bytes or 1)
        beside = max(end, steps.get(name, 0.0)), name
        axes.annotate(f"   {100 * share:.0f} % of weights on device", beside, va="center", fontsize=8)
    if (resident := record.arms.get("resident")) is not None and resident.step_s:
        axes.axvline(1e3 * resident.step_s, linestyle=":", color="gray")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max([*begins, *steps.values()]))
    axes.set_xlabel("a step, ms (medians, slowest rank)")
    axes.set_title(record.model, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def _part(arm: ArmRecord, part: str) -> float:
    waits, collectives = arm.exposed_h2d_s or 0.0, arm.collective_s or 0.0
    parts = {
        "collectives": collectives,
        "waiting for weights": waits,
        "compute, and the host": max(0.0, (arm.step_s or 0.0) - collectives - waits),
    }
    return parts[part]
