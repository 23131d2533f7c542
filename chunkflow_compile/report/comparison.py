"""Compare a measurement with its plan, and find out what limits a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.runtime.measurement import Measured

from .explanation import SHORT_S, SHOWN, Explanation, Figure, Window, WorstStall
from .lanes import HELD, Lanes, lanes_of
from .record import is_far, profile_does_not_fit, seconds
from .summary import NOTABLE, advice


def explain_plan(
    plan: Plan, measured: Measured, what: str = "a call of the model", profiled: bool = True
) -> Explanation:
    """Compare a measurement with its plan.

    ``what``: a noun phrase for the thing that was measured.  ``profiled``: whether the plan was made for a profile of the
    machine that it ran on.
    Raises ChunkflowError if the measurement is not a measurement of this plan.
    """
    if measured.plan != plan.digest:
        raise ChunkflowError(
            f"The measurement is of plan {measured.plan}, but this plan is {plan.digest}. Use the plan that ran."
        )
    if any(len(column) != len(plan.regions) for column in measured.windows):
        raise ChunkflowError(
            "The measurement and its plan have different windows: the file was edited or cut off. Measure again."
        )
    predicted = plan.predicted
    if predicted is None:
        raise ChunkflowError("The plan has no prediction to compare with. Write one with chunkflow plan --json.")
    lanes = lanes_of(plan)
    windows = tuple(_compare(plan, lanes, measured))
    rate = plan.moved_bytes / predicted.copy_s if predicted.copy_s else None
    reached = measured.moved_bytes / measured.copy_s if measured.copy_s else None
    weight_bytes = sum(weight.nbytes for weight in plan.weights)
    figures: tuple[Figure, ...] = (
        Figure(what, predicted.step_s, measured.step_s),
        Figure("compute", predicted.compute_s, measured.compute_s),
        Figure("waiting for weights", predicted.exposed_s, measured.exposed_s),
        Figure("collectives", predicted.collective_s, measured.collective_s),
        Figure("host, and the rest", 0.0, _rest(measured)),
        Figure("copies (concurrent)", predicted.copy_s, measured.copy_s),
        Figure("copied", plan.moved_bytes, measured.moved_bytes, "bytes"),
        Figure("rate of copies", rate, reached, "bytes/s"),
    )
    if plan.drive_rate is not None:
        figures += (Figure("rate of the drive", plan.drive_rate, measured.drive_rate, "bytes/s"),)
    return Explanation(
        plan=plan.digest,
        policy=plan.policy,
        hardware=plan.hardware,
        steps=measured.steps,
        cold=measured.cold,
        figures=figures,
        windows=windows,
        stalls=tuple(_worst(plan, lanes, windows)),
        limit=_longest_part(measured),
        advice=_worst_prediction(figures, plan.hardware),
        faster=advice(
            step_s=measured.step_s,
            waited_s=measured.exposed_s,
            host_s=_rest(measured),
            collective_s=measured.collective_s,
            moved_bytes=measured.moved_bytes,
            budget=plan.device_bytes,
            weight_bytes=weight_bytes,
        ),
        device_bytes=plan.device_bytes,
        weight_bytes=weight_bytes,
        moved_bytes=measured.moved_bytes,
        profiled=profiled,
    )


def _rest(measured: Measured) -> float:
    """Return the seconds of a step that were not spent on compute, on waiting for weights or on collectives.

    If the medians of these parts add up to more than the median step, the result is 0.
    """
    return max(0.0, measured.step_s - measured.compute_s - measured.exposed_s - measured.collective_s)


def _window_after(starts: Sequence[float], time: float) -> int:
    """Return the index of the first window whose region starts at or after ``time``.  If there is no such window, return
    the index of the last window."""
    return min(bisect_left(starts, time), len(starts) - 1)


def _compare(plan: Plan, lanes: Lanes, measured: Measured) -> Iterator[Window]:
    compute = lanes.lane("compute")
    starts = [b.start for b in compute]
    exposed, collective = [0.0] * len(compute), [0.0] * len(compute)
    for stall in lanes.stalls:
        exposed[_window_after(starts, stall.end - 1e-8)] += stall.end - stall.start
    for bar in lanes.lane("collective"):
        collective[_window_after(starts, bar.end - 1e-8)] += bar.end - bar.start
    for k, region in enumerate(plan.regions):
        yield Window(
            index=k,
            block=region.block,
            what=region.what,
            compute_s=(compute[k].end - compute[k].start, measured.windows.compute_s[k]),
            exposed_s=(exposed[k], measured.windows.exposed_s[k]),
            collective_s=(collective[k], measured.windows.collective_s[k]),
        )


def _worst(plan: Plan, lanes: Lanes, windows: Sequence[Window]) -> Iterator[WorstStall]:
    """Yield the longest measured stalls, at most ``SHOWN``, except stalls that a table would show as 0.0 ms."""
    arrivals: dict[int, list[tuple[float, str, str]]] = {}
    for weight in plan.streamed:
        slack = weight.slack_s if weight.slack_s is not None else 0.0
        arrivals.setdefault(weight.first_use, []).append((slack, weight.name, weight.why))
    held = _weights_held(plan, lanes)
    for window in sorted(windows, key=lambda w: -w.exposed_s[1])[:SHOWN]:
        weights = sorted(arrivals.get(window.index, ()))
        if window.exposed_s[1] < SHORT_S:
            continue
        names, why = tuple(name for _, name, _ in weights), weights[0][2] if weights else ""
        if (not weights or weights[0][0] >= 0) and window.index in held:
            names, why = held[window.index], f"a collective is {HELD}"
        elif weights and weights[0][0] >= 0:
            spare = seconds(weights[0][0])
            why = f"planned with {spare} to spare; the copies or what they wait for came later than predicted"
        yield WorstStall(
            window=window.index,
            block=window.block,
            what=window.what,
            predicted_s=window.exposed_s[0],
            measured_s=window.exposed_s[1],
            weights=names,
            why=why,
        )


def _weights_held(plan: Plan, lanes: Lanes) -> dict[int, tuple[str, ...]]:
    """Return, for each window with a barrier before a collective, the weights that the barrier waits for."""
    starts = [b.start for b in lanes.lane("compute")]
    barriers = {b.collective: b.weights for b in plan.barriers}
    held: dict[int, tuple[str, ...]] = {}
    for bar in lanes.lane("collective"):
        if bar.name in barriers:
            index = _window_after(starts, bar.start)
            held[index] = (*held.get(index, ()), *barriers[bar.name])
    return held


def _longest_part(measured: Measured) -> str:
    """Return a sentence on the longest part of the step and on how well copies overlap with compute."""
    parts = {
        "compute": measured.compute_s,
        "the link: compute waits for weights": measured.exposed_s,
        "collectives": measured.collective_s,
        "the host, which issues regions and copies": _rest(measured),
    }
    name = max(parts, key=parts.__getitem__)
    step = measured.step_s or 1.0
    text = f"{name}, {100 * parts[name] / step:.0f} % of the step"
    waits = measured.exposed_s / step
    if parts[name] != measured.exposed_s:
        if not measured.moved_bytes:
            return f"{text}; nothing is copied"
        hidden = "the copies are hidden" if waits < NOTABLE else f"compute waits {100 * waits:.0f} % of it for weights"
        text += f"; {hidden}, and the link is busy {100 * min(1.0, measured.copy_s / step):.0f} % of it"
    return text


def _worst_prediction(figures: Sequence[Figure], hardware: str) -> str:
    """Return a sentence that names the figure with the largest prediction error and gives advice.

    The sentence is empty if the step time is close to its prediction.
    """
    step, *parts = figures[:5]
    if not step.predicted or step.measured is None or not is_far(step.predicted, step.measured):
        return ""
    off = {f.name: (f.measured or 0.0) - (f.predicted or 0.0) for f in parts}
    name = max(off, key=lambda n: abs(off[n]))
    return (
        f"{step.name} takes {step.measured / step.predicted:.2f} times what was predicted, most of it {name} "
        f"({off[name] * 1e3:+.1f} ms): {profile_does_not_fit(repr(hardware), 'compile')}"
    )
