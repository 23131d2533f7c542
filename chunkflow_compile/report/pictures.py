"""Pictures by matplotlib, an optional dependency that is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.placement.curve import Point


def new_axes(
    width: float = 7.0, height: float = 4.2, columns: int = 1, heights: Sequence[float] = (1.0,)
) -> tuple[Any, Any]:
    """A figure and its axes, drawn without a display.  ``heights``: relative ones of the axes below each other.

    Raises ChunkflowError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ChunkflowError("Pictures need matplotlib: pip install 'chunkflow-compile[pictures]'.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(len(heights), columns, height_ratios=heights)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure without its date, so that equal figures give equal files.  Text in an SVG stays searchable."""
    import matplotlib

    dated = {".png": {"Software": None}, ".svg": {"Date": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "chunkflow"}):
        figure.savefig(path, dpi=110, metadata=dated.get(path.suffix))


def draw_curve(points: Sequence[Point], forwards: int, title: str, path: Path) -> None:
    """Draw memory against step time, with the resident step as a line."""
    figure, axes = new_axes()
    axes.step([p.memory / 2**30 for p in points], [p.step_s * forwards for p in points], where="post")
    axes.axhline(points[-1].resident_step_s * forwards, linestyle=":", color="gray")
    axes.annotate(
        "all weights resident",
        (points[-1].memory / 2**30, points[-1].resident_step_s * forwards),
        ha="right",
        va="bottom",
    )
    axes.set_xlabel("weights on the device, GiB")
    axes.set_ylabel("predicted step, s")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    save_figure(figure, path)
