"""Bound cycles.  A bound cycle is a repeating sequence of calls that runs under one plan in the memory of an arena."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.program.cycle import Call, Cycle, rewritten
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_call
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.source import Bytes

from .arena import Arena, Binding
from .call_site import CallKey, CallSite
from .executor import Executor
from .measurement import CycleTimes, StepMeasurement, as_one


class BoundCycle:
    """A repeating sequence of calls that runs under one plan in the memory of an arena.

    ``calls``: the calls for which the cycle was planned.  ``settings``: the settings with which the cycle was planned,
    without measured times.  ``replan_after``: the number of warm passes (passes without a prologue) after which the cycle is
    re-planned from measured times, see :meth:`CycleTimes.due`; 0 means never.  ``folder``: the folder to which measurements
    are written, or None.  ``keys``: the keys of the calls (:class:`CallKey`); empty if the cycle is a single program that
    runs alone.  ``position``: the index of the expected next call.  ``jumps``: the number of calls so far that were not the
    expected next call.
    """

    def __init__(
        self,
        arena: Arena,
        calls: Sequence[Call],
        buffers: Mapping[str, HostBuffer],
        settings: Settings,
        cycle: Cycle,
        *,
        keys: tuple[CallKey, ...] = (),
        replan_after: int = 0,
        advice: Callable[[], str] = str,
    ) -> None:
        """``buffers``: name of a weight in the cycle -> its buffer.  ``advice``: a function that returns a sentence for the
        out-of-memory error; the sentence says which plan would fit."""
        self.arena = arena
        self.calls = calls
        self.settings = settings
        self.cycle = cycle
        self.keys = keys
        self.position = 0
        self.jumps = 0
        self.replan_after = replan_after
        self.folder: Path | None = None
        self._advice = advice
        self._buffer_refs = {name: weakref.ref(buffer) for name, buffer in buffers.items()}
        # for each call: the versions of its weights when the call last ran
        self._last_versions: list[tuple[int, ...] | None] = [None for _ in calls]
        self.times = CycleTimes(cycle)
        self._passes_begun = 0
        self._in_order = 0  # the number of calls of the current pass so far; 0 after a jump
        self._binding: Binding | None = None
        self._executors: list[weakref.WeakKeyDictionary[CallSite, Executor]] = [
            weakref.WeakKeyDictionary() for _ in calls
        ]
        # Cache of the structural keys of regions, by the module of the region, so that each key is computed once.
        self._proved: weakref.WeakKeyDictionary[GraphModule, str] = weakref.WeakKeyDictionary()

    @property
    def plan(self) -> Plan:
        return self.cycle.plan

    @property
    def alive(self) -> bool:
        """Whether all weights still exist, and are still in the memory where they were when the cycle was planned."""
        return all((buffer := ref()) is not None and buffer.token is not None for ref in self._buffer_refs.values())

    def can_bind(self) -> bool:
        """Return whether the cycle is bound to the arena's memory or can be bound now."""
        return self._binding is not None or self.alive

    @property
    def buffers(self) -> dict[str, HostBuffer]:
        """The buffers of the weights that still exist, by their names in the cycle."""
        return {name: buffer for name, ref in self._buffer_refs.items() if (buffer := ref()) is not None}

    @property
    def passes(self) -> list[tuple[StepMeasurement, ...]]:
        """The measurements of the latest measured passes, oldest first.  Each pass is a tuple with one measurement per call.
        The property waits for passes in flight."""
        self._collect()
        return list(self.times.complete)

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The measurements of the latest measured passes, oldest first.  The measurements of all calls of a pass are
        combined into one measurement.  The property waits for passes in flight."""
        return tuple(map(as_one, self.passes))

    @property
    def executors(self) -> list[Executor]:
        """The executors that are bound to the arena's memory now."""
        return [executor for bound in self._executors for executor in bound.values()]

    def timings_due(self) -> Timings | None:
        """Record that a call has ended.  If re-planning is due, return the times to re-plan from; otherwise return None.

        Re-planning is due at most once, at the end of a pass.  Raises ChunkflowError, at most once, if another rank does not
        run this cycle; see :meth:`CycleTimes.due`.
        """
        if self._in_order != len(self.calls):
            return None
        self._in_order = 0
        try:
            timings = self.times.due(self.replan_after, self.arena.streams)
        except ChunkflowError:
            self.replan_after = 0
            raise
        if timings is not None:
            self.replan_after = 0
        return timings

    def continue_from(self, other: BoundCycle) -> None:
        """Take over the position and the number of jumps from ``other``, the same cycle under another plan."""
        self.position, self.jumps = other.position, other.jumps

    def add_jump(self) -> None:
        """Count a jump: a call that was not the expected next call."""
        self.jumps += 1

    def measure_into(self, folder: Path) -> None:
        """Write measurements into this folder from now on."""
        self.folder = folder

    def _collect(self, wait: bool = True) -> None:
        if self._binding is not None:
            self.arena.streams.collect(wait)

    def begin(self, call: CallSite, number: int) -> Executor:
        """Begin a call at position ``number`` in the cycle; return the executor of the call.

        Raises ChunkflowError if the device does not have enough memory for the arena.
        """
        executor = self.executor_of(call, number)
        self.position = (number + 1) % len(self.calls)
        self._in_order = number + 1 if number in (0, self._in_order) else 0
        if number == 0:
            # times are saved not only in unbind(), but also after passes 1, 2, 4, 8, ..., because the process may be killed
            if self.folder is not None and self._passes_begun and not self._passes_begun & (self._passes_begun - 1):
                self._collect(wait=False)
                self.times.save(self.folder)
            self._passes_begun += 1
        return executor

    def executor_of(self, call: CallSite, number: int) -> Executor:
        """Return the executor of a call at position ``number`` in the cycle.  If weights of the call were written since the
        call last ran, make the executor copy these weights again.

        Raises ChunkflowError if the device does not have enough memory for the arena.
        """
        seen = self._last_versions[number] == call.versions
        names = [] if seen else [*self._names_in_cycle(call, number).values()]
        if not seen:
            self._renew(names)
        if (executor := self._executors[number].get(call)) is None:
            executor = self._executors[number][call] = self._make_executor(call, number)
        if not seen:
            executor.copy_again(dict(zip(names, call.versions, strict=True)))
            self._last_versions[number] = call.versions
        return executor

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the arena's memory.  The next call binds the cycle again."""
        if self.folder is not None:
            self._collect()
            self.times.save(self.folder)
        for executors in self._executors:
            for call, executor in list(executors.items()):
                executor.forget()
                # removed before the executor becomes unusable, so that a Ctrl-C leaves no unusable executor in the dict
                del executors[call]
                executor.drop_references()
        if self._binding is not None:
            self.arena.discard(self._binding.state)
        self._binding = None

    def _renew(self, names: Sequence[str]) -> None:
        """If a resident weight outside the arena's memory was written since it was last copied, copy it to the device again.

        ``names``: names of the weights of the call.  If the host bytes of any of these weights have moved or are no longer
        pinned, this method unbinds the whole cycle instead.
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
            # Another arena still uses the old copy of a weight, so the new copy has another address.  Release this cycle, so
            # that its next call binds it to the new address.
            self.arena.release(self)

    def _moved(self, name: str, bound: Bytes) -> bool:
        """Return whether the host bytes of a weight have moved since the cycle was bound, or are no longer pinned.

        ``bound``: the bytes of the weight when the cycle was bound.  A write can move the bytes: if a weight is on the SSD,
        in shared memory or on the devices of several ranks, the write moves its bytes into memory of this process.
        """
        buffer = self._buffer(name)
        now = buffer.bytes_now
        if not isinstance(now, torch.Tensor) or not isinstance(bound, torch.Tensor):
            return now is not bound
        return now.data_ptr() != bound.data_ptr() or now.numel() != bound.numel() or buffer.should_pin

    def _make_executor(self, call: CallSite, number: int) -> Executor:
        cycle, placed = self.cycle, self.calls[number]
        names = self._names_in_cycle(call, number)
        # ``placed`` is the call for which this position was planned.  ``call`` cannot run the program of ``placed`` in two
        # cases.  In the first case, ``call`` runs another graph, for example because its input size differs.  In the second
        # case, both calls run the same graph, but with the weights in another order: for example, the projections of queries
        # and keys are swapped.
        if call.variant.cut is not placed.cut or any(placed.names[name] != names[name] for name in names):
            placed = call.in_cycle(call.names() | names)
            cycle = cycle.at(number, self._program_for(call, number, placed))
        file = partial(self.times.add, number, call.measured, call.counts)
        run, poison, captures = (
            call.variant.regions,
            call.variant.poison,
            call.captures if call.captures.wanted else None,
        )
        return Executor(cycle.calls[number], run, self._bind(call), poison, cycle, file, self._versions, captures)

    def _program_for(self, call: CallSite, number: int, placed: Call) -> Program:
        """Return a program for a call at position ``number`` in the cycle.  This call differs from the call for which the
        position was planned: in its graph, in its input sizes, or in the order of its weights."""
        names = [placed.names[w.name] for w in placed.cut.problem.weights]
        earlier = [(self.cycle.calls[number], self.calls[number].cut)]
        earlier += [(e.program, other.variant.cut) for other, e in [*self._executors[number].items()]]
        for program, cut in earlier:
            # the same graph at other input sizes issues the same ops on the same weights, so its program can be reused
            if cut.regions is placed.cut.regions and list(program.weight_inputs) == names:
                return replace(program, problem=placed.problem())
        program = rewritten(self.cycle, number, placed, share=call.variant.settings.enables("sharing"))
        if call.variant.verified:
            verify_call(self.cycle, number, program, self._proved)
        return program

    def _names_in_cycle(self, call: CallSite, number: int) -> dict[str, str]:
        """Return a mapping from the name of each weight in a call to the name of the same weight in the cycle.  A buffer has
        several names in the cycle if parameters were tied after compilation."""
        placed = self.calls[number].names
        of_buffer: dict[int, list[str]] = {}
        for name in placed.values():
            if name in self._buffer_refs:
                of_buffer.setdefault(id(self._buffer_refs[name]()), []).append(name)
        return {
            name: placed[name] if placed.get(name) in (names := of_buffer[id(buffer)]) else names[0]
            for name, buffer in call.buffers.items()
        }

    def _bind(self, call: CallSite) -> Binding:
        """Return the binding of the cycle.  If the cycle is not bound yet, bind it to the arena's memory first.

        Raises ChunkflowError if the device does not have enough memory.
        """
        if self.keys:  # release the programs that ran alone and keep weights of this cycle outside the arena's memory
            self.arena.displace((self if self._binding is None else call).buffers.values())
        if self._binding is None:
            buffers = {name: self._buffer(name) for name in self._buffer_refs}
            self._binding = self.arena.bind(
                self, self.cycle, buffers, pin_bytes=call.variant.pin_bytes, advice=self._advice
            )
        return self._binding

    def _versions(self) -> dict[str, int]:
        """Return a mapping from the name of each weight in the cycle to the current version of its values."""
        return {name: self._buffer(name).version for name in self._buffer_refs}

    def _buffer(self, name: str) -> HostBuffer:
        buffer = self._buffer_refs[name]()
        assert buffer is not None, "its weights exist"
        return buffer
