"""The picture of a step: all of it above, a few blocks enlarged below, with the arena byte by byte."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError

from .lanes import Bar, Lanes, StepLane, around
from .pictures import new_figure, save_figure

WIDTH, HEIGHT = 15.0, 10.0
_NAMES: dict[StepLane, str] = {"compute": "compute", "collective": "collectives", "copy": "copies", "read": "drive"}
_HEIGHTS = (1.0, 4.0, 3.2)
_COMPUTE, _COLLECTIVE, _STALL = "#a6c8e4", "#f5b95c", "#d62728"
# Inches of a character along and across its line at font size _SIZE; a label with less room is drawn smaller.
_CHARACTER, _LINE = 0.068, 0.125
_SIZE, _SMALLEST = 8.0, 3.5
_LEGIBLE = 0.55
# Seconds; shorter than any span.  Keeps an axis from being empty.
_SHORTEST_S = 1e-12


def draw_timeline(lanes: Lanes, title: str, path: Path, *, block: str | None = None, blocks: int = 1) -> None:
    """Write the picture of a step.

    ``block``: the first of ``blocks`` enlarged blocks; by default they are in the middle.  Raises ChunkflowError if
    there is no such block.
    """
    shown = _shown(lanes, block, blocks)
    begin, end = _time_shown(lanes, shown)
    with _text_in_svg():
        figure, (top, middle, bottom) = new_figure(WIDTH, HEIGHT, _HEIGHTS)
        figure.suptitle(title, fontsize=11, parse_math=False)
        _overview(top, lanes, begin, end)
        colours = _Colours(lanes)
        _detail(middle, lanes, begin, end, colours, shown)
        _arena(bottom, lanes, begin, end, colours, shown)
        save_figure(figure, path)


def _shown(lanes: Lanes, block: str | None, blocks: int) -> list[str]:
    """The blocks to enlarge."""
    names = list(lanes.blocks)
    if block is not None and block not in lanes.blocks:
        close = difflib.get_close_matches(block, names, n=1, cutoff=0.0)
        meant = f"; did you mean {close[0]!r}?" if close else ": the model has no blocks."
        raise ChunkflowError(f"There is no block {block!r}{meant}")
    first = names.index(block) if block is not None else max(0, (len(names) - blocks) // 2)
    return names[first : first + blocks]


def _time_shown(lanes: Lanes, shown: list[str]) -> tuple[float, float]:
    if not shown:
        return 0.0, max(lanes.step_s, _SHORTEST_S)
    start, end = lanes.blocks[shown[0]][0], lanes.blocks[shown[-1]][1]
    waits = [s.start for s in lanes.stalls if s.end == start]
    start = min([start, *waits])
    margin = 0.02 * (end - start)
    return max(0.0, start - margin), max(min(lanes.step_s, end + margin), start + _SHORTEST_S)


class _Colours:
    """One colour for the same weight of every block."""

    def __init__(self, lanes: Lanes) -> None:
        from matplotlib import colormaps

        labels = dict.fromkeys(slot.label for slot in lanes.slots)
        # Light colours, because the text on them is black; not red, which marks stalls.
        palette = [
            c for c in (*_rows(colormaps["Set3"]), *_rows(colormaps["Pastel2"])) if c != _rows(colormaps["Set3"])[3]
        ]
        self._of = {label: palette[i % len(palette)] for i, label in enumerate(labels)}

    def of(self, label: str) -> Any:
        return self._of.get(label, "gray")


def _rows(colormap: Any) -> list[tuple[float, ...]]:
    return [tuple(c) for c in colormap.colors]


def _rows_of(lanes: Lanes) -> dict[StepLane, float]:
    """The lower edge of each lane, compute on top."""
    shown = lanes.shown
    return {lane: float(len(shown) - 1 - row) for row, lane in enumerate(shown)}


def _overview(axes: Any, lanes: Lanes, begin: float, end: float) -> None:
    ms = 1e3
    colours = {"compute": "#4c78a8", "collective": _COLLECTIVE, "copy": "#72a98f", "read": "#9d83ad"}
    rows = _rows_of(lanes)
    for lane, row in rows.items():
        spans = [
            (a * ms, (b - a) * ms) for bar in lanes.lane(lane) for a, b in around(bar.start, bar.end, lanes.step_s)
        ]
        axes.broken_barh(spans, (row + 0.1, 0.8), color=colours[lane], linewidth=0)
    stalls = [(s.start * ms, (s.end - s.start) * ms) for s in lanes.stalls]
    axes.broken_barh(stalls, (rows["compute"] + 0.1, 0.8), color=_STALL, linewidth=0.6, edgecolor=_STALL)
    axes.axvspan(begin * ms, end * ms, color="black", alpha=0.12, linewidth=0)
    axes.set_yticks([row + 0.5 for row in rows.values()], [_NAMES[lane] for lane in rows])
    axes.set_xlim(0, lanes.step_s * ms)
    axes.set_ylim(0, len(rows))
    axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=-9)
    waited = sum(s.end - s.start for s in lanes.stalls)
    axes.set_title(
        f"one call of the model, {lanes.step_s * ms:.1f} ms; compute waits {waited * ms:.1f} ms for weights (red), copies "
        f"slow collectives by {lanes.inflation_s * ms:.1f} ms; grey: shown below",
        fontsize=9,
        loc="left",
    )
    axes.tick_params(labelsize=8)


def _detail(axes: Any, lanes: Lanes, begin: float, end: float, colours: _Colours, shown: list[str]) -> None:
    rows = _rows_of(lanes)
    top = len(rows)
    inch = (WIDTH - 1.6) / (end - begin)  # inches per second
    lane_inches = HEIGHT * _HEIGHTS[1] / sum(_HEIGHTS) * 0.8 * 0.86 / (top + 0.35)
    longest: dict[str, float] = {}
    for bar in lanes.bars:
        name = bar.name.partition("[")[0]
        longest[name] = max(longest.get(name, 0.0), bar.end - bar.start)
    for bar in lanes.bars:
        for start, stop in around(bar.start, bar.end, lanes.step_s):
            start, stop = max(start, begin), min(stop, end)
            if stop <= start:
                continue
            colour = {"compute": _COMPUTE, "collective": _COLLECTIVE}.get(bar.lane) or colours.of(bar.label)
            axes.broken_barh(
                [(start * 1e3, (stop - start) * 1e3)],
                (rows[bar.lane] + 0.05, 0.86),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.7,
                gid=f"{bar.lane}:{bar.name}",
            )
            middle = (start + stop) / 2 * 1e3, rows[bar.lane] + 0.48
            _label(
                axes,
                middle,
                _lines(bar, shown),
                (stop - start) * inch,
                lane_inches,
                least=bar.block in shown and bar.end - bar.start >= longest[bar.name.partition("[")[0]],
            )
    for stall in lanes.stalls:
        if stall.start < end and stall.end > begin:
            start, stop = max(stall.start, begin), min(stall.end, end)
            axes.broken_barh(
                [(start * 1e3, (stop - start) * 1e3)],
                (rows["compute"] + 0.05, 0.86),
                facecolor="none",
                edgecolor=_STALL,
                hatch="////",
                gid=f"stall:{stall.before}",
            )
            waits = f"waits {(stall.end - stall.start) * 1e3:.2f} ms"
            _label(
                axes,
                ((start + stop) / 2 * 1e3, rows["compute"] + 0.48),
                (waits,),
                (stop - start) * inch,
                lane_inches,
                colour=_STALL,
            )
    for name, (start, stop) in lanes.blocks.items():
        if start < end and stop > begin:
            axes.annotate(
                "",
                (max(start, begin) * 1e3, top + 0.02),
                (min(stop, end) * 1e3, top + 0.02),
                arrowprops={"arrowstyle": "|-|", "color": "gray", "mutation_scale": 3},
            )
            centre = (max(start, begin) + min(stop, end)) / 2 * 1e3
            if min(stop, end) - max(start, begin) > 0.1 * (end - begin):
                axes.text(centre, top + 0.06, name, ha="center", va="bottom", fontsize=9, color="black")
    axes.set_ylim(0, top + 0.35)
    axes.set_xlim(begin * 1e3, end * 1e3)
    axes.set_yticks([row + 0.5 for row in rows.values()], [_NAMES[lane] for lane in rows])
    axes.tick_params(labelsize=8)


def _arena(axes: Any, lanes: Lanes, begin: float, end: float, colours: _Colours, shown: list[str]) -> None:
    mib = 2**20
    inch = (WIDTH - 1.6) / (end - begin)
    inches = HEIGHT * _HEIGHTS[2] / sum(_HEIGHTS) * 0.8 / max(lanes.arena_bytes, 1)
    largest: dict[str, int] = {}
    for slot in lanes.slots:
        largest[slot.weight] = max(largest.get(slot.weight, 0), slot.stop - slot.begin)
    for slot in lanes.slots:
        for start, stop in around(slot.start, slot.end, lanes.step_s):
            start, stop = max(start, begin), min(stop, end)
            if stop <= start:
                continue
            height = slot.stop - slot.begin
            axes.broken_barh(
                [(start * 1e3, (stop - start) * 1e3)],
                (slot.begin / mib, height / mib),
                facecolor=colours.of(slot.label),
                edgecolor="white",
                linewidth=0.7,
                gid=f"slot:{slot.weight}",
            )
            middle = (start + stop) / 2 * 1e3, (slot.begin + height / 2) / mib
            _label(
                axes,
                middle,
                (_label_in(slot.label, slot.block, shown),),
                (stop - start) * inch,
                height * inches,
                least=slot.block in shown and height >= largest[slot.weight],
            )
    axes.set_xlim(begin * 1e3, end * 1e3)
    axes.set_ylim(0, max(lanes.arena_bytes, 1) / mib)
    axes.set_ylabel("arena, MiB", fontsize=9)
    axes.set_xlabel("ms from the start of a call", fontsize=9)
    axes.tick_params(labelsize=8)


def _lines(bar: Bar, shown: list[str]) -> tuple[str, ...]:
    """The text of a bar: a region's name and what it computes, or the label."""
    if bar.lane == "compute":
        return bar.name, *bar.label.split(" ")
    return (_label_in(bar.label, bar.block, shown),)


def _label_in(label: str, block: str, shown: list[str]) -> str:
    """A weight's label; with the number of its block if that block is not enlarged."""
    return label if block in shown or not block else f"{block.rpartition('.')[2]}: {label}"


def _label(
    axes: Any,
    middle: tuple[float, float],
    lines: tuple[str, ...],
    width: float,
    height: float,
    *,
    colour: str = "black",
    least: bool = True,
) -> None:
    """Draw text in a box of ``width`` by ``height`` inches: across or upright, one line or several, as large as fits.

    ``least``: draw it even if it is too small to read on paper; the picture can be enlarged.
    """
    best, turned, text = 0.0, False, ""
    for shown in (lines, (" ".join(lines),)):
        long, many = _CHARACTER * max(len(line) for line in shown), _LINE * len(shown)
        for room, upright in (((width, height), False), ((height, width), True)):
            scale = min(room[0] / long, room[1] / many, 1.0)
            if scale > best + 0.1 * upright:  # upright text must be clearly larger
                best, turned, text = scale, upright, "\n".join(shown)
    if least or best >= _LEGIBLE:
        size = max(_SMALLEST, _SIZE * best)
        rotation = 90 if turned else 0
        axes.text(
            *middle,
            text,
            ha="center",
            va="center",
            rotation=rotation,
            fontsize=size,
            color=colour,
            clip_on=True,
            **_behind(colour),
        )


def _behind(colour: str) -> dict[str, Any]:
    """A white background for text on hatching."""
    return {} if colour == "black" else {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}


@contextlib.contextmanager
def _text_in_svg() -> Iterator[None]:
    """Keep the text in an SVG searchable, and make equal pictures equal files."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "chunkflow"}):
        yield
