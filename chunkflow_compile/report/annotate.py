"""Annotations for the lines of a listing, such as the predicted time of each line and the number of copied bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chunkflow_compile.passes.cost.count import node_flops
from chunkflow_compile.passes.graph.symbolic_sizes import concrete
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan, SpanLane, WeightPlan, span_name
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.step import Copy
from chunkflow_compile.units import size

from .lines import Line
from .record import fine

# The maximum length of a reason at the end of a line, in characters.  The command ``chunkflow why`` prints the full reason.
_SAID = 48
HEADER = f"{'cost':>12} {'window':>9} {'slot':>13} {'bytes':>11}  slack or work"


@dataclass(frozen=True, kw_only=True)
class Note:
    """The annotation at the end of a line.  A field is None if it does not apply to the line.

    ``cost_s``: the duration of the computation, collective or copy in seconds.  ``window``: the number of the window that
    opens before the region, or that starts the copy.  ``slot``: the offset in the arena, in bytes, of the weight or of its
    copied part.  ``nbytes``: the number of bytes that are copied or sent, or the size of the input in bytes.  ``slack_s``:
    the seconds between the arrival of the weight and the start of its first reader.  ``late``: the word that is printed
    before a negative slack.  ``said``: the text that is printed if ``slack_s`` is None.
    """

    cost_s: float | None = None
    window: int | None = None
    slot: int | None = None
    nbytes: int | None = None
    slack_s: float | None = None
    late: str = "waits"
    said: str = ""

    def __str__(self) -> str:
        cost = "" if self.cost_s is None else fine(self.cost_s)
        window = "" if self.window is None else f"window {self.window}"
        slot = "" if self.slot is None else f"at {size(self.slot)}"
        nbytes = "" if self.nbytes is None else size(self.nbytes)
        last = self.said
        if self.slack_s is not None:
            last = f"{'slack' if self.slack_s >= 0 else self.late} {fine(abs(self.slack_s))}"
        return f"{cost:>12} {window:>9} {slot:>13} {nbytes:>11}  {last}".rstrip()


class FlopNotes:
    """Makes notes for the lines of a graph that is not cut into regions.  A note shows the FLOPs of an op.

    ``values``: the value of each symbolic size in the graph.
    """

    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = values

    def note(self, line: Line) -> Note | None:
        if line.node is None:
            return None
        read = (line.node, *line.node.all_input_nodes)
        flops = node_flops(line.node, {n: concrete(n.meta.get("val"), self.values) for n in read})
        return Note(said=_flops(flops)) if flops else None


class Annotator(FlopNotes):
    """Makes notes for the lines of a graph that is cut into regions.

    A note shows the duration of an op on ``hardware``.  If ``plan`` is given, notes also show slots and slack.
    """

    def __init__(self, problem: Problem, hardware: Hardware, plan: Plan | None, values: Mapping[str, int]) -> None:
        super().__init__(values)
        self.problem = problem
        self.plan = plan
        self.simulator = Simulator(problem, hardware, plan.chunk_bytes if plan is not None else 16 << 20)
        self.weights: dict[str, WeightPlan] = {w.name: w for w in plan.weights} if plan is not None else {}
        self.sizes = {w.name: w.nbytes for w in problem.weights}
        spans = plan.predicted.spans if plan is not None and plan.predicted is not None else ()
        self.spans = {(s.lane, s.name): s for s in spans}
        self.same = plan is None or plan.hardware == hardware.name
        self.starts = [s.start for s in spans if s.lane == "compute"]
        self.waits: dict[int, float] = {}
        for weight in self.weights.values():
            if weight.slack_s is not None and weight.slack_s < 0:
                self.waits[weight.first_use] = self.waits.get(weight.first_use, 0.0) - weight.slack_s

    def note(self, line: Line) -> Note | None:
        """Return the note for a line, or None if the line needs no note."""
        if (index := line.region) is not None:
            cost = self.problem.regions[index].cost
            seconds = self._seconds("compute", self.problem.regions[index].name, self.simulator.compute_s[index])
            return Note(cost_s=seconds, window=index, said=_flops(cost.flops))
        if (index := line.collective) is not None:
            collective = self.problem.collectives[index]
            uncontended_s = self.simulator.collective_s[index]
            seconds = self._seconds("collective", collective.name, uncontended_s)
            more = seconds - uncontended_s
            said = f"{fine(more)} of it by copies" if more > 1e-8 and self.same else ""
            return Note(cost_s=seconds, nbytes=collective.nbytes, said=said)
        if line.copy is not None:
            return self._copy(line.copy)
        if line.op == "wait":
            return self._wait(line.readable, line.barrier)
        if line.op == "evict":
            weight = self.weights.get(line.weight)
            return None if weight is None or weight.offset is None else Note(slot=weight.offset, said="free")
        if line.weight in self.sizes:
            return self._weight(line.weight)
        return super().note(line)

    def _seconds(self, lane: SpanLane, name: str, uncontended_s: float) -> float:
        """Return the duration of a span in seconds, as the plan predicts it.

        The predicted duration is for the plan's hardware, and includes the slowdown that copies and collectives cause
        each other.  ``uncontended_s``: the duration without contention, in seconds; it is returned if the plan does not
        predict the span.
        """
        span = self.spans.get((lane, name))
        return uncontended_s if span is None else span.end - span.start

    def _copy(self, copy: Copy) -> Note | None:
        weight = self.weights.get(copy.weight)
        if weight is None or weight.offset is None or self.plan is None:
            return None
        begin, end = self.plan.span(weight, copy.first, copy.end)
        alone_s = self.simulator.copy_seconds(copy.weight, copy.first, copy.end)
        return Note(
            cost_s=self._seconds(copy.stream, _copied(copy), alone_s),
            window=copy.window,
            slot=weight.offset + begin,
            nbytes=end - begin,
            slack_s=self._slack(copy, weight.first_use),
            late="late",
        )

    def _wait(self, readable: Sequence[str], barrier: bool) -> Note | None:
        """Return the note for a wait.

        The note shows the minimum slack of the awaited weights.  If compute waits for a single weight, the note also shows
        the slot of this weight.
        """
        weights = [w for name in readable if (w := self.weights.get(name)) is not None and w.offset is not None]
        if not weights:
            return None
        slot = weights[0].offset if len(weights) == 1 else None
        if barrier:
            return Note(slot=slot, said="held back until it is there")
        return Note(slot=slot, slack_s=min((w.slack_s for w in weights if w.slack_s is not None), default=None))

    def _slack(self, item: Copy, reader: int) -> float | None:
        """Return the seconds between the end of a copy and the start of the first region that reads the weight.  This region
        may be in the next step."""
        if self.plan is None or self.plan.predicted is None:
            return None
        copy = self.spans.get((item.stream, _copied(item)))
        if copy is None:
            return None
        # ``later``: whether the weight is read in the step after the step in which the copy ends
        later = item.next_step and item.window is not None and copy.end >= self.starts[item.window]
        return self.starts[reader] - self.waits.get(reader, 0.0) + later * self.plan.predicted.step_s - copy.end

    def _weight(self, name: str) -> Note:
        weight = self.weights.get(name)
        if weight is None:
            return Note(nbytes=self.sizes[name])
        said = f"device: {weight.why}" if weight.home == "device" else f"{weight.home}, {len(weight.windows)} chunks"
        return Note(
            slot=weight.offset, nbytes=weight.nbytes, said=said if len(said) <= _SAID else f"{said[: _SAID - 4]} ..."
        )


def _copied(item: Copy) -> str:
    """Return the name that a copy has in the spans of a plan."""
    return span_name(item.weight, item.first, item.end)


def _flops(flops: int) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}"
    return f"{flops} FLOP" if flops else ""
