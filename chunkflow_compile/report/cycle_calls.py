"""A table of the calls in a cycle.

For each call, the table shows the bytes that the call copies for its own regions, the bytes that it copies for the calls
after it, and the bytes that have to be copied before a jump to the call.
"""

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
    """The figures of one call in a cycle.

    ``number``: the position of the call in the cycle.  ``block``: the block that contains the first region of the call.
    ``windows``: the number of windows in the call.
    ``own_bytes``: the bytes that the call copies for its own regions.  ``ahead_bytes``: the bytes that the call prefetches
    for the calls after it.  ``jump_bytes``: the bytes that have to be copied before a jump to the call, if the resident
    chunks are already on the device.
    """

    number: int
    block: str
    windows: int
    own_bytes: int
    ahead_bytes: int
    jump_bytes: int


def call_figures(cycle: Cycle) -> Iterator[CallFigures]:
    """Yield the figures of each call, in the order of the cycle."""
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
