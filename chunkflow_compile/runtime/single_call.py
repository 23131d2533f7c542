"""Single calls: programs that run alone, or as part of a cycle that the :class:`Order` of the arena has found."""

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
from .cycle_plan import merge_settings, plan_cycle
from .device import check_kind, check_no_capture
from .executor import Executor
from .measurement import StepMeasurement
from .order import Order
from .rows import Table
from .variants import Variant

_log = logging.getLogger(__name__)


class SingleCall(BoundCycle):
    """A program that can run alone: a cycle of one call.  The program ends at the latest when the placement of its model
    ends.

    ``call``: the call site.  ``key``: the key of the call; None if the call cannot be part of a longer cycle.  ``order``:
    the object that decides which cycle runs the call.  ``title``: the name of the program in error messages.  ``started``:
    the value of time.monotonic() when this object was created.  ``closed``: whether the program has ended.  ``table``: if
    the program is a preamble, the table of the rows that the program has computed; otherwise None.
    """

    closed = False

    def __init__(self, call: CallSite, arena: Arena) -> None:
        variant, cycle = call.variant, Cycle.of(call.program)
        one = call.in_cycle({weight.name: weight.name for weight in call.program.problem.weights})
        super().__init__(arena, [one], call.buffers, variant.settings, cycle, advice=variant.advice)
        self.call = call
        self.key: CallKey | None = None
        self.table: Table | None = None
        self.order = order_of(arena) or Order(arena)  # shared with the other programs of the arena
        problem = call.program.problem
        block = next((block for buffer in call.buffers.values() if (block := block_of(buffer.name))), "")
        of = block if call.part and block else "the model"
        self.title = f"{of} ({len(problem.regions)} regions, {len(problem.collectives)} collectives)"
        self.started = time.monotonic()
        self.folder = variant.folder
        died = partial(_weight_died, weakref.ref(arena))
        self._weights = [weakref.ref(token, died) for buffer in call.buffers.values() if (token := buffer.token)]

    def start(self) -> None:
        """Register this program with the arena and with the order of the arena, and bind the program to the arena's memory.
        The caller holds the arena's lock.

        Raises ChunkflowError if the device does not have enough memory, or if this program cannot safely share the arena
        with another program.  In both cases, the program is removed from the arena.
        """
        variant = self.variant
        if variant.verified:
            self.arena.tenants.prove(self.program)
        self.arena.add(self, variant.kind)
        try:
            self.key = self.order.add(self.call)
            if not (self.call.part and self.key):  # a part of a model is re-planned with its cycle
                self.replan_after = variant.replan_after
            self.executor_of(self.call, 0)
        except BaseException:
            self.close()
            raise
        self.call.counts.add_program()

    @property
    def variant(self) -> Variant:
        return self.call.variant

    @property
    def program(self) -> Program:
        return self.call.program

    @property
    def preamble(self) -> bool:
        """Whether this program is a preamble, which computes inputs of a main program (hoisted.py)."""
        return self.variant.settings.preamble

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
        """The measurements of the latest steps of the call, oldest first.  They include steps that were part of a cycle.
        Waits for steps in flight."""
        if not self.closed:
            self.arena.streams.collect(wait=True)
        return tuple(self.call.measured)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about the compilation and, if the option ``cudagraphs`` is set, about the CUDA graph of the
        call."""
        return (*self.variant.notes, self.call.captures.note) if self.variant.cudagraphs else self.variant.notes

    @property
    def executor(self) -> Executor:
        """The executor that runs the program alone.  Raises ChunkflowError if the program has ended."""
        if self.closed:
            raise ChunkflowError("This program has ended: call the compiled model again.")
        return self.executor_of(self.call, 0)

    def run(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Run one step; return the outputs of each row.  If a cycle contains the call, the step is part of this cycle;
        otherwise the program runs alone.  The caller holds the arena's lock.

        ``rows``: see :meth:`Executor.run`.  If there are several rows, raises ChunkflowError if the program has a collective,
        or if an input does not have the same shape in all rows.
        """
        arena, call = self.arena, self.call
        if len(rows) > 1:
            self._check_rows(rows)
        if arena.device.type == "cuda":
            check_no_capture(arena.device)
        arena.check_not_inside()
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
        if cycle.replan_after and len(rows) == 1:  # a step with several rows is not measured
            _replan_if_due(cycle)
        return outputs

    def _check_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Raise ChunkflowError if one pass cannot compute all ``rows``."""
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
        """Return whether this program and ``other`` are the same program on the same weights."""
        mine, theirs = self.call.buffers, other.call.buffers
        same = mine.keys() == theirs.keys() and all(buffer is theirs[name] for name, buffer in mine.items())
        return same and self.program.same_as(other.program)  # compared last, because few programs read the same weights

    def adopt(self, other: SingleCall) -> None:
        """Copy the measurements of ``other``, which this program replaces."""
        self.call.measured.extend(other.measurements)
        self.times.complete.extend(other.times.complete)

    def close(self) -> None:
        """Wait for work of this program in flight, free the memory of the program, and remove the program from the arena.

        Cycles that contain weights of this program are also unbound; all other cycles stay bound.
        """
        with self.arena.lock():
            if not self.closed:
                try:
                    for cycle in (self, *self.order.cycles_of(self.call)):
                        self.arena.release(cycle)
                finally:  # this must also happen after a Ctrl-C
                    self.closed, self._weights, self.table = True, [], None
                    self.order.remove(self.call)
                    self.call.drop_weights()
                    self.arena.remove(self)


def _shape(value: Any) -> str:
    """Describe the properties of an input that must be equal in all rows of a pass: the shape, dtype and device of a tensor,
    the value of an integer, or the type of any other input."""
    if isinstance(value, torch.Tensor):
        return f"{[*value.shape]} in {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return str(value) if isinstance(value, int) else type(value).__name__


def bind_program(call: CallSite, arena: Arena) -> SingleCall:
    """Make a program for a call site, and bind the program to the memory of an arena.

    Raises ChunkflowError if the device does not have enough memory, or if this program cannot safely share the arena with
    another program.
    """
    variant = call.variant
    check_kind(arena.device, variant.kind)
    check_no_capture(arena.device)
    with arena.lock():
        program = SingleCall(call, arena)
        program.start()
    return program


def order_of(arena: Arena) -> Order | None:
    """Return the order that the programs of an arena share; None if the arena has no programs."""
    return next((program.order for program in arena.programs if isinstance(program, SingleCall)), None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weight_died(ref: weakref.ref[Arena], _: object) -> None:
    """Record that a weight no longer exists.  The next call ends the programs that need the weight.  This function does not
    end them, because the garbage collector calls it."""
    if (arena := ref()) is not None:
        arena.lose_weight()


def _replan_if_due(cycle: BoundCycle) -> None:
    """If a pass has ended and re-planning is due, re-plan the cycle from measured times."""
    try:
        if (timings := cycle.timings_due()) is not None:
            replan({cycle: timings}, by_itself=True)
    except ChunkflowError as error:  # the current plan still works
        _log.warning("the current plan is kept: %s", error)


def replan(
    cycles: Mapping[BoundCycle, Timings | None], goal: Goal | None = None, *, by_itself: bool = False, **settings: Any
) -> None:
    """Re-plan cycles.  The new plans are verified, and apply from the next pass on.  The caller holds the locks of the
    arenas.

    ``cycles``: cycle -> the times to plan from, as maxima over all ranks that run the cycle.  With None, a program that runs
    alone is planned from the same times as before, and a longer cycle is planned from the hardware profile.  ``goal``: the
    new goal; None keeps the goal of each cycle.  ``settings``: other settings to change, by name.  ``by_itself``: whether the
    re-planning is automatic.  If it is, a new plan that places all weights as before is ignored, and an error that occurs
    when a new plan is started is logged instead of raised.

    Raises ChunkflowError, and changes nothing, if no plan meets the goal.  If the budget is too small for several programs,
    the BudgetError of the program with the largest minimum budget is raised.
    """
    swaps, remade = list[partial[None]](), dict[tuple[Variant, Timings | None], Variant]()
    short: BudgetError | None = None  # the error of the program with the largest minimum budget
    for cycle, timings in cycles.items():
        change = {**settings, **({} if timings is None else {"timings": timings})}
        if isinstance(cycle, SingleCall):
            active = cycle.call.active
            key = active.variant, timings  # blocks of one type share a variant, so it is remade only once
            if goal is not None:
                change["goal"] = active.variant.settings.goal.aimed_at(goal)
            try:
                variant = remade[key] = remade.get(key) or active.variant.remade(**change)
            except BudgetError as error:
                short = max(short or error, error, key=lambda e: e.needed)
                continue
            plan, swap = variant.program.plan, partial(active.run, variant, by_itself)
        else:
            order = order_of(cycle.arena)
            calls = None if order is None else order.latest_calls(cycle.keys)
            if order is None or calls is None or (merged := merge_settings(calls)) is None:
                raise ChunkflowError("A program of this cycle has ended since it was measured: call the model again.")
            merged = replace(merged, goal=merged.goal.aimed_at(goal), **settings)
            again = plan_cycle(cycle.arena, cycle.keys, cycle.calls, cycle.buffers, merged, timings)
            plan, swap = again.plan, partial(order.swap_plan, cycle, again)
        if not by_itself or plan.placement != cycle.plan.placement:
            swaps.append(swap)
    if short is not None:
        raise short
    for swap in swaps:
        swap()
