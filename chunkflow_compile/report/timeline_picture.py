"""The picture of a step: the whole step at the top, a few enlarged blocks in the middle, and the arena at the bottom."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError

from .lanes import Lanes, StepLane, around
from .pictures import new_axes, save_figure

WIDTH, HEIGHT = 15.0, 10.0
_NAMES: dict[StepLane, str] = {
    "compute": "compute",
    "collective": "collectives",
    "copy": "copies",
    "pull": "pulls",
    "read": "SSD",
}
_HEIGHTS = (1.0, 4.0, 3.2)
_COMPUTE, _COLLECTIVE, _STALL = "#a6c8e4", "#f5b95c", "#d62728"
# The lower edge of a bar in its lane, and the height of the bar, relative to the height of the lane.
_LOW, _HIGH = 0.05, 0.86
# The width and the height of a character in inches at font size _SIZE.  A label that does not fit at this size is drawn
# smaller.
_CHARACTER, _LINE = 0.068, 0.125
_SIZE, _SMALLEST = 8.0, 3.5
_LEGIBLE = 0.55
# The minimum duration that the axes show, in seconds.  It is shorter than any span, and prevents empty axes.
_SHORTEST_S = 1e-12


@dataclass(frozen=True)
class _Zoom:
    """The enlarged part of a step.

    ``blocks``: the names of the enlarged blocks.  ``begin``, ``end``: the interval around these blocks, in seconds.
    ``colours``: the colours of weights by label.  A weight has the same colour in all blocks.
    """

    lanes: Lanes
    blocks: Sequence[str]
    begin: float
    end: float
    colours: Mapping[str, Any]

    def label(self, label: str, block: str) -> str:
        """Return the label of a weight.  It contains the number of the weight's block unless this block is enlarged."""
        return label if block in self.blocks or not block else f"{block.rpartition('.')[2]}: {label}"


def draw_timeline(lanes: Lanes, title: str, path: Path, *, block: str | None = None, blocks: int = 1) -> None:
    """Write the picture of a step.

    ``blocks``: the number of blocks to enlarge.  ``block``: the name of the first enlarged block; by default, the enlarged
    blocks are in the middle of the model.  Raises ChunkflowError if there is no block with this name.
    """
    shown = _shown(lanes, block, blocks)
    figure, (top, middle, bottom) = new_axes(WIDTH, HEIGHT, heights=_HEIGHTS)
    figure.suptitle(title, fontsize=11, parse_math=False)
    zoom = _Zoom(lanes, shown, *_time_shown(lanes, shown), _colours(lanes))
    _overview(top, zoom)
    _detail(middle, zoom)
    _arena(bottom, zoom)
    save_figure(figure, path)


def _shown(lanes: Lanes, block: str | None, blocks: int) -> list[str]:
    """Return the names of the blocks to enlarge."""
    names = list(lanes.blocks)
    if block is not None and block not in lanes.blocks:
        close = difflib.get_close_matches(block, names, n=1, cutoff=0.0)
        meant = f"; did you mean {close[0]!r}?" if close else ": the model has no blocks."
        raise ChunkflowError(f"There is no block {block!r}{meant}")
    first = names.index(block) if block is not None else max(0, (len(names) - blocks) // 2)
    return names[first : first + blocks]


def _time_shown(lanes: Lanes, shown: Sequence[str]) -> tuple[float, float]:
    if not shown:
        return 0.0, max(lanes.step_s, _SHORTEST_S)
    start, end = lanes.blocks[shown[0]][0], lanes.blocks[shown[-1]][1]
    waits = [s.start for s in lanes.stalls if s.end == start]
    start = min([start, *waits])
    margin = 0.02 * (end - start)
    return max(0.0, start - margin), max(min(lanes.step_s, end + margin), start + _SHORTEST_S)


def _colours(lanes: Lanes) -> dict[str, Any]:
    from matplotlib import colormaps

    labels = dict.fromkeys(slot.label for slot in lanes.slots)
    # Use light colours, because the text on them is black.  Leave out red, which marks stalls.
    light: Any = [colormaps["Set3"], colormaps["Pastel2"]]
    palette = [colour for colormap in light for colour in colormap.colors if colour != light[0].colors[3]]
    return {label: palette[i % len(palette)] for i, label in enumerate(labels)}


def _rows_of(axes: Any, lanes: Lanes) -> dict[StepLane, float]:
    """Label the lanes on the axis; return the lower edge of each lane.  Compute is at the top."""
    rows = {lane: float(row) for row, lane in enumerate(reversed(lanes.shown))}
    axes.set_yticks([row + 0.5 for row in reversed(rows.values())], [_NAMES[lane] for lane in reversed(rows)])
    axes.tick_params(labelsize=8)
    return rows


def _overview(axes: Any, zoom: _Zoom) -> None:
    lanes, rows = zoom.lanes, _rows_of(axes, zoom.lanes)
    colours = {"compute": "#4c78a8", "collective": _COLLECTIVE, "copy": "#72a98f", "pull": "#b8a04c", "read": "#9d83ad"}
    for lane in lanes.shown:
        parts = [part for bar in lanes.lane(lane) for part in around(bar.start, bar.end, lanes.step_s)]
        axes.broken_barh([_ms(*part) for part in parts], (rows[lane] + 0.1, 0.8), color=colours[lane], linewidth=0)
    stalls = [_ms(s.start, s.end) for s in lanes.stalls]
    axes.broken_barh(stalls, (rows["compute"] + 0.1, 0.8), color=_STALL, linewidth=0.6, edgecolor=_STALL)
    axes.axvspan(zoom.begin * 1e3, zoom.end * 1e3, color="black", alpha=0.12, linewidth=0)
    axes.set(xlim=(0, lanes.step_s * 1e3), ylim=(0, len(rows)))
    axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=-9)
    waited = sum(s.end - s.start for s in lanes.stalls)
    said = f"one forward, {lanes.step_s * 1e3:.1f} ms; compute waits {waited * 1e3:.1f} ms for weights (red)"
    if "collective" in rows:
        said += f", copies slow collectives by {lanes.inflation_s * 1e3:.1f} ms"
    axes.set_title(f"{said}; grey: shown below", fontsize=9, loc="left")


def _detail(axes: Any, zoom: _Zoom) -> None:
    lanes, rows = zoom.lanes, _rows_of(axes, zoom.lanes)
    top = len(rows) + 0.35
    inches = HEIGHT * _HEIGHTS[1] / sum(_HEIGHTS) * 0.8 * _HIGH / top
    longest: dict[str, float] = {}
    for bar in lanes.bars:
        name = bar.name.partition("[")[0]
        longest[name] = max(longest.get(name, 0.0), bar.end - bar.start)
    fixed = {"compute": _COMPUTE, "collective": _COLLECTIVE}
    for bar in lanes.bars:
        colour = fixed.get(bar.lane) or zoom.colours.get(bar.label, "gray")
        least = bar.block in zoom.blocks and bar.end - bar.start >= longest[bar.name.partition("[")[0]]
        where = (bar.start, bar.end), (rows[bar.lane] + _LOW, _HIGH)
        style = {"facecolor": colour, "gid": f"{bar.lane}:{bar.name}"}
        text = (bar.name, *bar.label.split(" ")) if bar.lane == "compute" else (zoom.label(bar.label, bar.block),)
        _box(axes, zoom, *where, inches, text, style, least=least)
    for stall in lanes.stalls:
        where = (stall.start, stall.end), (rows["compute"] + _LOW, _HIGH)
        style = {"facecolor": "none", "edgecolor": _STALL, "linewidth": None, "hatch": "////"}
        waits = f"waits {(stall.end - stall.start) * 1e3:.2f} ms"
        _box(axes, zoom, *where, inches, (waits,), {**style, "gid": f"stall:{stall.before}"}, text=_STALL)
    _name_blocks(axes, zoom, len(rows))
    axes.set(xlim=(zoom.begin * 1e3, zoom.end * 1e3), ylim=(0, top))


def _name_blocks(axes: Any, zoom: _Zoom, top: int) -> None:
    """Draw the blocks above the lanes.  If the name of a block fits into the block, write it there."""
    for name, (start, stop) in zoom.lanes.blocks.items():
        start, stop = max(start, zoom.begin), min(stop, zoom.end)
        if stop <= start:
            continue
        arrow = {"arrowstyle": "|-|", "color": "gray", "mutation_scale": 3}
        axes.annotate("", (start * 1e3, top + 0.02), (stop * 1e3, top + 0.02), arrowprops=arrow)
        if stop - start > 0.1 * (zoom.end - zoom.begin):
            centre = (start + stop) / 2 * 1e3
            axes.text(centre, top + 0.06, name, ha="center", va="bottom", fontsize=9, color="black")


def _arena(axes: Any, zoom: _Zoom) -> None:
    lanes, mib = zoom.lanes, 2**20
    inches = HEIGHT * _HEIGHTS[2] / sum(_HEIGHTS) * 0.8 / max(lanes.arena_bytes, 1)
    largest: dict[str, int] = {}
    for slot in lanes.slots:
        largest[slot.weight] = max(largest.get(slot.weight, 0), slot.stop - slot.begin)
    for slot in lanes.slots:
        height = slot.stop - slot.begin
        least = slot.block in zoom.blocks and height >= largest[slot.weight]
        where = (slot.start, slot.end), (slot.begin / mib, height / mib)
        style = {"facecolor": zoom.colours.get(slot.label, "gray"), "gid": f"slot:{slot.weight}"}
        _box(axes, zoom, *where, height * inches, (zoom.label(slot.label, slot.block),), style, least=least)
    axes.set(xlim=(zoom.begin * 1e3, zoom.end * 1e3), ylim=(0, max(lanes.arena_bytes, 1) / mib))
    axes.set_ylabel("arena, MiB", fontsize=9)
    axes.set_xlabel("ms from the start of a forward", fontsize=9)
    axes.tick_params(labelsize=8)


def _ms(start: float, end: float) -> tuple[float, float]:
    """Return the start and the length of a bar in ms."""
    return start * 1e3, (end - start) * 1e3


def _box(
    axes: Any,
    zoom: _Zoom,
    seconds: tuple[float, float],
    rows: tuple[float, float],
    inches: float,
    lines: tuple[str, ...],
    style: Mapping[str, Any],
    *,
    text: str = "black",
    least: bool = True,
) -> None:
    """Draw a box, clipped to the enlarged interval, and a text in the box.

    ``seconds``: the start and the end of the box.  ``rows``: the lower edge and the height of the box on the axis.
    ``inches``: the height of the box in inches.  ``lines``: the lines of the text.  ``text``: the colour of the text.
    ``least``: whether to draw the text even if it is too small to read on paper; readers can enlarge the picture.
    """
    label: dict[str, Any] = {"ha": "center", "va": "center", "color": text, "clip_on": True}
    if text != "black":  # text on hatching gets a white background
        label["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for start, end in around(*seconds, zoom.lanes.step_s):
        start, end = max(start, zoom.begin), min(end, zoom.end)
        if end <= start:
            continue
        axes.broken_barh([_ms(start, end)], rows, **{"edgecolor": "white", "linewidth": 0.7, **style})
        middle = (start + end) / 2 * 1e3, rows[0] + rows[1] / 2
        width = (end - start) * (WIDTH - 1.6) / (zoom.end - zoom.begin)
        shown, rotation, scale = _fitted(lines, width, inches)
        if least or scale >= _LEGIBLE:
            axes.text(*middle, shown, fontsize=max(_SMALLEST, _SIZE * scale), rotation=rotation, **label)


def _fitted(lines: tuple[str, ...], width: float, height: float) -> tuple[str, int, float]:
    """Find the layout with which a text is as large as possible in a box of ``width`` by ``height`` inches.

    The layout may be horizontal or vertical, with one line or several lines.
    Returns the text, its rotation in degrees, and its scale.
    """
    text, rotation, best = "", 0, 0.0
    for shown in (lines, (" ".join(lines),)):
        long, many = _CHARACTER * max(len(line) for line in shown), _LINE * len(shown)
        for room, turned in (((width, height), 0), ((height, width), 90)):
            scale = min(room[0] / long, room[1] / many, 1.0)
            if scale > best + (0.1 if turned else 0.0):  # vertical text is used only if it is clearly larger
                text, rotation, best = "\n".join(shown), turned, scale
    return text, rotation, best
