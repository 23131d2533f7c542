"""The record that every measuring command writes, the table of a record, and functions that format sizes and times."""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

if TYPE_CHECKING:  # these modules import torch, but chunkflow doctor must work without torch
    from chunkflow_compile.passes.placement.timeline import Timeline
    from chunkflow_compile.passes.plan import Plan, Prediction

SCHEMA = 1
# The maximum number of characters per line, in prose and in tables.
PROSE_WIDTH = 100
# Table cells with at most this many characters are not wrapped.
_SHORT = 24
# The number of characters between two columns.
_GAP = 2
# The number of characters that tabulate adds to a header.
_PADDING = 2
# A prediction is reported as wrong if its relative error is larger than this.  Smaller errors are ignored, because the times
# of steps vary.
_FAR = 0.10


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """The figures of one arm, that is, of one of the policies that a measurement compares.  Figures are per step and rank.  A
    figure is None if it does not apply.

    ``step_s``: the duration of a step.  ``exposed_h2d_s``: the time in which compute waited for weights.  ``collective_s``:
    the time of collectives.  These three times are in seconds; each is the median over the steps of the slowest rank.
    ``weights_device_bytes``: the size in bytes of the arena and of the resident weights.  ``weights_total_bytes``: the size
    in bytes of all weights.
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
        """Return the record of a predicted step.

        ``step``: the prediction for one call under the plan.  ``calls``: the number of calls per step.
        """
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
    """The figures of all arms in one measurement.

    ``cfg_parallel``: the number of guidance branches that run in parallel.  ``degree``: the number of ranks per branch.
    """

    model: str
    degree: int
    cfg_parallel: int = 1
    arms: Mapping[str, ArmRecord]

    @property
    def ranks(self) -> int:
        return self.degree * self.cfg_parallel

    @property
    def body(self) -> dict[str, object]:
        """Return the record in the form in which it is written to JSON."""
        return {"schema": SCHEMA, **asdict(self)}


def is_far(predicted_s: float | None, measured_s: float | None) -> bool:
    """Whether a measured time is far from its prediction; False if one of the two times is unknown."""
    return bool(predicted_s) and measured_s is not None and abs(measured_s / predicted_s - 1) > _FAR  # type: ignore[operator]


def profile_does_not_fit(hardware: str, call: str) -> str:
    """Return a text that says why a measured time is far from its prediction, and how the user can correct this.

    ``hardware``: the names of the profiles.  ``call``: the function or command that takes the option ``hardware``.
    """
    return (
        f"the profile {hardware} does not fit this machine, or the machine was busy; run chunkflow calibrate and {call} with "
        "hardware='measured'"
    )


def without_profile(hardware: str, call: str) -> str:
    """Return a text that says why a report shows no predictions, and what the user has to do to see them.

    ``hardware``, ``call``: see :func:`profile_does_not_fit`.
    """
    return (
        f"Predictions are not shown: the profile {hardware!r} was not made for this machine. Run chunkflow calibrate, and "
        f"{call} with hardware='measured'."
    )


def as_json(body: object) -> str:
    """Return a value as JSON.  The value may contain dataclasses."""
    return json.dumps(body, indent=1, default=asdict) + "\n"


def check_writable(path: Path) -> None:
    """Raise ChunkflowError if a file cannot be written.  Call this before work that may take minutes.

    The check leaves no empty file behind.
    """
    fresh = not path.exists()
    try:
        path.open("a").close()
        if fresh:
            path.unlink()
    except OSError as error:
        raise ChunkflowError(f"The result cannot be written to {path}: {error}. Give another file.") from error


def check_folder(path: str | Path) -> Path:
    """Create a folder if it does not exist; return its path.  Call this before work that may take minutes.

    Raises ChunkflowError if no files can be written to the folder.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
    except (OSError, TypeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ChunkflowError(f"The folder {path} cannot be written: {cause}. Give another folder.") from error
    return Path(path)


def prose(text: str) -> str:
    """Wrap a text into lines of at most PROSE_WIDTH characters.

    A word that is longer than a line, such as a path, is put on a separate line.
    """
    fill = partial(textwrap.fill, width=PROSE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fill(line) for line in text.split("\n"))


def fitted(rows: Sequence[Sequence[object]], headers: Sequence[str] = (), tablefmt: str = "simple") -> str:
    """Return a table that is at most PROSE_WIDTH characters wide.  Long cells are wrapped.

    Columns that still do not fit are put into additional tables below the first table.  Each additional table repeats the
    first column.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    columns = [
        _Column(headers[i] if headers else "", [row[i] for row in cells])
        for i in range(len(cells[0] if cells else headers))
    ]
    tables = []
    for group in _groups(columns):
        widths = _widths([columns[i] for i in group])
        wrapped = [[_wrapped(row[i], width) for i, width in zip(group, widths, strict=True)] for row in cells]
        shown = (
            [_wrapped(columns[i].header, width - _PADDING) for i, width in zip(group, widths, strict=True)]
            if headers
            else ()
        )
        align = ["right" if columns[i].numbers else "left" for i in group] if cells else None
        tables.append(tabulate(wrapped, shown, tablefmt, colalign=align, disable_numparse=True))
    return "\n\n".join(tables)


@dataclass(frozen=True)
class _Column:
    """A column of a table.

    ``least``: the minimum width in characters.  ``most``: the width at which no cell is wrapped.  ``full``: the width at
    which neither a cell nor the header is wrapped.
    """

    header: str
    cells: Sequence[str]

    @property
    def numbers(self) -> bool:
        """Whether all cells are whole numbers or empty."""
        return all(re.fullmatch(r"[+-]?\d*", cell) for cell in self.cells)

    @property
    def most(self) -> int:
        return max(map(len, self.cells), default=0)

    @property
    def least(self) -> int:
        words = max((len(word) for cell in self.cells for word in cell.split()), default=0)
        header = max(map(len, self.header.split()), default=0) + _PADDING
        return max(min(self.most, max(words, _SHORT)), header)

    @property
    def full(self) -> int:
        return max(self.least, self.most, len(self.header) + _PADDING)


def _groups(columns: Sequence[_Column]) -> Iterator[list[int]]:
    """Divide columns among tables; yield the column numbers of each table.  Each table begins with the first column."""
    group: list[int] = []
    for number in range(len(columns)):
        wanted = [*group, number]
        if len(group) > 1 and sum(columns[i].least + _GAP for i in wanted) - _GAP > PROSE_WIDTH:
            yield group
            wanted = [0, number]
        group = wanted
    yield group


def _widths(columns: Sequence[_Column]) -> list[int]:
    """Return the widths of the columns in characters.

    Each column gets its minimum width.  The remaining width goes first to the columns that need the fewest additional
    characters.
    """
    widths = [c.least for c in columns]
    left = PROSE_WIDTH - sum(widths) - _GAP * (len(columns) - 1)
    for wanted in ([max(c.least, c.most) for c in columns], [c.full for c in columns]):
        for i in sorted(range(len(columns)), key=lambda i: wanted[i] - widths[i]):
            more = max(0, min(wanted[i] - widths[i], left))
            widths[i] += more
            left -= more
    return widths


def _wrapped(cell: str, width: int) -> str:
    lines = (textwrap.wrap(line, width, break_on_hyphens=False) for line in cell.split("\n"))
    return "\n".join(part for line in lines for part in line or [""])


def table(record: ComparisonRecord, extra: Mapping[str, Mapping[str, object]], per: str = "step") -> str:
    """Return a record as a table with one row per arm.

    ``extra``: additional columns, as header -> arm -> cell.  ``per``: the unit to which times and bytes refer, such as
    "step".  If there is only one rank, and it has run no collectives, the column about collectives is left out.
    """
    rows = []
    alone = record.ranks == 1 and not any(arm.collective_s for arm in record.arms.values())
    for name, arm in record.arms.items():
        row: dict[str, object] = {
            "arm": name,
            per: seconds(arm.step_s),
            "waited for weights": seconds(arm.exposed_h2d_s),
            "collectives": seconds(arm.collective_s),
            "weights on device": _share(arm.weights_device_bytes, arm.weights_total_bytes),
            f"copied per {per}": size(arm.moved_bytes_per_step),
        }
        row.update({column: cells.get(name, "") for column, cells in extra.items()})
        if any(a.equal_to_resident is not None for a in record.arms.values()):  # a simulation has no outputs to compare
            row["equal to resident"] = {True: "yes", False: "NO", None: "-"}[arm.equal_to_resident]
        rows.append({c: cell for c, cell in row.items() if not (alone and c.startswith("collectives"))})
    return fitted([[*row.values()] for row in rows], [*rows[0]])


def seconds(value: float | None) -> str:
    """Return a time as text, in ms with one decimal digit."""
    return "-" if value is None else f"{value * 1e3:.1f} ms"


def fine(value: float) -> str:
    """Return a time as text, in ms with three decimal digits."""
    return f"{value * 1e3:.3f} ms"


def region_title(block: str, what: str) -> str:
    return f"{block}: {what}" if block else what


def _share(part: int | None, whole: int | None) -> str:
    if part is None or not whole:
        return "-"
    return f"{size(part)} ({100 * part / whole:.1f} %)"


def tiling_sentence(name: str) -> str:
    """Return a hint for pipelines in which the VAE needs more activation memory than any other component.

    ``name``: the name of the VAE in the pipeline.
    """
    return (
        f"The activations of {name} determine the minimum of GPU memory: pipe.{name}.enable_tiling() decodes in tiles, which "
        "takes less."
    )
