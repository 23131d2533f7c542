"""The prologue after writes to weights: between two waits for all copies, those that these weights need."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_cycles import CycleBench, Drawn, cycles
from random_programs import examples

from chunkflow_compile.passes.forms import resident
from chunkflow_compile.passes.names import LANES
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.step import Copy, Evict, Record, Wait, copies

pytestmark = pytest.mark.usefixtures("one_rank")


def alive(cycle: Cycle, call: int) -> list[Copy]:
    """The copies whose weights are not evicted yet, in the order of issue, before a call of the second of two passes."""
    found = list[tuple[int, Copy]]()  # with the pass that a copy serves
    calls = [(number, ops) for number in range(2) for ops in cycle.ops][: len(cycle.calls) + call]
    for number, op in ((number, op) for number, ops in calls for op in ops):
        if isinstance(op, Copy):
            found.append((number + op.next_step, op))
        elif isinstance(op, Evict):
            found = [(serves, copy) for serves, copy in found if (serves, copy.weight) != (number, op.weight)]
    return [copy for _, copy in found]


def test_rewritten_weights_are_copied_as_a_pass_without_jumps_has_them() -> None:
    seen = set[tuple[bool, bool]]()

    @examples(0, 6)
    @given(cycles, st.integers(0, 2**16))
    def check(drawn: Drawn, seed: int) -> None:
        cycle, rng = CycleBench(drawn).cycle, random.Random(seed)
        names = [w.name for w in cycle.plan.streamed]
        stale = rng.sample(names, rng.randint(min(1, len(names)), len(names)))
        handover = [Record("compute", cycle.events.handover), *(Wait(lane, cycle.events.handover) for lane in LANES)]
        for call in range(len(cycle.calls) if stale else 0):
            ops, all_copies = cycle.prologue(call, stale=stale), cycle.events.join(LANES)
            expected = [op for op in (*resident(cycle.plan), *alive(cycle, call)) if op.weight in stale]
            assert list(copies(ops)) == expected
            assert ops[: len(all_copies) + len(handover)] == (*all_copies, *handover)
            assert ops[-len(all_copies) :] == all_copies
            seen.update((op.window is None, op.next_step) for op in expected)

    check()
    assert len(seen) == 3, "resident chunks, and copies for this pass and for the next one"
