"""A session is a program bound to memory: compiled code on the weights of one model, and its place in an arena."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.arrivals import arrivals
from chunkflow_compile.passes.program.cycle import Cycle, block_of
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight, state_of

from .arena import Arena
from .bound_cycle import BoundCycle
from .call_site import CallKey, CallSite
from .codes import CurrentCode
from .cycles import Cycles
from .device import check_kind, refuse_capture
from .executor import Executor
from .instructions import tuple_getter
from .measurement import StepMeasurement

_log = logging.getLogger(__name__)


class Session(CallSite):
    """A program bound to memory: its place in an arena, and its resident copies."""

    def __init__(self, current: CurrentCode, arena: Arena, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises ChunkflowError if the arena has no room, or if the program is not safe beside another in it."""
        super().__init__(current, parameters)
        code, self.arena = self.code, arena
        check_kind(arena.device, code.kind, code.program.plan.policy)
        refuse_capture(arena.device)
        self.steps = 0  # so far
        self.started = time.monotonic()
        self._fills = [buffer.fill for buffer in self.buffers.values() if buffer.fill is not None]
        self._stores = [*{id(buffer.store): buffer.store for buffer in self.buffers.values()}.values()]
        self._bare = [p for p in self.in_place.values() if isinstance(p, HostWeight)]
        self._as_they_are = [state_of(parameters[name]) for name in self.buffers]
        self.versions = _versions(self._as_they_are)
        order = list(parameters)
        self._offloaded = tuple_getter([order.index(name) for name in self.buffers])
        self._others = tuple_getter([order.index(name) for name in self.in_place])
        self._kinds = [type(p) for p in self.in_place.values()]
        died = partial(_weight_died, weakref.ref(arena))
        self._weights = [weakref.ref(life, died) for buffer in self.buffers.values() if (life := buffer.life)]
        self._gone = weakref.finalize(self, _sweep, weakref.ref(arena))
        self._gone.atexit = False
        self._called = self._name()
        with arena.lock():
            if code.verified:
                arena.prove(self.program)
            arena.join(self, kind=code.kind)
            try:
                self.cycles = Cycles.of(arena)
                if (key := self._key()) is not None:
                    self.key, key.site = key, weakref.ref(self)
                self.alone: BoundCycle = self._as_a_cycle()
                self.alone.executor(self, 0)
            except BaseException:
                arena.leave(self)
                raise
        self.counts.programs += 1

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def executor(self) -> Executor:
        """The executor of the program outside cycles.  Raises ChunkflowError if the session is closed."""
        if self.closed:
            raise ChunkflowError("This program has ended: call the compiled model again.")
        return self.alone.executor(self, 0)

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest measured steps, oldest first; waits for those in flight."""
        if not self.closed:
            self.arena.streams.collect(wait=True)
        return tuple(self.measured)

    def adopt(self, other: Session) -> None:
        """Take over the measurements of the session that this one replaces."""
        self.measured.extend(other.measurements)
        self.alone.adopt(other.alone)

    def notice(self, again: bool = False) -> None:
        """Let modules fill their buffers, and notice what was written unseen since the last call.  The arena is not locked.

        ``again``: whether this call has noticed before, and what is in use would be noticed again.
        """
        for fill in self._fills:
            fill()
        for store in () if again else self._stores:
            if store.lent:
                store.reclaim()

    def fits(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether the session can run on its weights as they are now; if not, a new session is needed.

        ``weights``: in the order of the parameters.  Every call comes here, so what loops over them is in C.
        """
        if self.closed or self.current.code is not self.code:
            return False
        try:
            with torch._C.DisableTorchFunctionSubclass():  # else each tensor is asked for an override of _version
                found = list(map(state_of, self._offloaded(weights)))
            if found != self._as_they_are:
                # other numbers: it was written, so copies of it on the device are out of date
                if any(new[0] is not old[0] for new, old in zip(found, self._as_they_are, strict=True)):
                    return False  # it was exchanged, restored, replaced, or given other memory
                self._as_they_are, self.versions = found, _versions(found)
        except AttributeError:  # it is an ordinary tensor now, or in no store
            return False
        others = self._others(weights)
        if not all(map(is_, others, self.in_place.values())):
            return False
        # one that has become offloaded is the same object of another class
        return list(map(type, others)) == self._kinds and not any(map(buffer_of, self._bare))

    def repeats(self, other: Session) -> bool:
        """Whether it is the same program on the same weights."""
        same = self.buffers.keys() == other.buffers.keys()
        same = same and all(buffer is other.buffers[name] for name, buffer in self.buffers.items())
        return same and self.program.same_as(other.program)  # last: there are many programs, few on the same weights

    def run(self, inputs: Sequence[Any]) -> Any:
        """Run one step.  The caller holds the lock of the arena."""
        arena = self.arena
        if arena.device.type == "cuda":
            refuse_capture(arena.device)
        if arena.running is not None:
            arena.refuse_inside()
        if arena.outdated:
            arena.close_outlived()
        in_cycle = None if self.key is None else self.cycles.executor(self)
        executor = in_cycle or self.alone.begin(self, 0)
        arena.running = os.getpid(), self._called
        try:
            outputs = executor.run(inputs)
        finally:
            arena.running = None
        self.steps += 1
        counts, cost = self.counts, executor.cost
        counts.calls += 1
        counts.moved_bytes += cost.moved + cost.primed
        counts.cold_starts += cost.primed > 0
        bound = self.cycles.current if in_cycle is not None else self.alone
        if bound is not None and bound.replan_after:
            self._replan(bound)
        return outputs

    def plan_again(self, bound: BoundCycle, timings: Timings) -> tuple[Plan, Callable[[], None]]:
        """A plan from measured times for the program outside cycles, or for a cycle that it is a call of; and what makes the
        next pass run it.  Raises ChunkflowError if there is none."""
        if bound is not self.alone:
            return self.cycles.plan_again(bound, timings)
        code = self.code.remade(timings=timings)

        def swap() -> None:
            self.current.code, self.current.by_itself = code, True

        return code.program.plan, swap

    def _replan(self, bound: BoundCycle) -> None:
        """At the end of a pass, plan from measured times if that is due; a new placement runs from the next pass on."""
        try:
            if (timings := bound.ended()) is None:
                return
            bound.replan_after = 0
            plan, swap = self.plan_again(bound, timings)
        except ChunkflowError as error:  # the current plan still works
            bound.replan_after = 0
            _log.warning("the current plan is kept: %s", error)
            return
        if plan.placement != bound.cycle.plan.placement:
            swap()

    def close(self) -> None:
        """Wait for the step and the copies in flight, then leave the arena."""
        with self.arena.lock():
            if not self.closed:
                try:
                    self.alone.release()
                    self.cycles.release()  # its programs move the weights of this session too
                finally:  # also after an interrupt: the memory must be released
                    self.closed = True
                    self.buffers, self.in_place, self._weights = {}, {}, []
                    self._as_they_are, self._bare, self._stores, self._fills = [], [], [], []
                    self._gone.detach()
                    self.arena.leave(self)

    def _as_a_cycle(self) -> BoundCycle:
        """The program outside cycles of several calls."""
        code, cycle = self.code, Cycle.of(self.program)
        buffers = {name: weakref.ref(buffer) for name, buffer in self.buffers.items()}
        call = self.call({weight.name: weight.name for weight in self.program.problem.weights})
        made = BoundCycle(self.arena, [call], buffers, code.settings, cycle, arrivals(cycle), advice=code.advice)
        made.folder = code.folder
        if not (self.part and self.key):  # its cycle is planned again
            made.replan_after = code.replan_after
        return made

    def _name(self) -> str:
        """The name of its calls, the same on every rank, whose shards may differ in size."""
        problem = self.program.problem
        block = next((block for buffer in self.buffers.values() if (block := block_of(buffer.name))), "")
        whole = not self.part or not block
        name = "the model" if whole else block
        return f"{name} ({len(problem.regions)} regions, {len(problem.collectives)} collectives)"

    def _key(self) -> CallKey | None:
        """What its calls read, for a cycle; None if the user chose its placement."""
        settings = self.code.settings
        chosen = settings.policy != "chunkflow" or settings.plan is not None or settings.timings is not None
        if chosen or "cycle" in settings.disabled or not self.buffers:
            self.cycles.forget(self.buffers.values())
            return None
        problem = self.program.problem
        regions = [
            [buffer for name in r.weights if (buffer := self.buffers.get(name)) is not None] for r in problem.regions
        ]
        collectives = tuple((c.kind, c.before, c.until) for c in problem.collectives)
        return self.cycles.key(regions, collectives, settings)


def _versions(states: Iterable[tuple[Any, ...]]) -> tuple[int, ...]:
    """:attr:`HostBuffer.version` of each weight, from what :func:`state_of` returns."""
    return tuple(sum(counts) for _, _, *counts in states)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weight_died(ref: weakref.ref[Arena], _: object) -> None:
    """Let the next step close the programs that have outlived a weight; the collector may run anywhere."""
    if (arena := ref()) is not None:
        arena.outdated = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sweep(ref: weakref.ref[Arena]) -> None:
    """Remove a session that was dropped with its model from its arena, which other models may share."""
    if (arena := ref()) is not None:
        aside(arena.sweep)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def aside(work: Callable[[], None]) -> None:
    """Run a finalizer's work on its own thread: it waits for locks and streams, and the collector may run anywhere.

    Does nothing while the process exits, which frees everything.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=work, name="chunkflow-close").start()
