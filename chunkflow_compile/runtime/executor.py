"""The executor: issues the nodes of a program, in program order, to the streams of a device.

Only these events order the streams:

* the opening of a window, recorded on the compute stream after the last reader of the bytes that its chunks overwrite
  (``verify`` proves that); the chunks wait for it;
* the arrival of a region's weights, recorded on the copy stream after the newest chunk issued for any of them; the
  region waits for it;
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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.ops import prefetch_of
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.passes.program.arrivals import arrivals
from chunkflow_compile.passes.program.cycle import Cycle, border
from chunkflow_compile.passes.program.reads import reads_from
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.weights.source import Source

from .arena import Binding, SlotState
from .instructions import Cost, Issue, Issuer, Step
from .measurement import StepMeasurement, no_seconds
from .read_ahead import Order


@dataclass(frozen=True)
class _Cold:
    """What a cold start copies: ``kept`` chunks as weight, slot bytes and host bytes, then ``prefetches`` by their weights.

    ``waits``: whether compute waits for all of it.  ``order``: in which the drive is read from this call on.
    """

    kept: Sequence[tuple[str, torch.Tensor, Source]]
    prefetches: Sequence[tuple[str, Issue]]
    waits: bool
    order: Order


class Executor:
    """Runs a program on a device, one step at a time.  Not thread-safe: the caller holds the lock of the arena."""

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        binding: Binding,
        poison: bool = False,
        cycle: Cycle | None = None,
        file: Callable[[StepMeasurement], None] | None = None,
        versions: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """``poison``: whether to overwrite the bytes of an evicted weight, so a late reader sees NaN.

        ``cycle``: that of which the program is a call.  ``file``: takes the measurement of each step.
        ``versions``: returns those of the values of all weights of the cycle.
        """
        self.program = program
        self.cycle = cycle or Cycle.of(program)
        self.call = next(i for i, call in enumerate(self.cycle.calls) if call is program)
        self._next = (self.call + 1) % len(self.cycle.calls)
        self.device = device = binding.arena.streams
        self.binding = binding
        self._file = file
        self._versions = versions
        self.written: dict[str, int] = {}  # weight -> version of its values, to compare with those in the memory
        self._plan = self.cycle.plan.digest
        self._steps = 0
        self.cost = Cost()  # of the newest step
        self.wanted = False  # whether a plan is to be made from the times of its steps
        self._known = True  # whether the step before was measured, or there was none
        self._handover, self._primed = device.event(), device.event()
        self._windows = len(program.problem.regions)
        self.marks = marks = binding.marks or arrivals(self.cycle)
        self.state = binding.state or SlotState(device, len(marks.marked))
        self._issuer = Issuer(program, regions, binding, state=self.state, arrivals=marks, poison=poison)
        self.traffic = self._issuer.traffic
        names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
        placeholders = [names.get(n.name) for n in self._issuer.number if n.op == "placeholder"]
        # the positions of weights whose readers get a slot or a resident copy instead of the parameter
        self._values = [
            (i, binding.values[w]) for i, w in enumerate(placeholders) if w is not None and w in binding.values
        ]
        self._later: list[Any] = [None] * (len(self._issuer.number) - len(placeholders))
        self._streams = bool(program.plan.streamed)
        self._cold: _Cold | None = None  # made when it is needed: few calls of a cycle ever begin a turn
        self._instructions = list(self._issuer.instructions())

    def run(self, args: Sequence[Any]) -> Any:
        """Run one step on the inputs of the traced graph; return its outputs.

        Raises ChunkflowError if a copy or a collective fails; the next call then starts cold.
        """
        try:
            step = self.enqueue(args)
            self.device.deliver()
        except BaseException:
            self.forget()
            raise
        return step.outputs

    def enqueue(self, args: Sequence[Any]) -> Step:
        """Issue one step.  Its outputs are valid after the device has delivered; more steps may be issued before."""
        env = [*args, *self._later]
        for position, value in self._values:
            env[position] = value
        ready = self.binding.arena.holder is self.state and self.state.next == self.call
        if self.call == 0 or self.state.next != self.call:  # a pass begins, or it is a jump
            self.state.marked = self.device.choose(self._steps, self.wanted)
        begun = self.device.start(self.state.marked, self._known)
        self._known = begun is not None
        step = Step(env, Cost(no_seconds(self._windows) if self._known else None), self._steps)
        self.cost = step.cost
        self._steps += 1
        # a program that streams nothing leaves the arena to the others
        if self._streams and (self.written or not ready):
            self._prime(step, ready)
        self.state.next = None
        for issue in self._instructions:
            issue(step)
        self.state.next = self._next
        # not the step: its values would live too long
        self.device.finish(begun, partial(self._finish, step.cost, self.state.turns))
        self.state.turns += 1
        return step

    def _finish(self, cost: Cost, turn: int, begin: float, end: float, whole: bool) -> None:
        before, self.state.ended = self.state.ended, (turn, end)
        copied, windows = self.traffic.settle(end), cost.windows
        read_s, read_bytes = self.binding.arena.reader.settle() if self._issuer.on_drive else (0.0, 0)
        if not whole or windows is None:
            return
        found = StepMeasurement(
            step_s=end - begin,
            exposed_h2d_s=sum(windows.exposed_s),
            collective_s=sum(windows.collective_s),
            copy_s=copied.seconds,
            alone_s=copied.alone_s,
            alone_bytes=copied.alone_bytes,
            collectives=cost.collectives,
            moved_bytes=cost.moved,
            primed_bytes=cost.primed,
            windows=windows,
            read_s=read_s,
            read_bytes=read_bytes,
            idle_s=max(0.0, begin - before[1]) if before is not None and before[0] == turn - 1 else 0.0,
            plan=self._plan,
            begin_s=begin,
        )
        if self._file is not None:
            self._file(found)

    def forget(self) -> None:
        """Wait for work in flight and discard the chunks in the arena: the next step starts cold."""
        holds = self.binding.arena.holder is self.state
        if holds:
            self.binding.arena.holder = None
        if self._issuer.flag is not None:
            self._issuer.flag.drop()  # an error in a collective left it set
        for stream in (self.device.compute, self.device.collective, self.device.copy):
            with contextlib.suppress(ChunkflowError):  # raised already where the failed work was awaited
                stream.synchronize()
        with contextlib.suppress(ChunkflowError):
            self.device.collect(True)
        if self._issuer.on_drive and holds:
            self.binding.arena.reader.stop()
        self.traffic.forget()

    def vacate(self) -> None:
        """Wait for work in flight and drop every reference to the memory.  The executor cannot run again."""
        self.forget()
        self._instructions, self._values, self._cold = [], [], None
        self.binding = self._issuer.binding = Binding(self.binding.arena, {}, {}, {})

    def _prime(self, step: Step, ready: bool) -> None:
        """Take over the arena, or jump to this call of the cycle: copy the chunks that stay, and those that are on their way
        or in use here in a pass without jumps.  If the call is ``ready``, only those of weights written since, for which
        compute waits: the mark that a reader awaits may be that of another copy.
        """
        compute, copy, arena, state = self.device.compute, self.device.copy, self.binding.arena, self.state
        known = arena.holder is state  # then the chunks that stay are there
        written = {name for name, version in self.written.items() if state.versions.get(name) != version}
        if ready and not written:
            self.written = {}
            return
        versions = {**state.versions, **self.written} if known else self._versions()
        cold = self._cold = self._cold or self._make_cold()
        kept = [entry for entry in cold.kept if not known or entry[0] in written]
        prefetches = [issue for weight, issue in cold.prefetches if not ready or weight in written]
        arena.holder = None  # if this is interrupted, the chunks of no program are complete
        compute.record(self._handover)
        copy.wait(self._handover)
        if cold.order.repeated and not ready:
            copy.run(partial(arena.reader.reset, cold.order, self.cycle.plan.drive_rate))
        for weight, target, source in kept:
            self._issuer.copy(step, target, source, f"keep {weight}")
            self._issuer.mark(weight)
            step.cost.moved += source.numel()
        for issue in prefetches:
            issue(step)
        if cold.waits or (known and written):
            copy.record(self._primed)
            compute.wait(self._primed)
        arena.holder = state
        state.versions, self.written = versions, {}
        step.cost.primed, step.cost.moved = step.cost.moved, 0

    def _make_cold(self) -> _Cold:
        found = border(self.cycle, self.call)
        ops = [(p, n) for n in found.prefetches if (p := prefetch_of(n))]
        prefetches = [(p.weight, self._issuer.prefetch(p, n)) for p, n in ops]
        reads = reads_from(self.cycle, self.call, found, self._issuer.on_drive)
        first, repeated = ([self._issuer.reading(op).source for op in ops] for ops in (reads.first, reads.repeated))
        return _Cold(list(self._kept()), prefetches, found.waits, Order(first, repeated, reads.begin))

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, Source]]:
        """Weight, slot bytes and host bytes of the chunks that stay in their slots until the arena is handed over."""
        plan = self.program.plan
        for weight in plan.streamed:
            for run in runs(weight.windows):
                if run.window is None:
                    begin, end = plan.span(weight, run.first, run.end)
                    slot, host = self.binding.slots[weight.name], self.binding.hosts[weight.name]
                    yield weight.name, slot[begin:end], host[begin:end]
