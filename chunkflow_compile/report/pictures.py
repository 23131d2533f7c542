"""Pictures drawn with matplotlib.  This optional dependency is imported only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkflow_compile.hardware.machine import check_installed
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.curve import Point

from .record import ArmRecord, ComparisonRecord, check_writable

# The file types in which pictures can be written.
PICTURES = (".png", ".svg")
_PART_COLOURS = {"compute and host": "#4c78a8", "collectives": "#f2a541", "waiting for weights": "#d64545"}


def check_picture(path: str | Path, *others: str) -> None:
    """Raise ChunkflowError if a picture cannot be written to a file.  Call this before work that may take minutes.

    ``others``: additional file types that the caller writes without matplotlib.
    """
    suffix = Path(path).suffix
    if suffix not in (*PICTURES, *others):
        raise ChunkflowError(f"{path} has an unknown file type: use one of {', '.join((*PICTURES, *others))}.")
    if suffix in PICTURES:
        check_installed("A picture", "matplotlib")
    check_writable(Path(path))


def new_axes(
    width: float = 7.0, height: float = 4.2, columns: int = 1, heights: Sequence[float] = (1.0,)
) -> tuple[Any, Any]:
    """Return a new figure, which needs no display, and its axes.

    ``width``, ``height``: the size of the figure in inches.  ``columns``: the number of columns of axes.  ``heights``: the
    relative heights of the rows of axes.
    Raises ChunkflowError if matplotlib is not installed.
    """
    check_installed("A picture", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(len(heights), columns, height_ratios=heights)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file.  The file contains no date, so that equal figures give equal files.

    In an SVG file, text stays searchable.
    """
    import matplotlib

    dated = {".png": {"Software": None}, ".svg": {"Date": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "chunkflow"}):
        figure.savefig(path, dpi=110, metadata=dated.get(path.suffix))


def draw_curve(points: Sequence[Point], others: Sequence[Point], form: str, title: str, path: Path) -> None:
    """Draw the time per forward against the GPU memory for weights, with a horizontal line at the time of the baseline.

    ``others``: points for the same weights stored in another form, such as quantized; may be empty.  ``form``: the name of
    this form in the legend.
    """
    figure, axes = new_axes()
    most, resident_s = points[-1].memory / 2**30, points[-1].resident_step_s
    for curve, label in ((points, "raw" if form == "packed" else "as they are"), (others, form)):
        steps = [p.step_s for p in curve]
        axes.step([p.memory / 2**30 for p in curve], steps, where="post", label=label)
    if others:
        axes.legend(fontsize=8, frameon=False)
    axes.axhline(resident_s, linestyle=":", color="gray")
    axes.annotate("all weights resident", (most, resident_s), ha="right", va="bottom")
    axes.set(xlabel="weights on the GPU, GiB", ylabel="predicted seconds per forward", ylim=(0, None))
    axes.set_title(title, fontsize=10)
    save_figure(figure, path)


def draw_arms(record: ComparisonRecord, predicted: Mapping[str, ArmRecord], path: Path) -> None:
    """Draw one bar per arm of a comparison (one of the compared policies), with a diamond at the arm's predicted step time.
    A dotted line marks the step time of the baseline."""
    names = list(record.arms)
    figure, axes = new_axes(8.0, 1.5 + 0.42 * len(names))
    begins = _draw_steps(axes, record)
    steps = {name: 1e3 * (p.step_s or 0.0) for name, p in predicted.items()}
    axes.plot(list(steps.values()), list(steps), "D", color="black", markersize=4, label="predicted step")
    for name, end in zip(names, begins, strict=True):
        arm = record.arms[name]
        if arm.weights_device_bytes is None:
            continue
        share = arm.weights_device_bytes / (arm.weights_total_bytes or 1)
        at = max(end, steps.get(name, 0.0)), name
        axes.annotate(f"   {100 * share:.0f} % of weights on device", at, va="center", fontsize=8)
    if (resident := record.arms.get("resident")) is not None and resident.step_s:
        axes.axvline(1e3 * resident.step_s, linestyle=":", color="gray")
    axes.invert_yaxis()
    axes.set(xlabel="step time, ms (median, slowest rank)", xlim=(0, 1.35 * max([*begins, *steps.values()])))
    axes.set_title(record.model, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def draw_regimes(records: Mapping[str, ComparisonRecord], path: Path) -> None:
    """Draw one row per record.  In each row, the left chart shows the step times of the compared policies, and the right
    chart shows how many bytes of weights each policy keeps on the device.

    ``records``: the records by their titles.
    """
    figure, grid = new_axes(9.0, 0.6 + 1.7 * len(records), columns=2, heights=[1.0] * len(records))
    for (title, record), (steps, memory) in zip(records.items(), grid.reshape(-1, 2), strict=True):
        _draw_steps(steps, record)
        steps.set(xlabel="step time, ms (median, slowest rank)")
        on_device = [(arm.weights_device_bytes or 0) / 2**20 for arm in record.arms.values()]
        memory.barh(list(record.arms), on_device, color="#8c8c8c", height=0.62)
        memory.set(xlabel="weights on the device, MiB")
        for axes in (steps, memory):
            axes.invert_yaxis()
            axes.set_title(title, fontsize=10)
    handles, labels = grid.reshape(-1, 2)[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels), frameon=False)
    save_figure(figure, path)


def _draw_steps(axes: Any, record: ComparisonRecord) -> list[float]:
    """Draw one stacked bar per measured policy: the parts of its step.  Return the length of each bar in ms."""
    names = list(record.arms)
    ends = [0.0] * len(names)
    parts = zip(*map(_parts_of_step, record.arms.values()), strict=True)
    for (part, colour), values in zip(_PART_COLOURS.items(), parts, strict=True):
        lengths = [1e3 * seconds for seconds in values]
        axes.barh(names, lengths, left=ends, color=colour, label=part, height=0.62)
        ends = [a + b for a, b in zip(ends, lengths, strict=True)]
    return ends


def _parts_of_step(arm: ArmRecord) -> tuple[float, float, float]:
    """Return the seconds of each part of a step, in the order of ``_PART_COLOURS``."""
    waits, collectives = arm.exposed_h2d_s or 0.0, arm.collective_s or 0.0
    return max(0.0, (arm.step_s or 0.0) - collectives - waits), collectives, waits
