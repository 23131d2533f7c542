"""The record that every measuring command writes, and its table."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

if TYPE_CHECKING:  # chunkflow doctor, which writes sizes, imports no torch
    from chunkflow_compile.passes.placement.timeline import Timeline
    from chunkflow_compile.passes.plan import Plan, Prediction

SCHEMA = 1
PROSE_WIDTH = 100  # characters in a line of prose
# Share of a step from which a prediction is wrong; less is within the variation of steps.
_FAR = 0.10
# Characters of the longest bar, and what fills its last one by eighths.
_BAR = 24
_EIGHTHS = ("", *"▏▎▍▌▋▊▉")


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """One arm: seconds and bytes per step and rank; None where a figure does not apply.

    ``step_s``, ``exposed_h2d_s`` (compute waited for weights) and ``collective_s`` are medians over the steps, of the
    slowest rank.  ``weights_device_bytes``: arena and resident weights; ``weights_total_bytes``: all weights.
    """

    step_s: float | None = None
    exposed_h2d_s: float | None = None
    collective_s: float | None = None
    weights_device_bytes: int | None = None
    weights_total_bytes: int | None = None
    moved_bytes_per_step: int | None = None
    equal_to_resident: bool | None = None

    @staticmethod
    def predicted(plan: Plan, step: Prediction | Timeline, total_bytes: int, calls: int = 1) -> ArmRecord:
        """Of a step of so many ``calls`` of a plan.  ``step``: what is predicted of a call."""
        return ArmRecord(
            step_s=step.step_s * calls,
            exposed_h2d_s=step.exposed_s * calls,
            collective_s=step.collective_s * calls,
            weights_device_bytes=plan.device_bytes,
            weights_total_bytes=total_bytes,
            moved_bytes_per_step=plan.moved_bytes * calls,
        )


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord:
    """All arms of one measurement, on ``degree`` ranks for each of ``cfg_parallel`` branches of guidance."""

    model: str
    degree: int
    cfg_parallel: int = 1
    arms: Mapping[str, ArmRecord]

    @property
    def body(self) -> dict[str, object]:
        """What is written of it as JSON."""
        return {"schema": SCHEMA, **asdict(self)}


def is_far(predicted_s: float | None, measured_s: float | None) -> bool:
    """Whether a time is far from its prediction; not if either is unknown."""
    return bool(predicted_s) and measured_s is not None and abs(measured_s / predicted_s - 1) > _FAR  # type: ignore[operator]


def profile_does_not_fit(hardware: str, call: str) -> str:
    """Why a time is far from its prediction, and what to do.  ``hardware``: profiles.  ``call``: that has the options."""
    return (
        f"the profile {hardware} does not fit this machine, or the machine was busy; run chunkflow calibrate and {call} with "
        "hardware='measured'"
    )


def without_profile(hardware: str, call: str) -> str:
    """Why a report shows no predictions, and what to do.  ``hardware``, ``call``: as of :func:`profile_does_not_fit`."""
    return (
        f"Predictions are not shown: the profile {hardware!r} was not made for this machine. Run chunkflow calibrate, and "
        f"{call} with hardware='measured'."
    )


def as_json(body: object) -> str:
    """A value, with dataclasses in it, as JSON."""
    return json.dumps(body, indent=1, default=asdict) + "\n"


def check_writable(path: Path) -> None:
    """Check, before minutes of work, that a file can be written.  Leaves no empty file.  Raises ChunkflowError if not."""
    fresh = not path.exists()
    try:
        path.open("a").close()
        if fresh:
            path.unlink()
    except OSError as error:
        raise ChunkflowError(f"The result cannot be written to {path}: {error}. Give another file.") from error


def check_folder(path: str | Path) -> Path:
    """Create a folder, if it is missing, before minutes of work.  Raises ChunkflowError if it cannot be written."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
    except (OSError, TypeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ChunkflowError(f"The folder {path} cannot be written: {cause}. Give another folder.") from error
    return Path(path)


def table(record: ComparisonRecord, extra: Mapping[str, Mapping[str, object]]) -> str:
    """The record as a table, one row per arm; ``extra``: column -> arm -> cell."""
    rows = []
    for name, arm in record.arms.items():
        row: dict[str, object] = {
            "arm": name,
            "step": seconds(arm.step_s),
            "waited for weights": seconds(arm.exposed_h2d_s),
            "collectives": seconds(arm.collective_s),
            "weights on device": _share(arm.weights_device_bytes, arm.weights_total_bytes),
            "moved a step": size(arm.moved_bytes_per_step),
        }
        row.update({column: cells.get(name, "") for column, cells in extra.items()})
        if any(a.equal_to_resident is not None for a in record.arms.values()):  # a simulation computes no output
            row["equal to resident"] = {True: "yes", False: "NO", None: "-"}[arm.equal_to_resident]
        rows.append(row)
    return tabulate(rows, headers="keys", disable_numparse=True)


def bars(record: ComparisonRecord) -> str:
    """The step time and the weights on the device of each arm, as bars of block characters beside each other."""
    arms = record.arms
    most_s = max((a.step_s or 0.0 for a in arms.values()), default=0.0) or 1.0
    most_bytes = max((a.weights_device_bytes or 0 for a in arms.values()), default=0) or 1
    rows = [
        (
            name,
            _bar((arm.step_s or 0.0) / most_s),
            seconds(arm.step_s),
            _bar((arm.weights_device_bytes or 0) / most_bytes),
            size(arm.weights_device_bytes),
        )
        for name, arm in arms.items()
    ]
    headers = ("", "step time", "", "weights on device", "")
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)


def _bar(share: float) -> str:
    full, rest = divmod(round(8 * _BAR * share), 8)
    return f"{'█' * full}{_EIGHTHS[rest]}"


def seconds(value: float | None) -> str:
    """Seconds as text, in ms."""
    return "-" if value is None else f"{value * 1e3:.1f} ms"


def fine(value: float) -> str:
    """Seconds as text, in ms to the microsecond."""
    return f"{value * 1e3:.3f} ms"


def region_title(block: str, what: str) -> str:
    return f"{block}: {what}" if block else what


def _share(part: int | None, whole: int | None) -> str:
    if part is None or not whole:
        return "-"
    return f"{size(part)} ({100 * part / whole:.1f} %)"
