"""Sequences: calls that repeat in one order under one plan, bound to the memory of an arena.  A program by itself is a
sequence of one call."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.arrivals import Arrivals, arrivals, arrivals_at
from chunkflow_compile.passes.program.cycle import Call as CycleCall
from chunkflow_compile.passes.program.cycle import Cycle, rewritten
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_call
from chunkflow_compile.weights.bytes import flat_bytes
from chunkflow_compile.weights.groups import Group, group_named
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.source import DriveBytes, Source

from .arena import Arena, Binding
from .call import Call, CallKey, Code, bare
from .executor import Executor
from .measurement import Passes, StepMeasurement, as_one
from .rank_times import RankTimes


class Sequence:
    """Calls in one order, under one plan, in an arena.

    ``calls``: as the plan has them.  ``settings``: that it was planned with, but for measured times.  ``replan_after``: the
    number of warm passes after which to plan again from their times, see :meth:`timings_due`; 0 for never.  ``folder``: where
    measurements are written, None for nowhere.  ``keys``: of the calls, none of a program by itself.  ``position``: the call
    that is expected next.  ``jumps``: the calls off the cycle so far, at which it was entered anew.
    """

    def __init__(
        self,
        arena: Arena,
        calls: Items[CycleCall],
        buffers: Mapping[str, HostBuffer],
        settings: Settings,
        cycle: Cycle,
        *,
        keys: tuple[CallKey, ...] = (),
        advice: Callable[[], str] = str,
    ) -> None:
        """``buffers``: of the weights, by their names in the cycle.  ``advice``: returns a sentence on what would fit if the
        arena does not."""
        self.arena = arena
        self.calls = calls
        self.settings = settings
        self.cycle = cycle
        self.keys = keys
        self.position = 0
        self.jumps = 0
        self.replan_after = 0
        self.folder: Path | None = None
        self._advice = advice
        self._refs = {name: weakref.ref(buffer) for name, buffer in buffers.items()}
        self._names = [{id(buffers[n]): n for n in call.names.values() if n in buffers} for call in calls]
        # of each call, the versions of its weights that it ran on
        self._seen: list[tuple[int, ...] | None] = [None for _ in calls]
        self._passes = Passes(cycle)
        self._begun = 0  # passes
        self._in_order = 0  # calls since a pass began, without a jump
        self._whole = 0  # passes without a jump
        self._rank_times: RankTimes | None = None  # while those of other ranks are awaited
        self._marks = arrivals(cycle)
        self._binding: Binding | None = None
        self._executors: list[weakref.WeakKeyDictionary[Call, Executor]] = [weakref.WeakKeyDictionary() for _ in calls]
        # regions, and their keys
        self._proved: weakref.WeakKeyDictionary[GraphModule, str] = weakref.WeakKeyDictionary()

    @property
    def plan(self) -> Plan:
        return self.cycle.plan

    @property
    def alive(self) -> bool:
        """Whether all weights still exist where they were."""
        return all((buffer := ref()) is not None and buffer.life is not None for ref in self._refs.values())

    @property
    def ready(self) -> bool:
        """Whether it is bound to the memory, or can be."""
        return self._binding is not None or self.alive

    @property
    def buffers(self) -> dict[str, HostBuffer]:
        """Those of the weights that still exist, by their names in the cycle."""
        return {name: buffer for name, ref in self._refs.items() if (buffer := ref()) is not None}

    @property
    def passes(self) -> list[tuple[StepMeasurement, ...]]:
        """The newest passes, oldest first, each as the measurements of its calls; waits for those in flight."""
        return list(self._collected(wait=True).whole)

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The same, each as one step."""
        return tuple(map(as_one, self.passes))

    @property
    def name(self) -> str:
        """The same on every rank, whose shards may differ in size."""
        problem = self.cycle.problem
        block = next((r.block for r in problem.regions if r.block), "the model")
        calls = f"{len(self.calls)} call{'s' * (len(self.calls) > 1)}"
        return f"{calls} from {block} ({len(problem.regions)} regions, {len(problem.collectives)} collectives)"

    @property
    def groups(self) -> list[Group]:
        """The process groups whose ranks run this in step: those of its collectives, in the order of their first use."""
        graphs = [program.module.graph for program in self.cycle.calls if program.problem.collectives]
        names = dict.fromkeys(name for graph in graphs for name in group_names(graph))
        return [group for name in names if (group := group_named(name)) is not None]

    def timings(self, passes: int) -> Timings | None:
        """See :meth:`Passes.timings`; waits for those in flight."""
        return self._collected(wait=True).timings(passes)

    def timings_due(self) -> Timings | None:
        """Note that a call has ended.  Returns the times to plan again from, at the end of the pass in which that is due.

        It is due after each ``replan_after`` + 1 whole passes, until that many of them were warm.  Only counts decide, so
        that ranks that run the same calls come to it in the same pass; it takes them a pass more for each of their groups.
        Raises ChunkflowError if a rank has no times of it, and always will.
        """
        if self._in_order != len(self.calls):
            return None
        self._in_order, self._whole = 0, self._whole + 1
        if self._rank_times is None:
            if self._whole % (self.replan_after + 1):
                return None
            self._rank_times = RankTimes(self.groups, {self.name: self.timings(self.replan_after)})
        else:
            self.arena.streams.compute.synchronize()  # the host may run ahead of the collectives of the pass
            self._rank_times.read()
        if self._rank_times.missing:
            return None
        timings, self._rank_times = self._rank_times.timings[self.name], None
        return timings

    def _collected(self, wait: bool = False) -> Passes:
        if self._binding is not None:
            self.arena.streams.collect(wait)
        return self._passes

    def serves(self, settings: Settings) -> bool:
        """Whether the plan is the best for these settings of a call too.

        It is if they differ only in the budget, and it fits one that is no larger than its own.
        """
        planned, memory = self.settings, settings.memory
        if replace(bare(planned), memory=None) != replace(bare(settings), memory=None):
            return False
        if memory is None or planned.memory is None:
            return memory is planned.memory
        return self.cycle.plan.device_bytes + planned.outside <= memory <= planned.memory

    def find(self, key: CallKey) -> int | None:
        """The place of a call, the expected one first; None if it is not in the cycle."""
        count = len(self.keys)
        places = (number % count for number in range(self.position, self.position + count))
        return next((number for number in places if self.keys[number] is key), None)

    def begin(self, call: Call, number: int) -> Executor:
        """The executor of a call that begins now, in its place.  Raises ChunkflowError if the arena has no room."""
        found = self.executor_of(call, number)
        found.wanted = self.replan_after > 0
        self.position = (number + 1) % len(self.calls)
        self._in_order = number + 1 if number in (0, self._in_order) else 0
        if number == 0:
            # after passes 1, 2, 4, 8, ...: a run may be killed
            if self.folder is not None and self._begun and not self._begun & (self._begun - 1):
                self._collected().save(self.folder)
            self._begun += 1
        return found

    def executor_of(self, call: Call, number: int) -> Executor:
        """The executor of a call in its place.  Raises ChunkflowError if the arena has no room.

        It copies the weights of the call again that were written since they were copied.
        """
        seen = self._seen[number] == call.versions
        if not seen:
            self._renew([self._name(buffer, number) for buffer in call.buffers.values()])
        found = self._executors[number].get(call)
        if found is None:
            found = self._executors[number][call] = self._make(call, number)
        if not seen:
            names = (self._name(buffer, number) for buffer in call.buffers.values())
            found.rewritten |= dict(zip(names, call.versions, strict=True))
            self._seen[number] = call.versions
        return found

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the memory; the next call binds it again."""
        if self.folder is not None:
            self._collected(wait=True).save(self.folder)
        for executors in self._executors:
            for executor in list(executors.values()):
                executor.vacate()
            executors.clear()
        if self._binding is not None and self.arena.holder is self._binding.state:
            self.arena.holder = None  # the next call starts cold
        self._binding = None

    def _renew(self, names: Items[str]) -> None:
        """Renew the copies outside the memory of those weights that were written since.

        Gives up what is bound if the host memory of one has moved since then, or is no longer pinned.
        """
        if (binding := self._binding) is None:
            return
        if any(self._moved(name, binding.hosts[name]) for name in names if name in binding.hosts):
            self.arena.release(self)
            return
        outside = {name: self._buffer(name) for name in binding.values.keys() - binding.hosts.keys()}
        if all(outside[name].on_device is not None for name in names if name in outside):
            return
        kept = self.arena.keep(self, outside.values(), self._advice)
        if any(kept[buffer] is not binding.values[name] for name, buffer in outside.items()):
            self.arena.release(self)  # programs of another arena read the old copy

    def _moved(self, name: str, bound: Source) -> bool:
        """Whether the bytes of a weight are no longer where they were bound, or were pinned and are not.

        A weight leaves the drive, and the memory that ranks share, when it is written.
        """
        buffer = self._buffer(name)
        now = buffer.drive or flat_bytes(buffer.host)
        if isinstance(now, DriveBytes) or isinstance(bound, DriveBytes):
            return now is not bound
        return now.data_ptr() != bound.data_ptr() or now.numel() != bound.numel() or buffer.pins

    def _make(self, call: Call, number: int) -> Executor:
        cycle, marks, placed = self.cycle, self._marks, self.calls[number]
        names = {name: self._name(buffer, number) for name, buffer in call.buffers.items()}
        # another graph, such as one for another size, or the same one on weights that have changed places, as those of the
        # projections of queries and keys may
        if call.code.cut is not placed.cut or any(placed.names[name] != names[name] for name in names):
            placed = call.in_cycle(call.names() | names)
            program, marks = self._program(call, number, placed)
            cycle = cycle.at(number, program)
        binding = replace(self._bound(call), marks=marks)
        file = partial(self._passes.add, number, call.measured, call.counts)
        return Executor(cycle.calls[number], call.code.regions, binding, call.code.poison, cycle, file, self._versions)

    def _program(self, call: Call, number: int, placed: CycleCall) -> tuple[Program, Arrivals]:
        """The program of a call of another graph or for other sizes, and the marks of its transfers."""
        names = [placed.names[w.name] for w in placed.cut.problem.weights]
        known = [(self.cycle.calls[number], self._marks, self.calls[number].cut)]
        known += [(e.program, e.marks, other.code.cut) for other, e in [*self._executors[number].items()]]
        for program, marks, cut in known:
            # the graph at other sizes: the same ops on the same weights
            if cut.regions is placed.cut.regions and list(program.weight_inputs) == names:
                return replace(program, problem=placed.problem()), marks
        program = rewritten(self.cycle, number, placed, share="sharing" not in call.code.settings.disabled)
        marks = arrivals_at(self.cycle, self._marks, number, program)
        if call.code.verified:
            verify_call(self.cycle, number, program, self._marks, marks, self._proved)
        return program, marks

    def _name(self, buffer: HostBuffer, number: int) -> str:
        """The name in the cycle of a weight of a call."""
        return self._names[number][id(buffer)]

    def _bound(self, call: Call) -> Binding:
        """What the cycle has in the arena's memory.  Raises ChunkflowError if the device has no room."""
        if self.keys:  # by themselves, its programs keep other weights on the device
            self.arena.displace((self if self._binding is None else call).buffers.values())
        if self._binding is None:
            buffers = {name: self._buffer(name) for name in self._refs}
            pin_bytes = call.code.pin_bytes
            self._binding = self.arena.bind(
                self, self.cycle, buffers, self._marks, pin_bytes=pin_bytes, advice=self._advice
            )
        return self._binding

    def _versions(self) -> dict[str, int]:
        """Of the values of all its weights now."""
        return {name: self._buffer(name).version for name in self._refs}

    def _buffer(self, name: str) -> HostBuffer:
        buffer = self._refs[name]()
        assert buffer is not None, "its weights exist"
        return buffer


class Solo(Sequence):
    """A program by itself.  It belongs to the placement of its model, and ends with it.

    ``call``: what it runs and reads.  ``started``: when, to sort by.  ``closed``: whether it has ended.
    """

    closed = False

    def __init__(self, call: Call, arena: Arena) -> None:
        code, cycle = call.code, Cycle.of(call.program)
        one = call.in_cycle({weight.name: weight.name for weight in call.program.problem.weights})
        super().__init__(arena, [one], call.buffers, code.settings, cycle, advice=code.advice)
        self.call = call
        self.title = call.name
        self.started = time.monotonic()
        self.folder = code.folder
        died = partial(_weight_died, weakref.ref(arena))
        self._weights = [weakref.ref(life, died) for buffer in call.buffers.values() if (life := buffer.life)]
        self._dropped = weakref.finalize(self, _sweep, weakref.ref(arena))
        self._dropped.atexit = False

    @property
    def code(self) -> Code:
        return self.call.code

    @property
    def program(self) -> Program:
        return self.call.program

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest measured steps of its call, in a cycle too, oldest first; waits for those in flight."""
        if not self.closed:
            self.arena.streams.collect(wait=True)
        return tuple(self.call.measured)

    @property
    def executor(self) -> Executor:
        """The one outside cycles.  Raises ChunkflowError if the program has ended."""
        if self.closed:
            raise ChunkflowError("This program has ended: call the compiled model again.")
        return self.executor_of(self.call, 0)

    def adopt(self, other: Solo) -> None:
        """Take over the measurements of the program that this one replaces."""
        self.call.measured.extend(other.measurements)
        self._passes.whole.extend(other._passes.whole)

    def end(self) -> None:
        """Hold nothing any more.  The arena calls this, see :meth:`Arena.drop`."""
        self.closed = True
        self._weights = []
        self.call.let_go()
        self._dropped.detach()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weight_died(ref: weakref.ref[Arena], _: object) -> None:
    """Let the next step end the programs that have outlived a weight; the collector may run anywhere."""
    if (arena := ref()) is not None:
        arena.outdated = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sweep(ref: weakref.ref[Arena]) -> None:
    """Remove a program that was dropped with its model from its arena, which other models may share."""
    if (arena := ref()) is not None:
        aside(arena.sweep)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def aside(work: Callable[[], None]) -> None:
    """Run a finalizer's work on its own thread: it waits for locks and streams, and the collector may run anywhere.

    Does nothing while the process exits, which frees everything.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=work, name="chunkflow-close").start()
