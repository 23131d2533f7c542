"""The report on a compiled pipeline: device memory and call times of each component."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from chunkflow_compile.units import size

from .record import is_far, profile_does_not_fit, prose, seconds, tiling_sentence, without_profile
from .summary import Summary, advice


@dataclass(frozen=True, kw_only=True)
class PhaseFigures:
    """The figures of one component.  A figure is None if it is unknown.

    ``weights``: the size of the component's weights in bytes.  ``streamed``: the size of the streamed weights in bytes.
    ``on_device``: the size in bytes of the weights that are on the device now.  ``activations``: the maximum number of bytes
    that calls used in addition to all weights; None if they cannot be measured or if there was no call yet.
    ``predicted_s``: the predicted seconds per call, from a plan for ``hardware``.  ``measured_s``: the measured seconds per
    call.  ``stalled_s``: the seconds per call in which compute waited for weights.  ``moved``: the number of bytes copied to
    the device per call.  ``retries``: the number of calls that ran out of memory and were retried.
    ``notes``: sentences about the compiled code.  ``profiled``: whether ``hardware`` is a profile of this machine.
    ``unstreamed``: the reason why no weight is streamed; empty if at least one weight is streamed.  ``tileable``: whether
    ``enable_tiling`` would reduce the memory of calls.
    """

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
    stalled_s: float | None = None
    moved: int = 0
    hardware: str | None = None
    profiled: bool = True
    unstreamed: str = ""
    notes: tuple[str, ...] = ()
    tileable: bool = False

    @property
    def shown_s(self) -> float | None:
        """The predicted seconds per call; None if the prediction is not for this machine."""
        return self.predicted_s if self.profiled else None

    def __str__(self) -> str:
        """Return one line for the log."""
        streams = self.unstreamed or f"{size(self.streamed)} of {size(self.weights)} of weights stream from host memory"
        what = "its first call compiles it"
        if self.calls:
            what = f"{self.calls} call{'s' * (self.calls > 1)}, {seconds(self.measured_s)} each"
        return f"pipe.{self.name} ({self.model}): {streams}; {what}"


@dataclass(frozen=True)
class PipelineFigures:
    """The figures of a pipeline.  ``str()`` returns five lines, and also a table if ``details`` is set.

    ``phases``: the figures of each component.  ``total``: the budget in bytes.  ``most``: the peak number of bytes that the
    process has allocated on the device during a call, or None if it is not measured.
    """

    phases: tuple[PhaseFigures, ...]
    total: int
    most: int | None = None
    details: bool = False

    def __str__(self) -> str:
        return f"{self.summary}\n\n{self._details()}" if self.details else str(self.summary)

    @property
    def summary(self) -> Summary:
        """The five lines of the report.

        The line "step" begins with the time per call of the compiled component whose calls take longest in total.  The times
        per call of the other components follow.
        """
        weights, streamed, now = (sum(getattr(p, n) for p in self.phases) for n in ("weights", "streamed", "on_device"))
        step, stalls, faster = "no component was called yet", "not known yet", "not known yet"
        called = [p for p in self.phases if p.calls and p.measured_s]
        called.sort(key=lambda p: (p.stalled_s is None, -p.calls * (p.measured_s or 0.0)))
        for first in called[:1]:
            step = "; ".join([_step(first), *(f"{p.name} {seconds(p.measured_s)}" for p in called[1:])])
            if first.stalled_s is not None and first.measured_s:
                share = 100 * first.stalled_s / first.measured_s
                stalls = f"{seconds(first.stalled_s)}, {share:.0f} % of it, waiting for weights"
                faster = advice(
                    step_s=first.measured_s,
                    waited_s=first.stalled_s,
                    moved_bytes=first.moved,
                    budget=self.total,
                    weight_bytes=weights,
                )
        if failed := [p.name for p in self.phases if p.retries]:
            faster = f"more memory: {', '.join(failed)} ran out of {size(self.total)}, and a call ran twice"
        taken = f"{size(now)} of weights now" if self.most is None else f"{size(self.most)} at most"
        host = f"{size(streamed)} of {size(weights)} of weights stream from it"
        if not streamed:
            largest = max((p for p in self.phases if p.unstreamed), key=lambda p: p.weights, default=None)
            host = host if largest is None else f"{largest.unstreamed}, in {largest.name}"
        device = f"{taken}, within a budget of {size(self.total)} for weights and activations"
        return Summary(step=step, stalls=stalls, device=device, host=host, faster=faster)

    def _details(self) -> str:
        phases = self.phases
        columns = {
            "component": [*(p.name for p in phases), "all"],
            "model": [p.model for p in phases],
            "weights": _with_sum([p.weights for p in phases]),
            "streamed": _with_sum([p.streamed for p in phases]),
            "on device": _with_sum([p.on_device for p in phases]),
            "activations": [size(p.activations) for p in phases] if any(p.activations for p in phases) else None,
            "calls": [p.calls for p in phases],
            "predicted": [seconds(p.shown_s) for p in phases] if any(p.shown_s for p in phases) else None,
            "measured": [seconds(p.measured_s) for p in phases],
        }
        shown = {name: cells for name, cells in columns.items() if cells is not None}
        lines = [tabulate(shown, headers="keys", disable_numparse=True)]
        if not any(p.calls for p in self.phases):
            lines.append(
                "The first call of each component compiles and measures it; its plan is made for the rest of the budget."
            )
        if far := dict.fromkeys(p.hardware for p in phases if is_far(p.shown_s, p.measured_s)):
            fix = profile_does_not_fit(", ".join(map(repr, far)), "compile")
            lines.append(prose(f"Some calls take far from what was predicted: {fix}."))
        unknown = dict.fromkeys(p.hardware for p in phases if p.hardware is not None and not p.profiled)
        lines += [prose(without_profile(hardware, "compile")) for hardware in unknown]
        for p in (p for p in phases if p.retries):
            times = "once" if p.retries == 1 else f"{p.retries} times"
            lines.append(f"{p.name} ran out of memory {times}; weights gave way.")
        lines += [prose(f"{p.name}: {note}") for p in self.phases for note in p.notes]
        worst = max(phases, key=lambda p: p.activations or 0)
        if worst.activations and worst.tileable:
            lines.append(prose(tiling_sentence(worst.name)))
        return "\n".join(lines)


def _step(phase: PhaseFigures) -> str:
    calls = f"{phase.calls} call{'s' * (phase.calls > 1)}"
    planned = f", {seconds(phase.shown_s)} planned" if phase.shown_s is not None else ""
    return f"{seconds(phase.measured_s)} for a call of {phase.name} ({calls}{planned})"


def _with_sum(nbytes: list[int]) -> list[str]:
    return [*map(size, nbytes), size(sum(nbytes))]
