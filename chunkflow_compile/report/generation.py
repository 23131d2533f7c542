"""A planned generation as a table, and as a picture of the device's memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tabulate import tabulate

from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.units import size

from .pictures import new_axes, save_figure
from .record import seconds

_WAY_COLOURS = ("#9aa0a6", "#f2a541", "#d64545", "#4c78a8")


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """A phase.  ``weights``, ``activations``: bytes on the device while it runs.  ``loading_s``: seconds before its first
    call, and after its last if it goes back to the host then, in which nothing computes.  ``seconds``: of one call.
    ``plan``: of its weights, None if it runs eagerly or under group offload."""

    name: str
    weights: int
    activations: int
    calls: int
    seconds: float
    loading_s: float = 0.0
    plan: Plan | None = None

    @property
    def bytes(self) -> int:
        return self.weights + self.activations

    @property
    def figures(self) -> dict[str, object]:
        """All but the plan."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}


# The phases of a generation, in one way to run it.
Generation = Sequence[PhaseMemory]


def generation_tables(generations: Mapping[str, Generation], step: int) -> str:
    """A line for each way to run it, and for each phase of ours.  ``step``: calls of a transformer in a step."""
    ways = []
    for way, phases in generations.items():
        worst = max(phases, key=lambda p: p.bytes)
        step_s = max(step * p.seconds for p in phases if p.name.startswith("transformer"))  # the slowest of the experts
        total_s = sum(p.loading_s + p.calls * p.seconds for p in phases)
        ways.append((way, size(worst.bytes), worst.name, f"{step_s:.2f} s", f"{total_s:.1f} s"))
    mine = [
        (p.name, p.calls, size(p.weights), size(p.activations), size(p.bytes), seconds(p.seconds))
        for p in generations["chunkflow"]
    ]
    head = ("", "most on the device", "in", "a step", "a generation")
    ours = ("chunkflow", "calls", "weights on device", "activations", "both", "a call")
    return f"{tabulate(ways, headers=head, disable_numparse=True)}\n\n{tabulate(mine, headers=ours, disable_numparse=True)}"


def draw_generation(generations: Mapping[str, Generation], memory: int, title: str, path: Path) -> None:
    """Draw bytes on the device over the seconds of one generation, a line for each way, and the budget."""
    figure, axes = new_axes(8.0, 4.2)
    for (way, phases), colour in zip(generations.items(), _WAY_COLOURS, strict=True):
        at, times, heights = 0.0, list[float](), list[float]()
        for phase in phases:
            end = at + phase.loading_s + phase.calls * phase.seconds
            times += [at, end]
            heights += [phase.bytes / 2**30] * 2
            at = end
        axes.plot(times, heights, color=colour, label=way, linewidth=2.2 if way == "chunkflow" else 1.4)
    budget = memory / 2**30
    axes.axhline(budget, linestyle=":", color="black")
    axes.annotate(f"budget {budget:.0f} GiB", (0, budget), va="bottom", fontsize=8)
    axes.set(xlabel="seconds of one generation (planned)", ylabel="weights and activations on the device, GiB")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path)
