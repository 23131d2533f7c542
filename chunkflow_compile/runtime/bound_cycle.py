"""A cycle that is bound to memory: the executors of its calls, what they have in the arena, and what its passes took.

A program alone is a cycle of one call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from torch.fx import GraphModule

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.arrivals import Arrivals, arrivals_at
from chunkflow_compile.passes.program.cycle import Call, Cycle, rewritten
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_call
from chunkflow_compile.weights.bytes import flat_bytes
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.groups import Group, group_named
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.source import DriveBytes, Source

from .arena import Arena, Binding
from .call_site import CallKey, CallSite, bare
from .executor import Executor
from .measurement import KEPT_MEASUREMENTS, MEASURED_FILE, StepMeasurement, as_one, measured, warm_timings
from .rank_times import RankTimes

# The buffers of the weights of a cycle, by their names in it.
BufferRefs = Mapping[str, weakref.ref[HostBuffer]]


class BoundCycle:
    """A cycle on the weights of its calls.

    ``keys``: of its calls, none of a program alone.  ``position``: the call that is expected next.  ``jumps``: the calls off
    the cycle so far, at which it was entered anew.  ``replan_after``: the number of warm passes after which to plan it again
    from their times, see :meth:`ended`; 0 for never.  ``settings``: that it was planned with, but for those times.
    ``folder``: where measurements are written, None for nowhere.
    """

    def __init__(
        self,
        arena: Arena,
        calls: Sequence[Call],
        buffers: BufferRefs,
        settings: Settings,
        cycle: Cycle,
        marks: Arrivals,
        *,
        keys: tuple[CallKey, ...] = (),
        advice: Callable[[], str] = str,
    ) -> None:
        """``advice``: returns a sentence on what would fit if the arena does not."""
        self.arena = arena
        self.keys = keys
        self.cycle = cycle
        self.position = 0
        self.jumps = 0
        self.replan_after = 0
        self.folder: Path | None = None
        self.calls = calls
        self.buffers = buffers
        self.settings = settings
        self._advice = advice
        self._names = [{id(buffers[n]()): n for n in call.names.values() if n in buffers} for call in calls]
        # of each call, the versions of its weights that it ran on
        self._seen: list[tuple[int, ...] | None] = [None for _ in calls]
        self._passes: deque[tuple[StepMeasurement, ...]] = deque(maxlen=KEPT_MEASUREMENTS)  # whole ones
        self._pass: list[StepMeasurement] = []  # the newest, until it is whole
        self._begun = 0  # passes
        self._in_order = 0  # calls since a pass began, without a jump
        self._whole = 0  # passes without a jump
        self._rank_times: RankTimes | None = None  # while those of other ranks are awaited
        self._marks = marks
        self._binding: Binding | None = None
        self._executors: list[weakref.WeakKeyDictionary[CallSite, Executor]] = [
            weakref.WeakKeyDictionary() for _ in calls
        ]
        # regions, and their keys
        self._proved: weakref.WeakKeyDictionary[GraphModule, str] = weakref.WeakKeyDictionary()

    @property
    def lasts(self) -> bool:
        """Whether all weights of the cycle still exist where they were."""
        return all((buffer := ref()) is not None and buffer.life is not None for ref in self.buffers.values())

    @property
    def ready(self) -> bool:
        """Whether it is bound to the memory, or can be."""
        return self._binding is not None or self.lasts

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest passes over the calls, oldest first, each as one step; waits for those in flight."""
        return tuple(map(as_one, self.passes))

    @property
    def passes(self) -> list[tuple[StepMeasurement, ...]]:
        """The same, each as the measurements of its calls."""
        return self._measured(wait=True)

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

    def adopt(self, other: BoundCycle) -> None:
        """Take over the measurements of a cycle that this one replaces."""
        self._passes.extend(other._passes)

    def timings(self, passes: int, wait: bool = False) -> Timings | None:
        """The times of the warm passes so far and of the time between calls; None if they are fewer than ``passes``.

        ``wait``: for those in flight.
        """
        found = self._measured(wait)
        if len(self.calls) == 1:  # its first step need not be cold, and pays for first touches
            return warm_timings(self.cycle.plan, found[1:], passes)
        return warm_timings(self.cycle.plan, found, passes, self.cycle.starts)

    def ended(self) -> Timings | None:
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
            self._rank_times = RankTimes(self.groups, {self.name: self.timings(self.replan_after, wait=True)})
        else:
            self.arena.streams.compute.synchronize()  # the host may run ahead of the collectives of the pass
            self._rank_times.read()
        if self._rank_times.missing:
            return None
        timings, self._rank_times = self._rank_times.timings[self.name], None
        return timings

    def _measured(self, wait: bool = False) -> list[tuple[StepMeasurement, ...]]:
        """The newest passes, each the measurements of its calls."""
        if self._binding is not None:
            self.arena.streams.collect(wait)
        return list(self._passes)

    def _file(self, call: int, steps: deque[StepMeasurement], counts: Counts, found: StepMeasurement) -> None:
        """Keep the measurement of a call, and count it.  A pass that a jump has ended, or that lacks a call, is none.

        ``steps``, ``counts``: of the call's site, which its executor must not keep.
        """
        steps.append(found)
        counts.measured += 1
        counts.measured_s += found.step_s
        counts.predicted_s += self._call_seconds[call]
        counts.stalled_s += found.exposed_h2d_s
        counts.collective_s += found.collective_s
        if call != len(self._pass):
            self._pass = []
        if call == len(self._pass):
            self._pass.append(found)
        if len(self._pass) == len(self.calls):
            self._passes.append(tuple(self._pass))
            self._pass = []

    def predicted(self, keys: Collection[CallKey | None]) -> float | None:
        """Predicted seconds of those of the calls that have these keys, each until the next one begins."""
        if self.cycle.plan.predicted is None:
            return None
        return sum(seconds for key, seconds in zip(self.keys, self._call_seconds, strict=True) if key in keys)

    def played(self, problems: Mapping[CallKey | None, Problem]) -> float:
        """Predicted seconds of a pass in which the calls with these keys have other sizes: those of the problems."""
        regions, collectives = [*self.cycle.problem.regions], [*self.cycle.problem.collectives]
        at, met = 0, 0
        for key, call in zip(self.keys, self.calls, strict=True):
            here = call.cut.problem
            there = problems.get(key, here)
            for i, (region, other) in enumerate(zip(regions[at:], there.regions, strict=False), at):
                regions[i] = replace(region, cost=other.cost)
            for i, (mine, theirs) in enumerate(zip(collectives[met:], there.collectives, strict=False), met):
                collectives[i] = replace(mine, nbytes=theirs.nbytes)
            at, met = at + len(here.regions), met + len(here.collectives)
        problem = replace(self.cycle.problem, regions=tuple(regions), collectives=tuple(collectives))
        plan = self.cycle.plan
        return Simulator(problem, self.settings.hardware, plan.chunk_bytes).step_under(plan)

    @cached_property
    def _call_seconds(self) -> list[float]:
        """Predicted seconds of each call, until the next one begins; 0 without a prediction."""
        if (found := self.cycle.plan.predicted) is None:
            return [0.0 for _ in self.calls]
        regions = [span.start for span in found.spans if span.lane == "compute"]
        begun = [regions[start - 1] for start in self.cycle.starts]
        ended = [*begun[1:], begun[0] + found.step_s]
        return [end - begin for begin, end in zip(begun, ended, strict=True)]

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
        found = (c % count for c in range(self.position, self.position + count) if self.keys[c % count] is key)
        return next(found, None)

    def begin(self, site: CallSite, call: int) -> Executor:
        """The executor of a call that begins now.  Raises ChunkflowError if the arena has no room."""
        found = self.executor(site, call)
        found.wanted = self.replan_after > 0
        self.position = (call + 1) % len(self.calls)
        self._in_order = call + 1 if call in (0, self._in_order) else 0
        if call == 0:
            if self._begun and not self._begun & (self._begun - 1):  # after passes 1, 2, 4, 8, ...: a run may be killed
                self._save()
            self._begun += 1
        return found

    def executor(self, site: CallSite, call: int) -> Executor:
        """The executor of a call's site in its place.  Raises ChunkflowError if the arena has no room.

        It copies the weights of the call again that were written since they were copied.
        """
        seen = self._seen[call] == site.versions
        if not seen:
            self._renew([self._name(buffer, call) for buffer in site.buffers.values()])
        found = self._executors[call].get(site)
        if found is None:
            found = self._executors[call][site] = self._make(site, call)
        if not seen:
            found.rewritten |= dict(
                zip((self._name(b, call) for b in site.buffers.values()), site.versions, strict=True)
            )
            self._seen[call] = site.versions
        return found

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the memory; the next call binds it again."""
        self._save(wait=True)
        for executors in self._executors:
            for executor in list(executors.values()):
                executor.vacate()
            executors.clear()
        if self._binding is not None and self.arena.holder is self._binding.state:
            self.arena.holder = None  # the next call starts cold
        self._binding = None

    def release(self) -> None:
        """Unbind, and let go of the weights that it keeps on the device beside the memory."""
        self.unbind()
        self.arena.release(self)

    def _save(self, wait: bool = False) -> None:
        """Write the measurements to the dump folder, if there are any.  A full disk or a failed device is no error."""
        if self.folder is None:
            return
        path = self.folder / MEASURED_FILE
        part = path.with_suffix(".part")  # renamed below: a reader never sees half a file
        with contextlib.suppress(OSError, ChunkflowError):
            part.write_text(measured(self.cycle.plan, [as_one(calls) for calls in self._measured(wait)]).to_json())
            part.replace(path)

    def _renew(self, names: Sequence[str]) -> None:
        """Renew the copies beside the memory of those weights that were written since.

        Unbinds if the host memory of one has moved since it was bound, or is no longer pinned.
        """
        if (binding := self._binding) is None:
            return
        if any(self._moved(name, binding.hosts[name]) for name in names if name in binding.hosts):
            self.release()
            return
        outside = {name: self._buffer(name) for name in binding.values.keys() - binding.hosts.keys()}
        if all(outside[name].on_device is not None for name in names if name in outside):
            return
        kept = self.arena.keep(self, outside.values(), self._advice)
        if any(kept[buffer] is not binding.values[name] for name, buffer in outside.items()):
            self.release()  # programs of another arena read the old copy

    def _moved(self, name: str, bound: Source) -> bool:
        """Whether the bytes of a weight are no longer where they were bound, or were pinned and are not.

        A weight leaves the drive, and the memory that ranks share, when it is written.
        """
        buffer = self._buffer(name)
        now = buffer.drive or flat_bytes(buffer.host)
        if isinstance(now, DriveBytes) or isinstance(bound, DriveBytes):
            return now is not bound
        return now.data_ptr() != bound.data_ptr() or now.numel() != bound.numel() or buffer.pins

    def _make(self, site: CallSite, call: int) -> Executor:
        cycle, marks, placed = self.cycle, self._marks, self.calls[call]
        names = {name: self._name(buffer, call) for name, buffer in site.buffers.items()}
        # another graph, such as one for another size, or the same one on weights that have changed places, as those of the
        # projections of queries and keys may
        if site.code.cut is not placed.cut or any(placed.names[name] != names[name] for name in names):
            placed = site.call(site.names() | names)
            program, marks = self._program(site, call, placed)
            cycle = cycle.at(call, program)
        if self.keys:
            self.arena.release_alone([site.key])  # its own plan keeps other weights on the device
        binding = replace(self._bound(site.code.pin_bytes), marks=marks)
        file = partial(self._file, call, site.measured, site.counts)
        return Executor(cycle.calls[call], site.code.regions, binding, site.code.poison, cycle, file, self._versions)

    def _program(self, site: CallSite, call: int, placed: Call) -> tuple[Program, Arrivals]:
        """The program of a call of another graph or for other sizes, and the marks of its transfers."""
        names = [placed.names[w.name] for w in placed.cut.problem.weights]
        known = [(self.cycle.calls[call], self._marks, self.calls[call].cut)]
        known += [(e.program, e.marks, s.code.cut) for s, e in [*self._executors[call].items()]]
        for program, marks, cut in known:
            # the graph at other sizes: the same ops on the same weights
            if cut.regions is placed.cut.regions and list(program.weight_inputs) == names:
                return replace(program, problem=placed.problem()), marks
        program = rewritten(self.cycle, call, placed, share="sharing" not in site.code.settings.disabled)
        marks = arrivals_at(self.cycle, self._marks, call, program)
        if site.code.verified:
            verify_call(self.cycle, call, program, self._marks, marks, self._proved)
        return program, marks

    def _name(self, buffer: HostBuffer, call: int) -> str:
        """The name in the cycle of a weight of a call."""
        return self._names[call][id(buffer)]

    def _bound(self, pin_bytes: int | None) -> Binding:
        """What the cycle has in the arena's memory.  Raises ChunkflowError if the device has no room."""
        if self._binding is None:
            self.arena.release_alone(self.keys)
            buffers = {name: self._buffer(name) for name in self.buffers}
            self._binding = self.arena.bind(
                self, self.cycle, buffers, self._marks, pin_bytes=pin_bytes, advice=self._advice
            )
        return self._binding

    def _versions(self) -> dict[str, int]:
        """Of the values of all its weights now."""
        return {name: self._buffer(name).version for name in self.buffers}

    def _buffer(self, name: str) -> HostBuffer:
        buffer = self.buffers[name]()
        assert buffer is not None, "the cycle lasts"
        return buffer
