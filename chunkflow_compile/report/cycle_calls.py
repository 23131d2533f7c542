"""The calls of a cycle: the bytes that each copies for itself and for later calls, and the bytes that a jump to it copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.step import Copy, copies
from chunkflow_compile.units import size


@dataclass(frozen=True, kw_only=True)
class CallFigures:
    """One call of a cycle.  ``block``: block of its first region.  ``windows``: number of its windows.

    ``own_bytes``: bytes that it copies for itself.  ``ahead_bytes``: bytes that it prefetches for later calls.
    ``jump_bytes``: bytes that a jump to it copies first, if the resident chunks are already on the device.
    """

    number: int
    block: str
    windows: int
    own_bytes: int
    ahead_bytes: int
    jump_bytes: int


def call_figures(cycle: Cycle) -> Iterator[CallFigures]:
    """The figures of each call, in order."""
    plan = cycle.plan
    first = {w.name: w.first_use for w in plan.streamed}
    ends = [*cycle.starts[1:], len(plan.regions)]
    for number, (begin, end, ops) in enumerate(zip(cycle.starts, ends, cycle.ops, strict=True)):
        fetched = list(copies(ops))
        own = [op for op in fetched if not op.next_step and begin <= first[op.weight] < end]
        yield CallFigures(
            number=number,
            block=plan.regions[begin].block,
            windows=end - begin,
            own_bytes=_copied_bytes(plan, own),
            ahead_bytes=_copied_bytes(plan, fetched) - _copied_bytes(plan, own),
            jump_bytes=_copied_bytes(plan, copies(cycle.prologue(number, jumps=True))),
        )


def calls_table(calls: Sequence[CallFigures]) -> str:
    rows = [(c.number, c.block, c.windows, size(c.own_bytes), size(c.ahead_bytes), size(c.jump_bytes)) for c in calls]
    headers = ("call", "block", "windows", "fetches for itself", "for later calls", "a jump to it fetches")
    return str(tabulate(rows, headers=headers, disable_numparse=True))


def _copied_bytes(plan: Plan, ops: Iterable[Copy]) -> int:
    weights = {w.name: w for w in plan.streamed}
    return sum(plan.nbytes(weights[op.weight], op.first, op.end) for op in ops)
