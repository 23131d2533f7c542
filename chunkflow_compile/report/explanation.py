"""The report on the steps of a plan: five lines and, on request, tables that compare predicted and measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from chunkflow_compile.units import size

from .cycle_calls import CallFigures, calls_table
from .first_step import first_step_line
from .record import as_json, fine, fitted, prose, region_title, seconds, without_profile
from .summary import Summary

# A report lists at most this many stalls, and at most this many windows.
SHOWN = 5
# A time below this number of seconds is shown as 0.0 ms.
SHORT_S = 5e-5
# The maximum width of a region's title in a table, in characters.  It is enough for a block and two weights.
_WIDE = 56


@dataclass(frozen=True)
class Figure:
    """A figure of a step: its predicted value and its measured value.  A value is None if it is unknown.

    ``unit``: "bytes" or "bytes/s"; any other value stands for seconds.
    """

    name: str
    predicted: float | None
    measured: float | None
    unit: str = "s"


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window and its region.  Each time is a pair (predicted, measured), in seconds."""

    index: int
    block: str
    what: str
    compute_s: tuple[float, float]
    exposed_s: tuple[float, float]
    collective_s: tuple[float, float]

    @property
    def parts(self) -> tuple[tuple[float, float], ...]:
        return self.compute_s, self.exposed_s, self.collective_s


@dataclass(frozen=True, kw_only=True)
class WorstStall:
    """A stall before a region.

    ``weights``: the weights that must arrive before the region runs; the weight that arrives last comes first.
    """

    window: int
    block: str
    what: str
    predicted_s: float
    measured_s: float
    weights: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan together with a measurement.  ``str()`` returns the report: five lines, and more lines if ``details`` is set.

    ``device_bytes``: the device memory that the plan uses for weights, in bytes.  ``weight_bytes``: the size in bytes of
    all weights in the plan.  ``host_bytes``: the size in bytes of the weights in host memory, or None if it is unknown.
    ``peak_bytes``: the peak device memory that the process has allocated, in bytes, or None if it is unknown.
    ``row_bytes``: the device memory for rows of hoisted products, in bytes.  ``moved_bytes``: the number of bytes that
    are copied to the device per step.  ``unstreamed``: the reason why no weight is streamed; empty if at least one weight
    is streamed.  ``profiled``: whether the plan was made for a profile of the machine that it ran on.  If it was not, the
    report shows no predictions.  ``calls``: the figures of each call in a cycle; empty if the plan is not for a cycle.
    ``jumps``: the number of jumps so far.  ``part``: a text that says which part of the model is explained; empty if the
    explanation is for the whole model.  ``notes``: further sentences for the details, such as the number of packed
    weights.  ``first_step``: the phases of compilation in this process (first_step.py) and their durations in seconds;
    empty if they are not known.
    """

    plan: str
    policy: str
    hardware: str
    steps: int
    cold: int
    figures: tuple[Figure, ...]
    windows: tuple[Window, ...]
    stalls: tuple[WorstStall, ...]
    limit: str
    advice: str
    faster: str
    device_bytes: int
    weight_bytes: int
    moved_bytes: int
    host_bytes: int | None = None
    peak_bytes: int | None = None
    row_bytes: int = 0
    profiled: bool = True
    unstreamed: str = ""
    details: bool = False
    calls: tuple[CallFigures, ...] = ()
    jumps: int = 0
    part: str = ""
    notes: tuple[str, ...] = ()
    first_step: tuple[tuple[str, float], ...] = ()

    @property
    def waited_s(self) -> float:
        return sum(w.exposed_s[1] for w in self.windows)

    @property
    def summary(self) -> Summary:
        """The five lines of the report."""
        step, waited_s = self.figures[0], self.waited_s
        measured = f"{seconds(step.measured)} for {step.name}{', its longest part' if self.part else ''}"
        planned = f", {seconds(step.predicted)} planned" if self.profiled else ""
        stalls = "none: compute waits for no weights"
        if waited_s > SHORT_S:
            stalls = (
                f"{seconds(waited_s)}, {100 * waited_s / (step.measured or waited_s):.0f} % of it, waiting for weights"
            )
        if self.cold > 1:  # the first call always begins cold
            stalls += f"; {self.cold} calls began cold"
        on_device = min(self.device_bytes, self.weight_bytes)  # device_bytes may be larger, because slots are aligned
        rows = f", {size(self.row_bytes)} of results of hoisted weights" if self.row_bytes else ""
        peak = "" if self.peak_bytes is None else f"; {size(self.peak_bytes)} allocated at most so far"
        host = "" if self.host_bytes is None else f"{size(self.host_bytes)} of weights; "
        return Summary(
            step=f"{measured} (median of {self.steps}{planned})",
            stalls=stalls,
            device=f"{size(on_device)} of {size(self.weight_bytes)} of weights{rows}{peak}",
            host=self.unstreamed or f"{host}{size(self.moved_bytes)} copied to the device per step",
            faster=self.faster,
        )

    def to_json(self) -> str:
        return as_json({name: value for name, value in asdict(self).items() if name != "details"})

    def __str__(self) -> str:
        return self.report(self.details)

    def report(self, details: bool = False, every_window: bool = False) -> str:
        """Return the report as text.

        ``details``: whether to add the details.  They contain a table of a few windows.  ``every_window``: whether to add the
        details with a table of all windows.
        """
        return f"{self.summary}\n\n{self._details(every_window)}" if details or every_window else str(self.summary)

    def _details(self, every_window: bool) -> str:
        one, several = ("pass", "passes") if self.calls else ("call", "calls")
        medians = f"medians of {self.steps} {one if self.steps == 1 else several}"
        warm = f"policy {self.policy}, planned for {self.hardware}; {medians}; plan {self.plan}"
        advised = self.advice if self.profiled else without_profile(self.hardware, "compile")
        sentences = [f"limited by {self.limit}", advised, *self.notes]
        if self.cold > 1:
            sentences.append(
                f"{self.cold} calls began cold, with empty slots: programs that share an arena take turns, and each "
                "change repeats the first copies; or a call failed. Give one of them an arena of its own."
            )
        parts = [prose(self.part), warm, _figure_table(self.figures, self.profiled)]
        parts += [prose(text) for text in filter(None, sentences)]
        if self.stalls:
            parts.append(f"worst stalls:\n\n{_stall_table(self.stalls, self.profiled)}")
        elif self.waited_s > SHORT_S:
            parts.append(f"compute waited {fine(self.waited_s)} for weights, nowhere longer than {fine(SHORT_S)}")
        else:
            parts.append("compute waited for no weight")
        if self.calls:
            parts.append(f"a cycle of {len(self.calls)} calls, {self.jumps} jumps so far:\n\n{calls_table(self.calls)}")
        parts.append(_windows(self.windows, every_window, self.profiled))
        if self.first_step:
            parts.append(prose(first_step_line(self.first_step)))
        return "\n\n".join(filter(None, parts))


def _figure_table(figures: Sequence[Figure], profiled: bool) -> str:
    """Return a table of figures.  ``profiled``: whether to show the predictions."""
    rows = []
    for figure in figures:
        predicted, measured = (_figure_text(v, figure.unit) for v in (figure.predicted, figure.measured))
        both = figure.predicted and figure.measured is not None
        ratio = f"{figure.measured / figure.predicted:.2f}" if both else ""  # type: ignore[operator]
        rows.append((figure.name, predicted, measured, ratio) if profiled else (figure.name, measured))
    headers = ("", "predicted", "measured", "ratio") if profiled else ("", "measured")
    return tabulate(rows, headers=headers, disable_numparse=True)


def _figure_text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return size(int(value))
    return f"{value / 1e9:.2f} GB/s" if unit == "bytes/s" else seconds(value)


def _stall_table(stalls: Sequence[WorstStall], profiled: bool) -> str:
    rows = []
    for s in stalls:
        more = f" and {len(s.weights) - 1} more" if len(s.weights) > 1 else ""
        weights = "".join(s.weights[:1]) + more
        row = (s.window, _where(s.block, s.what), seconds(s.predicted_s), seconds(s.measured_s), weights, s.why)
        rows.append(row if profiled else (*row[:2], *row[3:5]))
    if not profiled:
        return tabulate(rows, headers=("window", "region", "measured", "waits for"))
    headers = ("window", "region", "predicted", "measured", "waits for", "why")
    return fitted(rows, headers)


def _windows(windows: Sequence[Window], every: bool, profiled: bool) -> str:
    """Return a table of windows.

    ``every``: whether to list all windows.  If not, the table lists the windows that differ most from their predictions.
    ``profiled``: whether to show predictions.  Without predictions, the table lists the windows that take longest, unless
    it lists all.
    """
    title = "windows:"
    if not every and profiled:
        title = "windows that differ most from what was predicted:"
        windows = sorted(windows, key=lambda w: -abs(sum(m - p for p, m in w.parts)))[:SHOWN]
    elif not every:
        title = "windows that take longest:"
        windows = sorted(windows, key=lambda w: -sum(m for _, m in w.parts))[:SHOWN]
    rows = [(w.index, _where(w.block, w.what), *(_milliseconds(p, profiled) for p in w.parts)) for w in windows]
    headers = ("window", "region", "compute, ms", "waited, ms", "collectives, ms")
    said = "\n(predicted / measured)" if profiled else ""
    return f"{title}\n\n{tabulate(rows, headers=headers, disable_numparse=True)}{said}"


def _milliseconds(part: tuple[float, float], profiled: bool) -> str:
    predicted, measured = part
    return f"{predicted * 1e3:.2f} / {measured * 1e3:.2f}" if profiled else f"{measured * 1e3:.2f}"


def _where(block: str, what: str) -> str:
    text = region_title(block, what)
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 4]} ..."
