"""The components of a pipeline: what each has on the device, and how long its calls take."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill

from tabulate import tabulate

from chunkflow_compile.units import size

from .record import PROSE_WIDTH, is_far, profile_does_not_fit, seconds


@dataclass(frozen=True, kw_only=True)
class PhaseFigures:
    """One component.  Bytes of its ``weights``, of those ``streamed``, of those ``on_device`` now, and most bytes that its
    calls took beside all weights, ``activations`` (None if they are not counted, or were not yet).  ``predicted_s``: seconds
    of a call, by its plan for ``hardware``.  ``measured_s``: median seconds of its calls, from beginning to return.
    ``retries``: calls that ran out of memory and ran again.  ``notes``: on what was compiled.  None where a figure is not
    known."""

    name: str
    model: str
    weights: int
    streamed: int
    on_device: int
    activations: int | None
    calls: int
    predicted_s: float | None
    measured_s: float | None
    retries: int
    hardware: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PipelineFigures:
    """The components of a pipeline, and the bytes of their budget.  ``most``: bytes that the device held in a call, all of
    the process together; None if nothing counts them.  As text, a table."""

    phases: tuple[PhaseFigures, ...]
    total: int
    most: int | None = None

    def __str__(self) -> str:
        phases = self.phases
        columns = {
            "component": [*(p.name for p in phases), "all"],
            "model": [p.model for p in phases],
            "weights": _with_sum([p.weights for p in phases]),
            "streamed": _with_sum([p.streamed for p in phases]),
            "on device": _with_sum([p.on_device for p in phases]),
            "activations": [size(p.activations) for p in phases] if any(p.activations for p in phases) else None,
            "calls": [p.calls for p in phases],
            "predicted": [seconds(p.predicted_s) for p in phases],
            "measured": [seconds(p.measured_s) for p in phases],
        }
        shown = {name: cells for name, cells in columns.items() if cells is not None}
        lines = [tabulate(shown, headers="keys", disable_numparse=True)]
        most = f"; most at once so far: {size(self.most)}" if self.most is not None else ""
        lines.append(f"budget: {size(self.total)} on the device, weights and activations together{most}")
        if not any(p.calls for p in self.phases):
            lines.append(
                "The first call of each component compiles and measures it; its plan is made for the rest of the budget. "
                "The predicted times follow after the first generation."
            )
        if far := dict.fromkeys(p.hardware for p in phases if is_far(p.predicted_s, p.measured_s)):
            fix = profile_does_not_fit(", ".join(map(repr, far)), "apply")
            lines.append(fill(f"Some calls take far from what was predicted: {fix}.", PROSE_WIDTH))
        for p in (p for p in phases if p.retries):
            times = "once" if p.retries == 1 else f"{p.retries} times"
            lines.append(f"{p.name} ran out of memory {times}; weights gave way.")
        lines += [fill(f"{p.name}: {note}", PROSE_WIDTH) for p in self.phases for note in p.notes]
        return "\n".join(lines)


def _with_sum(nbytes: list[int]) -> list[str]:
    return [*map(size, nbytes), size(sum(nbytes))]
