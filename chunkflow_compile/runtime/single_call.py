"""Single calls: programs that run alone, or as part of a cycle that the order of their arena has found."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import BudgetError, ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.program.cycle import Cycle, block_of
from chunkflow_compile.passes.program.rewrite import Program

from .arena import Arena
from .bound_cycle import BoundCycle
from .call_site import CallKey, CallSite
from .codes import Code
from .cycle_plan import merge_settings, planned
from .device import check_kind, refuse_capture
from .executor import Executor
from .measurement import StepMeasurement
from .order import Order
from .rows import Table

_log = logging.getLogger(__name__)


class SingleCall(BoundCycle):
    """A program that can run alone: a cycle of one call.  It belongs to the placement of its model, and ends with it.

    ``call``: its call site.  ``key``: the key of the call; None if it is never part of another cycle.  ``order``: decides
    which cycle runs the call.  ``title``: its name in errors.  ``started``: the time of its creation.  ``closed``: whether it
    has ended.  ``table``: the table of the rows that it has computed, if it is a preamble.
    """

    closed = False

    def __init__(self, call: CallSite, arena: Arena) -> None:
        code, cycle = call.code, Cycle.of(call.program)
        one = call.in_cycle({weight.name: weight.name for weight in call.program.problem.weights})
        super().__init__(arena, [one], call.buffers, code.settings, cycle, advice=code.advice)
        self.call = call
        self.key: CallKey | None = None
        self.table: Table | None = None
        self.order = order_of(arena) or Order(arena)  # shared with the other programs of the arena
        problem = call.program.problem
        block = next((block for buffer in call.buffers.values() if (block := block_of(buffer.name))), "")
        of = block if call.part and block else "the model"
        self.title = f"{of} ({len(problem.regions)} regions, {len(problem.collectives)} collectives)"
        self.started = time.monotonic()
        self.folder = code.folder
        died = partial(_weight_died, weakref.ref(arena))
        self._weights = [weakref.ref(token, died) for buffer in call.buffers.values() if (token := buffer.token)]

    def start(self) -> None:
        """Enter the arena and its order, and bind to the arena's memory.  The caller holds the arena's lock.

        Raises ChunkflowError if the device does not have enough memory, or if the program is not safe in one arena with
        another program.  The program then leaves the arena.
        """
        code = self.code
        if code.verified:
            self.arena.prove(self.program)
        self.arena.add(self, code.kind)
        try:
            self.key = self.order.add(self.call)
            if not (self.call.part and self.key):  # else its cycle is re-planned instead
                self.replan_after = code.replan_after
            self.executor_of(self.call, 0)
        except BaseException:
            self.close()
            raise
        self.call.counts.add_program()

    @property
    def code(self) -> Code:
        return self.call.code

    @property
    def program(self) -> Program:
        return self.call.program

    @property
    def preamble(self) -> bool:
        """Whether it computes inputs of a main program (hoisted.py), and is planned together with it."""
        return self.code.settings.preamble

    @property
    def budget(self) -> tuple[int, int | None] | None:
        return self.call.budget

    @property
    def reads(self) -> tuple[int, ...]:
        return self.call.reads

    @property
    def stale(self) -> bool:
        return self.call.is_stale

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The latest measured steps of its call, alone or in a cycle, oldest first.  Waits for steps in flight."""
        if not self.closed:
            self.arena.streams.collect(wait=True)
        return tuple(self.call.measured)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about the compilation, and about the CUDA graph of the call if the option asks for it."""
        return (*self.code.notes, self.call.captures.note) if self.code.cudagraphs else self.code.notes

    @property
    def executor(self) -> Executor:
        """The executor for running alone.  Raises ChunkflowError if the program has ended."""
        if self.closed:
            raise ChunkflowError("This program has ended: call the compiled model again.")
        return self.executor_of(self.call, 0)

    def run(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Run one step, as part of a cycle if one contains the call, or else alone.  The caller holds the arena's lock.

        ``rows``: see :meth:`Executor.run`.  Raises ChunkflowError if there are several rows and the program has a collective,
        or if the rows differ in the shape of an input.
        """
        arena, call = self.arena, self.call
        if len(rows) > 1:
            self._check_rows(rows)
        if arena.device.type == "cuda":
            refuse_capture(arena.device)
        arena.refuse_inside()
        if arena.lost_weight:
            arena.close_stale()
            self.order.prune()
        placed = None if self.key is None else self.order.advance(call, self.key)
        cycle, executor = placed or (self, self.begin(call, 0))
        arena.begin_call(self.title)
        try:
            outputs = executor.run(rows, timed=cycle.replan_after > 0)
        finally:
            arena.end_call()
        call.count(executor.cost)
        if cycle.replan_after and len(rows) == 1:  # a pass of several rows is not measured
            _replan_if_due(cycle)
        return outputs

    def _check_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Raise ChunkflowError if these rows cannot be computed in one pass."""
        if self.program.problem.collectives:
            raise ChunkflowError(
                f"A pass over {self.title} computes one row only, because its collectives are issued once per pass: run "
                f"the {len(rows)} rows one by one."
            )
        for number, row in enumerate(rows):
            for position, (one, other) in enumerate(zip(rows[0], row, strict=True)):
                if one is not other and (expected := _shape(one)) != (found := _shape(other)):
                    raise ChunkflowError(
                        f"Rows of one pass need inputs of equal shapes, but input {position} is {expected} in row 0 and "
                        f"{found} in row {number}: run them in two passes."
                    )

    def repeats(self, other: SingleCall) -> bool:
        """Whether this is the same program on the same weights as ``other``."""
        mine, theirs = self.call.buffers, other.call.buffers
        same = mine.keys() == theirs.keys() and all(buffer is theirs[name] for name, buffer in mine.items())
        return same and self.program.same_as(other.program)  # last, because few programs are on the same weights

    def adopt(self, other: SingleCall) -> None:
        """Take over the measurements of the program that this one replaces."""
        self.call.measured.extend(other.measurements)
        self.times.whole.extend(other.times.whole)

    def close(self) -> None:
        """Wait for its work in flight, free its memory, and leave the arena.

        Cycles that copy its weights also free their memory.  Other cycles stay warm.
        """
        with self.arena.lock():
            if not self.closed:
                try:
                    for cycle in (self, *self.order.cycles_of(self.call)):
                        self.arena.release(cycle)
                finally:  # also after an interrupt: the memory must be released
                    self.closed, self._weights, self.table = True, [], None
                    self.order.remove(self.call)
                    self.call.let_go()
                    self.arena.remove(self)


def _shape(value: Any) -> str:
    """The properties of an input that must be equal in all rows of a pass: for a tensor, all except its values."""
    if isinstance(value, torch.Tensor):
        return f"{[*value.shape]} in {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return str(value) if isinstance(value, int) else type(value).__name__


def bind_program(call: CallSite, arena: Arena) -> SingleCall:
    """Make a program for a call, and bind it to the memory of an arena.

    Raises ChunkflowError if the device does not have enough memory, or if the program is not safe in one arena with another
    program.
    """
    code = call.code
    check_kind(arena.device, code.kind)
    refuse_capture(arena.device)
    with arena.lock():
        program = SingleCall(call, arena)
        program.start()
    return program


def order_of(arena: Arena) -> Order | None:
    """The order of the programs in an arena, or None if there are none.  It ends with the last program."""
    return next((program.order for program in arena.programs if isinstance(program, SingleCall)), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weight_died(ref: weakref.ref[Arena], _: object) -> None:
    """Make the next step end the programs that have lost a weight.  This runs in the garbage collector, so it does no
    more."""
    if (arena := ref()) is not None:
        arena.lose_weight()


def _replan_if_due(cycle: BoundCycle) -> None:
    """Re-plan from measured times at the end of a pass, if that is due."""
    try:
        if (timings := cycle.timings_due()) is not None:
            replan({cycle: timings}, by_itself=True)
    except ChunkflowError as error:  # the current plan still works
        _log.warning("the current plan is kept: %s", error)


def replan(
    cycles: Mapping[BoundCycle, Timings | None], goal: Goal | None = None, *, by_itself: bool = False, **settings: Any
) -> None:
    """Give cycles new plans, which are verified, from their next pass on.  The caller holds the locks of their arenas.

    ``cycles``: the cycles with the times to plan from, which are the maxima over all ranks that run them; None keeps the
    times that a cycle was planned with.  ``goal``: the new goal; None keeps the goal of each cycle.  ``settings``: other
    settings to change, by name.  ``by_itself``: whether the re-planning is automatic.  In that case a plan that places the
    weights as before is ignored, and a failure to start a new plan is logged instead of raised.
    Raises ChunkflowError, and changes nothing, if no plan meets the goal: the BudgetError of the program that needs
    most.
    """
    swaps, remade = list[partial[None]](), dict[tuple[Code, Timings | None], Code]()
    short: BudgetError | None = None  # of the program that needs most
    for cycle, timings in cycles.items():
        change = {**settings, **({} if timings is None else {"timings": timings})}
        if isinstance(cycle, SingleCall):
            current = cycle.call.current
            key = current.code, timings  # blocks of one type share their code
            if goal is not None:
                change["goal"] = current.code.settings.goal.aimed_at(goal)
            try:
                code = remade[key] = remade.get(key) or current.code.remade(**change)
            except BudgetError as error:
                short = max(short or error, error, key=lambda e: e.needed)
                continue
            plan, swap = code.program.plan, partial(current.run, code, by_itself)
        else:
            order = order_of(cycle.arena)
            calls = None if order is None else order.latest_calls(cycle.keys)
            if order is None or calls is None or (merged := merge_settings(calls)) is None:
                raise ChunkflowError("A program of this cycle has ended since it was measured: call the model again.")
            merged = replace(merged, goal=merged.goal.aimed_at(goal), **settings)
            again = planned(cycle.arena, cycle.keys, cycle.calls, cycle.buffers, merged, timings)
            plan, swap = again.plan, partial(order.swap_plan, cycle, again)
        if not by_itself or plan.placement != cycle.plan.placement:
            swaps.append(swap)
    if short is not None:
        raise short
    for swap in swaps:
        swap()
