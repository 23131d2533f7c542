"""Order: which sequence runs a call.  It is learnt while the programs of an arena run, and planned as one when it repeats.

Every call is recorded by what it reads: a *key* stands for the weights of its regions.  When the same keys have come
twice in the same order, the third pass is planned as one cycle, once, and runs as it: each call runs the program of its
place in the cycle.  Ranks that call the same programs plan them in the same pass.  A call other than the expected one is a
*jump*: it finds its place in the cycle, or in another that is known, or runs its own program.  Whatever ran before, it then
fetches what it needs.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.program.cycle import Cycle, block_of
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.units import size

from .arena import Arena
from .codes import Code, bare
from .cycle_plan import MOST_CALLS, calls_of, common, dump, planned, repeated, serves, turned
from .device import refuse_capture
from .executor import Executor
from .measurement import StepMeasurement
from .sequence import Call, CallKey, Sequence

_log = logging.getLogger(__name__)

# Regions of the longest cycle: 128 blocks of two models, twice a step.  Planning time grows with them.
MOST_REGIONS = 4096
# Cycles that an arena remembers.  Each keeps its plan, and its programs, but no device memory.
_MOST_CYCLES = 8


class Solo(Sequence):
    """A program by itself.  It belongs to the placement of its model, and ends with it.

    ``call``: what it runs and reads.  ``order``: in which it runs.  ``title``: for errors.  ``started``: when.  ``closed``:
    whether it has ended.
    """

    closed = False

    def __init__(self, call: Call, arena: Arena) -> None:
        # with the other programs there
        self.order: Order = _order_of(arena) or Order(arena)
        code, cycle = call.code, Cycle.of(call.program)
        one = call.in_cycle({weight.name: weight.name for weight in call.program.problem.weights})
        super().__init__(arena, [one], call.buffers, code.settings, cycle, advice=code.advice)
        self.call = call
        problem = call.program.problem
        block = next((block for buffer in call.buffers.values() if (block := block_of(buffer.name))), "")
        of = block if call.part and block else "the model"
        self.title = f"{of} ({len(problem.regions)} regions, {len(problem.collectives)} collectives)"
        self.started = time.monotonic()
        self.folder = code.folder
        died = partial(_weight_died, weakref.ref(arena))
        self._weights = [weakref.ref(life, died) for buffer in call.buffers.values() if (life := buffer.life)]

    @property
    def code(self) -> Code:
        return self.call.code

    @property
    def program(self) -> Program:
        return self.call.program

    @property
    def budget(self) -> tuple[int, int | None]:
        return self.call.budget

    @property
    def reads(self) -> tuple[int, ...]:
        return self.call.reads

    @property
    def stale(self) -> bool:
        return self.call.is_stale

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest measured steps of its call, in a cycle too, oldest first; waits for those in flight."""
        if not self.closed:
            self.arena.streams.collect(wait=True)
        return tuple(self.call.measured)

    @property
    def notes(self) -> tuple[str, ...]:
        """For the user, on what was compiled, and on the call as a CUDA graph if it is to be one."""
        return (*self.code.notes, self.call.captures.note) if self.code.cudagraphs else self.code.notes

    @property
    def executor(self) -> Executor:
        """The one outside cycles.  Raises ChunkflowError if the program has ended."""
        if self.closed:
            raise ChunkflowError("This program has ended: call the compiled model again.")
        return self.executor_of(self.call, 0)

    def repeats(self, other: Solo) -> bool:
        """Whether it is the same program on the same weights."""
        mine, theirs = self.call.buffers, other.call.buffers
        same = mine.keys() == theirs.keys() and all(buffer is theirs[name] for name, buffer in mine.items())
        return same and self.program.same_as(other.program)  # last: there are many programs, few on the same weights

    def adopt(self, other: Solo) -> None:
        """Take over the measurements of the program that this one replaces."""
        self.call.measured.extend(other.measurements)
        self.times.whole.extend(other.times.whole)

    def close(self) -> None:
        """Wait for its step and copies in flight, free what it holds, and leave the arena.

        Cycles of its weights free what they hold, too, because they move these weights.  Other cycles stay warm.
        """
        with self.arena.lock():
            if not self.closed:
                try:
                    for sequence in (self, *self.order.cycles_of(self.call)):
                        self.arena.release(sequence)
                finally:  # also after an interrupt: the memory must be released
                    self.closed, self._weights = True, []
                    self.call.let_go()
                    self.arena.remove(self)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weight_died(ref: weakref.ref[Arena], _: object) -> None:
    """Let the next step end the programs that have outlived a weight; the collector may run anywhere."""
    if (arena := ref()) is not None:
        arena.lose_weight()


class Order:
    """The order in which the programs of an arena run.  The caller of its methods holds the arena's lock.

    ``cycles``: those that are known.  ``current``: the one that runs now, if one does.
    """

    def __init__(self, arena: Arena) -> None:
        self.cycles: list[Sequence] = []
        self.current: Sequence | None = None
        self._arena = arena
        self._keys: weakref.WeakValueDictionary[object, CallKey] = weakref.WeakValueDictionary()
        self._history: deque[CallKey] = deque(maxlen=2 * MOST_CALLS + 1)
        self._refused: deque[tuple[CallKey, ...]] = deque(maxlen=4 * _MOST_CYCLES)
        self._unexpected = 0

    def run(self, program: Solo, inputs: Items[Any]) -> Any:
        """Run one step of a program, in the sequence that has its call next."""
        arena, call = self._arena, program.call
        if arena.device.type == "cuda":
            refuse_capture(arena.device)
        arena.refuse_inside()
        if arena.lost_weight:
            arena.close_stale()
        sequence, executor = self._next(program)
        arena.begin_call(program.title)
        try:
            outputs = executor.run(inputs, timed=sequence.replan_after > 0)
        finally:
            arena.end_call()
        call.count(executor.cost)
        if sequence.replan_after:
            self._replan(sequence)
        return outputs

    @property
    def programs(self) -> list[Solo]:
        """Those that run in the arena, oldest first."""
        return [sequence for sequence in self._arena.programs if isinstance(sequence, Solo)]

    def key(self, call: Call) -> CallKey | None:
        """What a call reads, region by region, with the collectives between; None if the user chose its placement."""
        settings, buffers, problem = call.code.settings, call.buffers, call.program.problem
        chosen = settings.policy != "chunkflow" or settings.plan is not None or settings.timings is not None
        if chosen or "cycle" in settings.disabled or not buffers:
            for cycle in self.cycles_of(call):
                self.forget(cycle)
            return None
        regions = [[buffers[name] for name in region.weights if name in buffers] for region in problem.regions]
        read = tuple(tuple(sorted(map(id, region))) for region in regions)
        packed = frozenset(id(buffers[w.name]) for w in problem.weights if w.packed)
        identity = read, packed, tuple((c.kind, c.before, c.until) for c in problem.collectives)
        key = self._keys.get(identity)
        if key is None or not key.alive:
            key = self._keys[identity] = CallKey(itertools.chain(*regions), settings)
        elif bare(key.settings) != bare(settings):
            self._start_anew(key, settings)  # it was planned again for another goal
        key.settings = settings
        return key

    def cycles_of(self, call: Call) -> list[Sequence]:
        """The known cycles that move weights of a call."""
        own = set(map(id, call.buffers.values()))
        return [cycle for cycle in self.cycles if any(id(buffer) in own for buffer in cycle.buffers.values())]

    def forget(self, cycle: Sequence) -> None:
        self._arena.release(cycle)
        self.cycles.remove(cycle)
        if self.current is cycle:
            self.current = None

    def exchange(self, cycle: Sequence, again: Sequence) -> None:
        """Let another plan of a cycle run in its place, from the next pass on."""
        if cycle in self.cycles:
            runs = cycle is self.current
            again.position, again.jumps = cycle.position, cycle.jumps
            self.forget(cycle)
            self._add(again)
            self.current = again if runs else self.current

    def _replan(self, sequence: Sequence) -> None:
        """At the end of a pass, plan from measured times if that is due."""
        try:
            if (timings := sequence.timings_due()) is not None:
                sequence.replan_after = 0
                replan({sequence: timings}, by_itself=True)
        except ChunkflowError as error:  # the current plan still works
            sequence.replan_after = 0
            _log.warning("the current plan is kept: %s", error)

    def _next(self, program: Solo) -> tuple[Sequence, Executor]:
        """The sequence that has a call next, and the executor there."""
        call = program.call
        if call.key is not None and (place := self._place(call, call.key)) is not None:
            cycle, number = place
            try:
                return cycle, cycle.begin(call, number)
            except ChunkflowError as error:  # the program by itself still runs
                _log.warning("%s calls do not run as a cycle: %s", len(cycle.keys), error)
                self._refused.append(cycle.keys)
                self.forget(cycle)
        return program, program.begin(call, 0)

    def _place(self, call: Call, key: CallKey) -> tuple[Sequence, int] | None:
        """The cycle, and the place there, of the call that follows; None if no cycle has it."""
        previous = self._history[-1] if self._history else None
        self._history.append(key)
        if self.current is not None and not self.current.can_bind():
            self._prune()
        current = self.current
        if current is not None and current.keys[current.position] is key:
            self._unexpected = 0
            return current, current.position
        if current is None and key is previous and not call.part:
            return None  # a whole model, again and again
        return self._unforeseen(key, previous, call)

    def _unforeseen(self, key: CallKey, previous: CallKey | None, call: Call) -> tuple[Sequence, int] | None:
        """The place of a call that the current cycle does not expect, or that no cycle runs."""
        self._prune()
        self._unexpected += 1
        if self.current is not None and self._unexpected > len(self.current.keys):
            self.current = None
        if (learnt := self._learn(key)) is not None:
            self.current, self._unexpected = learnt, 0
            return learnt, 0
        for cycle in [c for c in (self.current, *self.cycles) if c is not None]:
            count, other = len(cycle.keys), cycle is not self.current
            places = (number % count for number in range(cycle.position, cycle.position + count))
            number = next((number for number in places if cycle.keys[number] is key), None)  # the expected one first
            if number is None or (other and not call.part and cycle.keys[number - 1] is not previous):
                continue
            off = other or number != cycle.position
            cycle.jumps += off
            if off:
                call.counts.add_jump()
            self.current = cycle
            return cycle, number
        return None

    def _prune(self) -> None:
        """Forget the cycles whose weights no longer exist."""
        for cycle in [c for c in self.cycles if not c.alive]:
            self.forget(cycle)

    def _start_anew(self, key: CallKey, settings: Settings) -> None:
        """Forget what is known of the cycles of a call, but for those that are as good for its new settings."""
        cycles = [c for c in self.cycles if key in c.keys]
        gone = [c for c in cycles if not serves(c, settings)]
        for cycle in gone:
            self.forget(cycle)
        if gone or not cycles:
            self._refused.clear()
            self._history.clear()

    def _learn(self, key: CallKey) -> Sequence | None:
        """Plan the calls since an earlier one of the same weights as a cycle, which begins now: when they have come twice,
        and are more than those of the cycle that runs."""
        current = self.current
        if current is not None and len(self.cycles) >= _MOST_CYCLES:
            return None
        for keys in repeated(list(self._history)):
            planned_before = itertools.chain(self._refused, (cycle.keys for cycle in self.cycles))
            if (current is not None and len(keys) <= len(current.keys)) or any(turned(keys, k) for k in planned_before):
                continue
            if (learnt := self._plan(keys)) is not None:
                return learnt
        return None

    def newest(self, keys: Items[CallKey]) -> list[Call] | None:
        """The newest call of each key, None if its program has ended."""
        newest = {program.call.key: program.call for program in self.programs}
        calls = [newest[key] for key in keys if key in newest]
        return calls if len(calls) == len(keys) else None

    def _plan(self, keys: tuple[CallKey, ...]) -> Sequence | None:
        """Plan a cycle of these calls; None if they cannot be one."""
        calls = self.newest(keys)
        if calls is None or not all(key.alive for key in keys):
            return None
        settings = common(calls)
        regions = sum(len(call.program.problem.regions) for call in calls)
        again = any(a is b and not c.part for a, b, c in zip(keys, (*keys[1:], keys[0]), calls, strict=True))
        if settings is None or regions > MOST_REGIONS or again:  # again: a whole model, which is a cycle already
            self._refused.append(keys)
            return None
        try:
            cycle = planned(self._arena, keys, *calls_of(calls), settings)
        except ChunkflowError as error:
            self._refused.append(keys)
            _log.warning(
                "%s calls repeat, but each runs under its own plan and fetches its weights when it starts: %s",
                len(keys),
                error,
            )
            return None
        cycle.replan_after = max(call.code.replan_after for call in calls)
        self._add(cycle)
        return cycle

    def _add(self, cycle: Sequence) -> None:
        """Know a cycle."""
        for old in [c for c in self.cycles if c is not self.current][: max(0, len(self.cycles) + 1 - _MOST_CYCLES)]:
            self.forget(old)
        self.cycles.append(cycle)
        dump(cycle, self.newest(cycle.keys) or ())
        plan = cycle.plan
        _log.info("%s calls repeat and run as a cycle: %s on the device", len(cycle.keys), size(plan.device_bytes))


def _order_of(arena: Arena) -> Order | None:
    """That of the programs in an arena, which ends with the last of them."""
    return next((program.order for program in arena.programs if isinstance(program, Solo)), None)


def replan(
    sequences: Mapping[Sequence, Timings | None], goal: Mapping[str, Any] | None = None, by_itself: bool = False
) -> None:
    """Give sequences other plans, which are proved, from their next pass on.  The caller holds the locks of their arenas.

    ``sequences``: each with the times to plan from, the largest of all ranks that run it; None for those that it has.
    ``goal``: settings, None for those that they have.  ``by_itself``: whether no user asked for it; then a plan that places
    the weights as before is left out, and one that cannot start is logged.
    Raises ChunkflowError, and changes nothing, if there is no such plan.
    """
    swaps, remade = list[partial[None]](), dict[tuple[Code, Timings | None], Code]()
    for sequence, timings in sequences.items():
        change = {**(goal or {}), **({} if timings is None else {"timings": timings})}
        if isinstance(sequence, Solo):
            current = sequence.call.current
            key = current.code, timings  # blocks of one kind share their code
            code = remade[key] = remade.get(key) or current.code.remade(**change)
            plan, swap = code.program.plan, partial(current.run, code, by_itself)
        else:
            order = _order_of(sequence.arena)
            calls = None if order is None else order.newest(sequence.keys)
            if order is None or calls is None or (settings := common(calls)) is None:
                raise ChunkflowError("A program of this cycle has ended since it was measured: call the model again.")
            settings = replace(settings, **(goal or {}))
            again = planned(sequence.arena, sequence.keys, sequence.calls, sequence.buffers, settings, timings)
            plan, swap = again.plan, partial(order.exchange, sequence, again)
        if not by_itself or plan.placement != sequence.plan.placement:
            swaps.append(swap)
    for swap in swaps:
        swap()
