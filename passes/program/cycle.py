"""Cycle: programs that run one after the other, repeatedly, under one plan.

A whole model is a cycle of one call.  There are cycles of several calls, too: blocks that are compiled separately, the parts
of a model before and after a graph break, and models that alternate.  The calls of a cycle are planned as one Problem, so the
last windows of a call prefetch weights for the next call, and the last windows of the last call prefetch weights for the
first call.

    problem_of  the Problem of the calls, in their order
    write       the program of each call, with the transfers of its windows
    prologue    the ops before a call at a cold start, at a jump to the call, and after weights were written
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

from torch.fx import Node

from chunkflow_compile.passes.forms import CallEvents, prologue, resident
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.ops import prefetch_of
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Collective, Problem, Region, Weight
from chunkflow_compile.passes.step import Copy, Step, Transfers, marks, order, transfers

from .rewrite import CyclePlace, Program, rewrite

# Matches the beginning of a weight's name up to the first index, such as "blocks.0".  It identifies an element of the
# outermost ModuleList.
_BLOCK_PREFIX = re.compile(r"[^\d(]*?\.\d+(?=\.)")


@dataclass(frozen=True)
class Call:
    """A call of a cycle.  ``cut``: regions of the graph that the call runs.  The graph may have been compiled for another
    block, so its weights can have other names than in the cycle.

    ``names``: for each weight of the graph, its name in the cycle.  ``keep``: a mapping from a weight's name in the cycle to
    the reason why this weight must stay on the device.  ``in_files``: names, in the cycle, of the weights that are in files
    on the SSD.  ``live``: peak activation bytes, as the maximum over all input sizes that this call has had so far; each
    region is planned with at least this number of bytes.
    """

    cut: Cut
    names: Mapping[str, str]
    keep: Mapping[str, str]
    in_files: frozenset[str] = frozenset()
    live: int = 0

    def problem(self) -> Problem:
        """Return the problem of the graph, with the names that weights have in the cycle."""
        problem = self.cut.problem
        regions = tuple(self._region(r) for r in problem.regions)
        return replace(problem, regions=regions, weights=tuple(self._weight(w) for w in problem.weights))

    def _region(self, region: Region) -> Region:
        weights = tuple(self.names[w] for w in region.weights)
        return replace(region, weights=weights, block=self._block(region), live=max(region.live, self.live))

    def _block(self, region: Region) -> str:
        """Return the block of a region according to the names of its weights in the cycle."""
        blocks = {block_of(self.names[name]) for name in region.weights}
        return blocks.pop() if len(blocks) == 1 else region.block

    def _weight(self, weight: Weight) -> Weight:
        name = self.names[weight.name]
        keep = weight.keep or self.keep.get(name)
        source = replace(weight.source, file=name in self.in_files)
        return replace(weight, name=name, names=(name,), keep=keep, source=source)


@dataclass(frozen=True)
class Cycle:
    """The programs of a cycle, in order, with the problem and the plan of the whole cycle.  ``starts``: first window of
    each program."""

    problem: Problem
    plan: Plan
    calls: tuple[Program, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(program: Program | Cycle) -> Cycle:
        """Return a program as a cycle of one call.  A cycle is returned unchanged."""
        if isinstance(program, Cycle):
            return program
        return Cycle(program.problem, program.plan, (program,), (0,))

    @cached_property
    def step(self) -> Step:
        """The step of the plan: the ops of all calls."""
        return order(self.problem, self.plan)

    @cached_property
    def transfers(self) -> Transfers:
        """The transfer ops of :attr:`step`, grouped by the Run or Start that they precede or follow."""
        return transfers(self.step)

    @cached_property
    def ops(self) -> tuple[Step, ...]:
        """The ops that each call issues."""
        return tuple(call.ops for call in self.calls)

    @cached_property
    def events(self) -> CallEvents:
        """The events that prologues and joins use."""
        return CallEvents.of(self._issued)

    @property
    def signals(self) -> Step:
        """The ops that record events or wait for them.  Cycles can share events if these ops are equal."""
        return marks(self._issued)

    def prologue(
        self, call: int, lanes: Sequence[Lane] = LANES, stale: Collection[str] | None = None, *, jumps: bool = False
    ) -> Step:
        """Return the ops to issue before a call, see :func:`forms.prologue`."""
        begin = sum(map(len, self.ops[:call]))
        return prologue(self._issued, begin, self._kept, lanes, self.events, stale, jumps=jumps)

    @cached_property
    def _issued(self) -> Step:
        return tuple(chain.from_iterable(self.ops))

    @cached_property
    def _kept(self) -> tuple[Copy, ...]:
        return resident(self.plan)

    def at(self, call: int, program: Program) -> Cycle:
        """Return this cycle with ``program`` as the program of a call."""
        return replace(self, calls=(*self.calls[:call], program, *self.calls[call + 1 :]))


def block_of(weight: str) -> str:
    """Return the name of the block that contains a weight, according to the name of the weight.  The result is empty if
    the weight is not in a block."""
    prefix = _BLOCK_PREFIX.match(weight)
    return prefix[0] if prefix is not None else ""


def problem_of(calls: Sequence[Call]) -> Problem:
    """Return the joint problem of calls.  A weight that several calls read occurs once in this problem."""
    regions, collectives = list[Region](), list[Collective]()
    weights: dict[str, Weight] = {}
    ranks = 1
    for number, call in enumerate(calls):
        start, problem = len(regions), call.problem()
        ranks = max(ranks, problem.ranks)
        for region in problem.regions:
            index = start + region.index
            regions.append(replace(region, index=index, name=f"region_{index}"))
        for c in problem.collectives:
            name = collective_name(number, c.name)
            collectives.append(replace(c, name=name, before=start + c.before, until=start + c.until))
        for weight in problem.weights:
            uses = tuple(start + use for use in weight.uses)
            known = weights.get(weight.name)
            if known is None:
                weights[weight.name] = replace(weight, index=len(weights), uses=uses)
            else:
                weights[weight.name] = replace(known, uses=known.uses + uses, keep=known.keep or weight.keep)
    return Problem(regions=tuple(regions), collectives=tuple(collectives), weights=tuple(weights.values()), ranks=ranks)


def ends_of(calls: Sequence[Call]) -> tuple[int, ...]:
    """Return, for each call of a cycle, the number of regions up to its end."""
    return tuple(accumulate(len(call.cut.regions) for call in calls))


def write(calls: Sequence[Call], plan: Plan, *, share: bool = True) -> Cycle:
    """Write the programs of ``calls`` under a plan that was made for their joint problem (:func:`problem_of`)."""
    problem = problem_of(calls)
    plan.check_problem(problem, ends_of(calls))
    cycle = Cycle(problem, plan, (), (0, *ends_of(calls)[:-1]))
    programs = (rewritten(cycle, number, call, share=share) for number, call in enumerate(calls))
    return replace(cycle, calls=tuple(programs))


def rewritten(cycle: Cycle, number: int, call: Call, *, share: bool = True) -> Program:
    """Write the program of ``call`` as call ``number`` of a cycle.  The new program may replace the program of a call in the
    cycle if the graph of that call has the same regions and weights."""
    index = {c.name: i for i, c in enumerate(cycle.problem.collectives)}
    names = {c.name: collective_name(number, c.name) for c in call.cut.problem.collectives}
    collectives = {name: index[of_cycle] for name, of_cycle in names.items() if of_cycle in index}
    place = CyclePlace(call.problem(), call.names, cycle.transfers, cycle.starts[number], collectives)
    return rewrite(call.cut, cycle.plan, share=share, place=place)


def collective_name(call: int, name: str) -> str:
    """Return the name that a call's collective has in the problem of the cycle."""
    return f"call_{call}.{name}"


def prefetches(program: Program) -> Iterator[tuple[Node, Copy]]:
    """Yield the prefetch nodes of a program with their copies, in the order of issue."""
    for node in program.module.graph.nodes:
        if (op := prefetch_of(node)) is not None:
            yield node, op.copy
