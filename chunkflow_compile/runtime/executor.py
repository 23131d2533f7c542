"""The executor: issues the nodes of a program, in program order, to the streams of a device.

Only these events order the streams.  The first two are in the program, as arguments of its nodes:

* the opening of a window, recorded on the compute stream after the last reader of the bytes that its chunks overwrite
  (``verify`` proves that); the chunks wait for it;
* the arrival of a region's weights, recorded in a lane after the newest chunk issued for any of them; the region waits
  for it;
* the handover of the arena, recorded on the compute stream after whatever ran in the arena before; the first copies of
  a cold start or a jump wait for it; if a jump leads between the wait for a weight and its last reader, compute waits for
  these copies;
* the start and the end of a collective, if collectives have a stream of their own: the collective waits for its start,
  recorded on the compute stream, and compute waits for its end where the program awaits the collective.

A value is dropped on the compute stream where the program says so (``Program.releases``).  ``verify`` proves that no
later op reads it, and that compute has waited for every collective that uses it.

instructions.py makes the function that issues a node; this file runs them, and begins a cold start or a jump.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import MOVES
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.cycle import Cycle, border
from chunkflow_compile.passes.program.reads import reads_from
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.weights.source import Source

from .arena import Binding
from .capture import record
from .cuda_graphs import CaptureLog, CudaGraph
from .instructions import Cost, Issue, OnDevice, Step, fetched, instructions, prefetch, reading
from .measurement import StepMeasurement, no_seconds
from .read_ahead import ReadOrder


@dataclass(frozen=True)
class _Start:
    """What is copied first: ``kept`` chunks as weight, slot bytes and host bytes, then ``prefetches`` by their weights.

    ``waits``: whether compute waits for all of it.  ``order``: in which the drive is read from here on, None to read on.
    """

    kept: Sequence[tuple[str, torch.Tensor, Source]]
    prefetches: Sequence[tuple[str, Issue]]
    waits: bool
    order: ReadOrder | None = None


class Executor(OnDevice):
    """Runs a program on a device, one step at a time.  Not thread-safe: the caller holds the lock of the arena.

    ``rewritten``: weights that were written since they were copied, with the versions of their values.  ``cost``: of the
    newest step.  ``captures``: that of its call if it is to be a CUDA graph, None if not.
    """

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        binding: Binding,
        poison: bool = False,
        cycle: Cycle | None = None,
        file: Callable[[StepMeasurement], None] | None = None,
        versions: Callable[[], dict[str, int]] = dict,
        captures: CaptureLog | None = None,
    ) -> None:
        """See :class:`OnDevice`.  ``file``: takes the measurement of each step.  ``versions``: returns those of the values of
        all weights of the cycle."""
        super().__init__(program, regions, binding, poison, cycle or Cycle.of(program))
        self.call = next(i for i, call in enumerate(self.cycle.calls) if call is program)
        device = self.device
        self.handover, self.primed = device.event(), [device.event() for _ in MOVES]
        self.rewritten: dict[str, int] = {}
        self.cost = Cost()
        self.captures = captures
        self._graph: CudaGraph | None = None
        self._file = file
        self._versions = versions
        self._next = (self.call + 1) % len(self.cycle.calls)
        self._plan = self.cycle.plan.digest
        self._steps = 0
        self._measured = True  # whether the step before was, or there was none
        self._windows = len(program.problem.regions)
        self._streams = bool(program.plan.streamed)
        names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
        placeholders = [names.get(n.name) for n in self.number if n.op == "placeholder"]
        # the positions of weights whose readers get a slot or a resident copy instead of the parameter
        self._values = [
            (i, binding.values[w]) for i, w in enumerate(placeholders) if w is not None and w in binding.values
        ]
        self._start: _Start | None = None
        self._later: list[Any] = [None] * (len(self.number) - len(placeholders))
        self.instructions = list(instructions(self))

    def run(self, args: Sequence[Any], timed: bool = False) -> Any:
        """Run one step on the inputs of the traced graph; return its outputs.

        ``timed``: whether a plan is to be made from the times of the steps.
        Raises ChunkflowError if a copy or a collective fails; the next call then starts cold.
        """
        try:
            step = self.enqueue(args, timed)
            self.device.deliver()
        except BaseException:
            self.forget()
            raise
        return step.outputs

    def copy_again(self, versions: Mapping[str, int]) -> None:
        """Let the next step copy these weights again, unless the memory has values of these versions."""
        self.rewritten |= versions

    def enqueue(self, args: Sequence[Any], timed: bool = False) -> Step:
        """Issue one step.  Its outputs are valid after the device has delivered; more steps may be issued before.

        ``timed``: as in :meth:`run`.
        """
        env = [*args, *self._later]
        for position, value in self._values:
            env[position] = value
        state = self.state
        jumps = state.next_call != self.call
        begins = self.call == 0 or jumps  # a pass
        requested = self.device.measuring if begins else state.measurement_requested
        graph = self._recorded(env, requested or timed)
        if begins:
            state.begin_pass(graph is None and self.device.choose(self._steps, timed), requested)
        begun = self.device.start(graph.timed if graph is not None else state.measured, self._measured)
        self._measured = begun is not None and graph is None
        step = Step(env, Cost(no_seconds(self._windows) if self._measured else None), self._steps)
        self.cost = step.cost
        self._steps += 1
        if self._streams:  # else it leaves the arena to the others
            if self.binding.arena.holder is not state:
                self._start_cold(step)
            elif jumps:
                self._jump(step)
            elif self.rewritten:
                self._copy_rewritten(step)
        state.begin_call()
        if graph is not None:
            env[-1] = graph.launch(env)
            step.cost.add_copies(graph.moved_bytes)
        else:
            begin_s = self.device.clock.now()
            for issue in self.instructions:
                issue(step)
            step.cost.end_issue(self.device.clock.now() - begin_s)
        number = state.end_call(self._next)
        # not the step: its values would live too long
        over = partial(self._finish, step.cost, number) if graph is None else graph.ended
        self.device.finish(begun, over)
        return step

    def _recorded(self, env: Sequence[Any], measured: bool) -> CudaGraph | None:
        """The CUDA graph of the call on these inputs, recorded now if it is time; None to issue its instructions.

        ``measured``: whether the times of its parts are needed, which a launch does not have.
        """
        if (log := self.captures) is None:
            return None
        if log.why_not:
            self._drop_graph(log.why_not)
            return None
        if self._graph is not None:
            why = "a pass is measured" if measured else self._graph.misfit(env)
            if not why:
                self.binding.arena.graphs.launched(self._graph)
                return self._graph
            self._drop_graph(why)
        if measured or not log.due:
            log.count_pass()
            return None
        self._graph = record(self, env, log)
        return self._graph

    def _drop_graph(self, why: str) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.drop(why)

    def _start_cold(self, step: Step) -> None:
        """Take over the arena: copy the chunks that stay, and those that are on their way or in use here in a pass."""
        self._copy_first(step, self._at_border(), self._versions())

    def _jump(self, step: Step) -> None:
        """Go on from this call of the cycle: as in a cold start, but chunks that stay are there, unless they are stale."""
        start, stale = self._at_border(), self._stale()
        kept = [copy for copy in start.kept if copy[0] in stale]
        self._copy_first(step, replace(start, kept=kept, waits=start.waits or bool(stale)), self._newest())

    def _copy_rewritten(self, step: Step) -> None:
        """Copy the chunks again that are stale.  Compute waits for them: the mark that a reader awaits may be that of another
        copy."""
        if stale := self._stale():
            start = self._at_border()
            kept = [copy for copy in start.kept if copy[0] in stale]
            prefetches = [prefetch for prefetch in start.prefetches if prefetch[0] in stale]
            self._copy_first(step, _Start(kept, prefetches, waits=True), self._newest())
        self.rewritten = {}

    def _stale(self) -> set[str]:
        """The weights whose values in the memory are not the newest."""
        return {name for name, version in self.rewritten.items() if self.state.versions.get(name) != version}

    def _newest(self) -> dict[str, int]:
        return {**self.state.versions, **self.rewritten}

    def _copy_first(self, step: Step, start: _Start, versions: dict[str, int]) -> None:
        """Copy into the arena before the step.  ``versions``: of the values that are there then."""
        device, arena = self.device, self.binding.arena
        arena.begin_filling()
        if device.pull is not None:  # nothing else orders what one lane has in flight before the copies of the other
            device.await_lanes(self.primed)
        device.compute.record(self.handover)
        for lane in device.lanes:
            lane.wait(self.handover)
        if start.order is not None and start.order.repeated:
            device.copy.run(partial(arena.reader.reset, start.order, self.cycle.plan.drive_rate))
        for weight, target, source in start.kept:
            moves = self.cycle.plan.lane(weight)
            self.copy(step, [(target, source, f"keep {weight}")], moves)
            for event in self.cycle.kept_events.get(weight, ()):
                self.arrived(event, moves)
            step.cost.add_copies(source.numel())
        for _, issue in start.prefetches:
            issue(step)
        if start.waits:
            device.await_lanes(self.primed)
        arena.hold(self.state)
        self.state.fill(versions)
        self.rewritten = {}
        step.cost.end_priming()

    def _finish(self, cost: Cost, number: int, begin: float, end: float, whole: bool) -> None:
        idle_s = self.state.idle_before(number, begin, end)
        copied, windows = self.traffic.settle(end), cost.windows
        read_s, read_bytes = self.binding.arena.reader.settle() if self.on_drive else (0.0, 0)
        if not whole or windows is None or self._file is None:
            return
        if self.captures is not None and end > begin:
            self.captures.shares.append(cost.issue_s / (end - begin))
        self._file(
            StepMeasurement(
                step_s=end - begin,
                exposed_h2d_s=sum(windows.exposed_s),
                collective_s=sum(windows.collective_s),
                copy_s=copied.seconds,
                alone_s=copied.alone_s,
                alone_bytes=copied.alone_bytes,
                collectives=cost.collectives,
                moved_bytes=cost.moved,
                pulled_bytes=cost.pulled,
                primed_bytes=cost.primed,
                windows=windows,
                read_s=read_s,
                read_bytes=read_bytes,
                idle_s=idle_s,
                plan=self._plan,
                begin_s=begin,
            )
        )

    def forget(self) -> None:
        """Wait for work in flight and discard the chunks in the arena: the next step starts cold."""
        holds = self.binding.arena.discard(self.state)
        for stream in (self.device.compute, self.device.collective, *self.device.lanes):
            with contextlib.suppress(ChunkflowError):  # raised already where the failed work was awaited
                stream.synchronize()
        with contextlib.suppress(ChunkflowError):
            self._drop_graph("its memory was given up, or a call failed")
        with contextlib.suppress(ChunkflowError):
            self.device.collect(True)
        if self.on_drive and holds:
            self.binding.arena.reader.stop()
        self.traffic.forget()

    def vacate(self) -> None:
        """Drop every reference to the memory, with no work in flight (:meth:`forget`).  The executor cannot run again."""
        self.instructions, self._values, self._start = [], [], None
        self.binding = Binding(self.binding.arena, {}, {}, {})

    def _at_border(self) -> _Start:
        """What a cold start here copies, made when it is first needed: few calls of a cycle ever begin one."""
        if self._start is None:
            here = border(self.cycle, self.call)
            prefetches = [(p.copy.weight, fetched(self, [prefetch(self, p)])) for p in here.prefetches]
            reads = reads_from(self.cycle, self.call, self.on_drive)
            first, repeated = ([reading(self, op).source for op in ops] for ops in (reads.first, reads.repeated))
            self._start = _Start(list(self._kept()), prefetches, here.waits, ReadOrder(first, repeated, reads.begin))
        return self._start

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, Source]]:
        """Weight, slot bytes and host bytes of the chunks that stay in their slots until the arena is handed over."""
        plan = self.program.plan
        for weight in plan.streamed:
            for run in runs(weight.windows):
                if run.window is None:
                    begin, end = plan.span(weight, run.first, run.end)
                    slot, host = self.binding.slots[weight.name], self.binding.hosts[weight.name]
                    yield weight.name, slot[begin:end], host[begin:end]
