"""The executor: issues the verified ops of a call (step.py) to the streams of a device.

The ops of a call form its step (``Cycle.ops``).  At a cold start, at a jump and after writes to weights, the executor issues
a prologue (``Cycle.prologue``) before the step.  The prologue copies the weights that the arena lacks.  The streams of
compute, copies and reads are ordered only by events.  The ops of the step and of the prologue record these events and wait
for them.  If collectives run on separate streams, the executor orders these streams by additional events.  One of these
events makes a collective wait until compute has reached the Start op of the collective.  One event per collective makes
compute wait at the Finish op until the collective has ended.

instructions.py makes the functions that issue the ops.  For each call of the program, the executor either calls these
functions or launches a CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.program.rewrite import Program, issued

from .arena import Binding
from .arena_contents import ArenaContents
from .capture import record
from .cuda_graphs import CaptureLog, CudaGraph
from .instructions import instructions
from .measurement import StepMeasurement, no_seconds
from .target import Cost, Issue, RunningStep, Target
from .wrapped_calls import LoweredRegion, separated


class Executor:
    """Runs a program on a device, one step at a time.  Not thread-safe: the caller holds the lock of the arena.

    ``target``: the memory and the streams that the ops use.  ``instructions``: the functions that issue the ops of a step.
    ``rewritten``: name of a weight that may have been written since it was copied -> the version of its new values.
    ``cost``: the cost of the latest step.  ``captures``: the log of captures of this call as CUDA graphs; None if the call
    is never captured.
    """

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, LoweredRegion],
        binding: Binding,
        poison: bool = False,
        cycle: Cycle | None = None,
        file: Callable[[StepMeasurement], None] | None = None,
        versions: Callable[[], dict[str, int]] = dict,
        captures: CaptureLog | None = None,
    ) -> None:
        """``poison``: see :class:`Target`.  ``cycle``: the cycle in which the program is a call; None if the program runs
        alone.  ``file``: a function that keeps the measurement of each measured step, or None.  ``versions``: a function
        that returns the current version of the values of each weight in the cycle, by name.
        """
        self.program = program
        self.cycle = cycle = cycle or Cycle.of(program)
        self.call = next(i for i, call in enumerate(cycle.calls) if call is program)
        self.device = device = binding.arena.streams
        self.state = binding.state or ArenaContents(device, cycle.events)
        self.target = Target(program, cycle, regions, binding, device, self.state.events, poison)
        self.traffic = self.target.traffic
        self.rewritten: dict[str, int] = {}
        self.cost = Cost()
        self.captures = captures
        self._graph: CudaGraph | None = None
        self._file = file
        self._versions = versions
        self._next = (self.call + 1) % len(cycle.calls)
        self._plan = cycle.plan.digest
        self._steps = 0
        self._measured = True  # whether the previous step was measured; True before the first step
        self._windows = len(program.problem.regions)
        self._streams = bool(program.plan.streamed)
        names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
        nodes = list(program.module.graph.nodes)
        placeholders = [names.get(n.name) for n in nodes if n.op == "placeholder"]
        # for each offloaded weight: its position among the inputs, and the tensor that regions read instead of the parameter
        self._values = [
            (i, binding.values[w]) for i, w in enumerate(placeholders) if w is not None and w in binding.values
        ]
        self._later: list[Any] = [None] * (len(nodes) - len(placeholders))
        # The functions that issue the prologues of cold starts and of jumps.  The functions of a prologue are made when the
        # prologue is first needed, because few calls of a cycle ever need a prologue.  A prologue that copies stale weights
        # (weights that were written after they were copied) is not kept.
        self._prologues: dict[tuple[bool, Sequence[Lane]], list[Issue]] = {}
        self.instructions = instructions(self.target, cycle.ops[self.call], issued(program))

    @property
    def binding(self) -> Binding:
        return self.target.binding

    def run(self, rows: Sequence[Sequence[Any]], timed: bool = False) -> list[Any]:
        """Run one step that computes all ``rows``; return the outputs of each row.  Here, a row is one set of inputs of the
        traced graph.

        A step copies each weight once, and runs each compute op for one row after the other.  The waits before a compute op
        and the evictions after it are issued only once, for all rows together.  So the order of ops that was verified for
        one row is also safe for several rows.  A step with several rows is not measured, and is never a CUDA graph.  The
        outputs of different rows share no memory.  The device stores the intermediate values of all rows at the same time.
        The caller makes sure that the graph does not write to an input that two rows share.

        ``timed``: whether the times of this step are needed for re-planning.
        Raises ChunkflowError if a copy or a collective fails.  After such an error, the next call is a cold start.
        """
        try:
            step = self.enqueue(rows, timed)
            self.device.deliver()
        except BaseException:
            self.forget()
            raise
        return step.outputs if len(rows) == 1 else separated(step.outputs)

    def copy_again(self, versions: Mapping[str, int]) -> None:
        """Make the next step copy the weights in ``versions`` again.  ``versions``: name of a weight -> the version of its
        values.  The next step skips a weight if the arena already contains this version."""
        self.rewritten |= versions

    def enqueue(self, rows: Sequence[Sequence[Any]], timed: bool = False) -> RunningStep:
        """Issue one step.  The outputs of the step are valid after the caller has called :meth:`Device.deliver`.  The caller
        may issue more steps before it calls ``deliver``.

        ``rows``, ``timed``: see :meth:`run`.
        """
        *earlier, env = map(self._values_of, rows)
        state = self.state
        jumps = state.next_call != self.call
        begins = self.call == 0 or jumps  # whether a pass begins
        requested = not earlier and (self.device.measuring if begins else state.measurement_requested)
        graph = None if earlier else self._recorded(env, requested or timed)
        if begins:
            measured = graph is None and not earlier and self.device.choose(self._steps, timed)
            state.begin_pass(measured, requested)
        marked = graph.timed if graph is not None else state.measured and not earlier
        begun = self.device.start(marked, self._measured)
        self._measured = begun is not None and graph is None
        step = RunningStep(env, Cost(no_seconds(self._windows) if self._measured else None), self._steps, earlier)
        self.cost = step.cost
        self._steps += 1
        if self._streams:  # a program without streamed weights needs no prologue: it does not use the arena's memory
            if self.binding.arena.contents is not state:
                self._prime(step)
            elif jumps:
                self._prime(step, self._stale(), jumps=True)
            elif self.rewritten:
                if stale := self._stale():
                    self._prime(step, stale)
                self.rewritten = {}
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
        # the callback gets only the cost of the step: a reference to the step would keep the step's values alive
        over = partial(self._finish, step.cost, number) if graph is None else graph.ended
        self.device.finish(begun, over)
        return step

    def _values_of(self, row: Sequence[Any]) -> list[Any]:
        """Return the initial values of a step: the inputs in ``row``, and then None for each value that the step computes.
        Among the inputs, each offloaded weight is replaced by the tensor on the device from which regions read the weight."""
        env = [*row, *self._later]
        for position, value in self._values:
            env[position] = value
        return env

    def _recorded(self, env: Sequence[Any], measured: bool) -> CudaGraph | None:
        """Return the CUDA graph to launch for the inputs in ``env``; None if the call is to be issued op by op.  If the call
        is due to be recorded, record the graph now.

        ``measured``: whether the times of regions and collectives are needed, which a graph launch does not provide.
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
        self._graph = record(self.target, self.call, env, log)
        return self._graph

    def _drop_graph(self, why: str) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.drop(why)

    def _stale(self) -> set[str]:
        """Return the names of the stale weights, whose values in the arena's memory are out of date."""
        return {name for name, version in self.rewritten.items() if self.state.versions.get(name) != version}

    def _prime(self, step: RunningStep, stale: Collection[str] | None = None, *, jumps: bool = False) -> None:
        """Issue the prologue of the call.  ``stale``, ``jumps``: see :func:`prologue`."""
        arena, cold = self.binding.arena, stale is None
        versions = self._versions() if cold else {**self.state.versions, **self.rewritten}
        arena.begin_filling()
        if cold:
            self.device.recover()  # failed copies do not matter: they were for another model, or this prologue repeats them
        if (cold or jumps) and self.target.on_drive:
            arena.reader.expect(self.target.read_bytes, self.cycle.plan.drive_rate)
            if (reads := self.device.reads) is not None:
                reads.recover()  # failed reads do not matter: they were for another model, or this prologue repeats them
        for issue in self._prologue(stale, jumps):
            issue(step)
        arena.hold(self.state)
        self.state.fill(versions)
        self.rewritten = {}
        step.cost.end_priming()

    def _prologue(self, stale: Collection[str] | None, jumps: bool) -> list[Issue]:
        """Return the functions that issue the prologue of the call.  ``stale``, ``jumps``: see :meth:`_prime`."""
        lanes = self.device.lane_names
        if (kept := self._prologues.get((jumps, lanes))) is not None and not stale:
            return kept
        made = instructions(self.target, self.cycle.prologue(self.call, lanes, stale, jumps=jumps))
        if not stale:
            self._prologues[jumps, lanes] = made
        return made

    def _finish(self, cost: Cost, number: int, begin: float, end: float, consecutive: bool) -> None:
        idle_s = self.state.idle_before(number, begin, end)
        copied, windows = self.traffic.drain(end), cost.windows
        read_s, read_bytes = self.binding.arena.reader.collect() if self.target.on_drive else (0.0, 0)
        if not consecutive or windows is None or self._file is None:
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
        """Wait for work in flight, and mark the contents of the arena as unknown, so that the next step is a cold start."""
        self.binding.arena.discard(self.state)
        for stream in self.device.streams:
            # an error of the work in flight was already raised in the call in which the host waited for this work
            with contextlib.suppress(ChunkflowError):
                stream.synchronize()
        with contextlib.suppress(ChunkflowError):
            self._drop_graph("its memory was given up, or a call failed")
        with contextlib.suppress(ChunkflowError):
            self.device.collect(True)
        self.traffic.forget()

    def drop_references(self) -> None:
        """Drop every reference to the arena's memory, after which the executor cannot run again.  The caller calls
        :meth:`forget` first, so that no work is in flight."""
        self.instructions, self._values, self._prologues = [], [], {}
        self.target.drop_references()
