"""Show a planned generation as tables, and as a picture of device memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.units import size

from .pictures import new_axes, save_figure
from .record import fitted, prose, seconds, tiling_sentence

_WAY_COLOURS = ("#9aa0a6", "#f2a541", "#d64545", "#4c78a8")
# Labels for methods whose names are unclear.
_LABELS = {"plain": "torch.compile alone, all on the GPU"}


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """A phase of a generation: all calls of one component.

    ``weights``, ``activations``: the bytes of weights and of activations on the device while the phase runs.  ``calls``:
    the number of calls.  ``seconds``: the duration of one call in seconds.  ``loading_s``: the seconds of work that does
    not overlap with any call: weights are copied before the first call, rows of hoisted products are computed, and with
    model offload, the weights are copied back to the host after the last call.  ``host``: the bytes of the
    component's weights in host memory during the generation.  ``plan``: the plan for the weights, or None if the phase
    runs eagerly or with group offload.  ``tileable``: whether ``enable_tiling`` would reduce the memory of the phase.
    ``notes``: sentences about the compiled code.
    """

    name: str
    weights: int
    activations: int
    calls: int
    seconds: float
    loading_s: float = 0.0
    host: int = 0
    plan: Plan | None = None
    tileable: bool = False
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return self.weights + self.activations

    @property
    def figures(self) -> dict[str, object]:
        """All fields except ``plan``, ``tileable`` and ``notes``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("plan", "tileable", "notes")}


# The phases of a generation that runs with one method, such as group offload.
Generation = Sequence[PhaseMemory]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The device memory that a generation may use.

    ``budget``: the budget that the user has set, in bytes; None if the user has set no budget.  In this case, ``card_bytes``
    is the limit.  ``card``: the name of the GPU.  ``card_bytes``: the memory of this GPU according to its data sheet; 0 if it
    is unknown.
    """

    budget: int | None
    card: str
    card_bytes: int

    @property
    def nbytes(self) -> int:
        return self.card_bytes if self.budget is None else self.budget

    def __str__(self) -> str:
        what = f"the memory of {self.card}" if self.budget is None else "the budget"
        return f"{what}, {size(self.nbytes)}"


def _peak(phases: Generation) -> PhaseMemory:
    return max(phases, key=lambda p: p.bytes)


def _seconds(phases: Generation) -> tuple[float, float]:
    """Return the seconds per forward of the transformer, and the seconds per generation.

    If there are several transformers, the first value is for the slowest of them.
    """
    forward_s = max(p.seconds for p in phases if p.name.startswith("transformer"))
    return forward_s, sum(p.loading_s + p.calls * p.seconds for p in phases)


def generation_answer(generations: Mapping[str, Generation], limits: Limits) -> str:
    """Return a sentence that compares two generations: one with the method "chunkflow", and one with all weights on the
    GPU."""
    mine, plain = generations["chunkflow"], generations["plain"]
    (forward_s, total_s), (plain_s, plain_total_s) = _seconds(mine), _seconds(plain)
    text = (
        f"{total_s:.1f} s per generation, {forward_s:.2f} s per forward, {forward_s / plain_s:.3f} times all-resident; peak "
        f"{size(_peak(mine).bytes)} of GPU memory; all on the GPU: {plain_total_s:.1f} s in {size(_peak(plain).bytes)}"
    )
    if 0 < limits.nbytes < _peak(plain).bytes:
        text += f", which does not fit {limits}"
    return text


def generation_tables(generations: Mapping[str, Generation], limits: Limits) -> str:
    """Return two tables.  The first has one row per method.  The second has one row per phase with the method "chunkflow".

    The text below the first table says which limit the column "fits" refers to.
    """
    head = ["", "peak GPU memory", "component at the peak", "host memory", "per forward", "per generation"]
    ways = []
    for way, phases in generations.items():
        worst, (forward_s, total_s) = _peak(phases), _seconds(phases)
        host = size(sum(p.host for p in phases) or None)
        ways.append(
            [_LABELS.get(way, way), size(worst.bytes), worst.name, host, f"{forward_s:.2f} s", f"{total_s:.1f} s"]
        )
        if limits.nbytes:
            ways[-1].append("yes" if worst.bytes <= limits.nbytes else "NO")
    mine = [
        (p.name, p.calls, size(p.weights), size(p.activations), size(p.bytes), seconds(p.seconds))
        for p in generations["chunkflow"]
    ]
    ours = ("chunkflow", "calls", "weights on the GPU", "activations", "together", "per call")
    said = f"\n\nfits: compared with {limits}" if limits.nbytes else ""
    sentences = [f"{p.name}: {note}" for p in generations["chunkflow"] for note in p.notes]
    if (worst := max(generations["chunkflow"], key=lambda p: p.activations)).tileable:
        sentences.append(tiling_sentence(worst.name))
    notes = "".join(f"\n\n{prose(text)}" for text in sentences)
    return f"{fitted(ways, head + ['fits'] * bool(limits.nbytes))}{said}\n\n{fitted(mine, ours)}{notes}"


def draw_generation(
    generations: Mapping[str, Generation], budget: int, hardware: Hardware, title: str, path: Path
) -> None:
    """Draw the device memory of each method over the time of one generation.

    Horizontal lines show the budget and the memory of the GPU.
    """
    figure, axes = new_axes(8.0, 4.2)
    for (way, phases), colour in zip(generations.items(), _WAY_COLOURS, strict=True):
        at, times, heights = 0.0, list[float](), list[float]()
        for phase in phases:
            end = at + phase.loading_s + phase.calls * phase.seconds
            times += [at, end]
            heights += [phase.bytes / 2**30] * 2
            at = end
        axes.plot(
            times, heights, color=colour, label=_LABELS.get(way, way), linewidth=2.2 if way == "chunkflow" else 1.4
        )
    lines = [(f"budget {size(budget)}", budget, ":")]
    if hardware.memory_bytes:
        lines.append(
            (f"memory of {hardware.name}, {hardware.memory_bytes / 2**30:.0f} GiB", hardware.memory_bytes, "--")
        )
    for text, nbytes, style in lines:
        axes.axhline(nbytes / 2**30, linestyle=style, color="black", linewidth=1.0)
        where = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "textcoords": "offset points"}
        axes.annotate(text, (0.995, nbytes / 2**30), ha="right", va="bottom", fontsize=8, **where)
    axes.set(xlabel="seconds of one generation (planned)", ylabel="weights and activations on the GPU, GiB")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path)
