"""Several sets of inputs in one pass over the weights: each row gets what a call of its own gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EAGER, WRAPS
from fake_cuda import FakeCuda
from helpers import Coalesced, Stack, twins
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, cycles, programs
from chunkflow_compile.passes.program.rewrite import issued
from chunkflow_compile.runtime.cuda_graphs import PASSES
from chunkflow_compile.runtime.graph import CompiledGraph
from chunkflow_compile.runtime.instructions import instructions
from chunkflow_compile.runtime.single_call import SingleCall

DEVICES = pytest.mark.parametrize("debug", ["poison", ("poison", "threads")], ids=["cpu", "threads"])


class Rows:
    """A compiled model that has run once, and its compiled graph.  ``inputs``: of the graph, those of the model replaced."""

    def __init__(self, make: Callable[[], nn.Module], *given: torch.Tensor, **options: Any) -> None:
        self.model, self.twin = twins(make)
        self.call = torch.compile(self.model, backend="chunkflow", fullgraph=True, options={**EAGER, **options})
        seen: list[tuple[CompiledGraph, list[Any]]] = []
        whole = CompiledGraph.__call__

        def spy(graph: CompiledGraph, inputs: list[Any]) -> Any:
            seen.append((graph, [*inputs]))
            return whole(graph, inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CompiledGraph, "__call__", spy)
            self.call(*given)
        ((self.graph, inputs),) = seen
        self.inputs = [next((i for i, x in enumerate(given) if x is value), value) for value in inputs]

    @property
    def program(self) -> SingleCall:
        (found,) = programs(self.model)
        return found

    def row(self, *given: Any) -> list[Any]:
        """The inputs of the graph for those of the model."""
        return [given[value] if isinstance(value, int) else value for value in self.inputs]

    def run(self, *xs: torch.Tensor) -> list[Any]:
        """Run one step whose rows have one input each."""
        return self.run_rows([self.row(x) for x in xs])

    def run_rows(self, rows: list[list[Any]]) -> list[Any]:
        with self.graph.ready(rows[0]) as program:
            return program.run(rows)

    def equal(self, found: list[Any], *xs: torch.Tensor) -> bool:
        """Whether the outputs of rows are the twin's, bit for bit."""
        return all(torch.equal(row[0], self.twin(x)) for row, x in zip(found, xs, strict=True))

    def check(self) -> None:
        """Three rows in one pass have the twin's numbers, for the bytes of one pass."""
        xs = torch.randn(3, 4, 8)
        assert self.equal(self.run(*xs), *xs)
        assert self.program.executor.cost.moved == self.program.plan.moved_bytes > 0


def stack(**options: Any) -> Rows:
    """A model some of whose copies begin in the step before."""
    return Rows(lambda: Stack(6), torch.randn(4, 8), hardware=WRAPS, **options)


@DEVICES
def test_rows_have_the_numbers_of_as_many_calls_for_the_bytes_of_one(debug: Any, no_grad: None) -> None:
    """Warm, after a rewritten weight, and after a cold start; calls between passes of several rows stay right."""
    rows = stack(debug=debug)
    executor, counts = rows.program.executor, rows.program.call.counts
    for prepare, primed in ((lambda: None, False), (lambda: rewrite(rows), True), (executor.forget, True)):
        prepare()
        calls, moved = counts.calls, counts.moved_bytes
        rows.check()
        assert (executor.cost.primed > 0) == primed
        assert counts.calls == calls + 1
        assert counts.moved_bytes == moved + rows.program.plan.moved_bytes + executor.cost.primed
        x = torch.randn(4, 8)
        assert torch.equal(rows.call(x), rows.twin(x))
    x = torch.randn(4, 8)
    assert rows.equal(rows.run(x), x)


def test_rows_are_issued_op_by_op_between_launches_of_a_graph(no_grad: None) -> None:
    cuda = FakeCuda(copy_s=1e-4)
    rows = stack(arena=cuda.arena(), cudagraphs=True, debug="poison")
    log = rows.program.call.captures
    for _ in range(2 * PASSES):
        rows.check()
    assert (log.captures, log.passes) == (0, 1), "they bring no recording nearer"
    for launches in range(8):
        x = torch.randn(4, 8)
        assert torch.equal(rows.call(x), rows.twin(x))
        if launches % 3 == 0:
            rows.check()
    assert log.captures == 1 and log.launches == 8 - PASSES + 1 and log.why_not == ""


def rewrite(rows: Rows) -> None:
    """Write a weight that is copied in each step."""
    name = rows.program.plan.streamed[0].name
    for model in (rows.model, rows.twin):
        model.get_parameter(name).mul_(1.5)


@DEVICES
def test_an_error_in_a_row_leaves_the_program_usable(debug: Any, no_grad: None) -> None:
    rows = stack(debug=debug)
    executor = rows.program.executor
    target, left = executor.target, [2 * 3 + 2]  # the second row of the third region

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("no memory for this row")
            return function(*args)

        return call

    target.regions = {name: failing(function) for name, function in target.regions.items()}
    executor.instructions = instructions(target, executor.cycle.ops[0], issued(executor.program))
    with pytest.raises((RuntimeError, ChunkflowError), match="no memory for this row"):
        rows.run(*torch.randn(3, 4, 8))
    rows.check()
    assert executor.cost.primed > 0
    rows.check()
    assert executor.cost.primed == 0


def test_a_pass_of_several_rows_is_not_measured_and_feeds_no_plan(no_grad: None) -> None:
    rows = stack(replan_after=2)
    program = rows.program
    known = len(program.measurements)
    for _ in range(8):
        rows.check()
    assert rows.program is program and program.replan_after == 2
    assert len(program.measurements) == known and len(program.passes) == known
    program.arena.streams.measure(1)
    rows.check()
    assert program.arena.streams.measuring, "a pass that is asked for is one of a single row"
    rows.call(torch.randn(4, 8))
    assert len(program.measurements) == known + 1
    program.arena.streams.measure(None)
    for _ in range(8):
        rows.call(torch.randn(4, 8))
    assert rows.program.replan_after == 0


class Shares(Stack):
    """Returns a view of an input."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return super().forward(x), scale.view(4, 4)


def test_outputs_of_rows_share_no_memory(no_grad: None) -> None:
    """An output may lie in an input, and here all rows have the same input."""
    scale = torch.randn(16)
    rows = Rows(lambda: Shares(2), torch.randn(4, 8), scale)
    (one,) = rows.run_rows([rows.row(torch.randn(4, 8), scale)])
    assert one[1].data_ptr() == scale.data_ptr(), "as in a call; else this test shows nothing"
    xs = torch.randn(3, 4, 8)
    found = rows.run_rows([rows.row(x, scale) for x in xs])
    storages = [output.untyped_storage().data_ptr() for row in found for output in row]
    assert len({*storages, scale.untyped_storage().data_ptr()}) == 7
    arena = rows.program.executor.binding.slots.values()
    assert {*storages}.isdisjoint(slot.untyped_storage().data_ptr() for slot in arena)
    for x, (y, again) in zip(xs, found, strict=True):
        assert torch.equal(y, rows.twin(x, scale)[0])
        assert torch.equal(again, scale.view(4, 4))


def test_rows_run_in_a_cycle_and_at_a_jump(no_grad: None) -> None:
    """Of two models in turns, one computes several rows; then it comes twice, which is a jump."""
    arena = Arena("cpu")
    one, other = (stack(debug="poison", arena=arena) for _ in range(2))

    def call(rows: Rows, count: int) -> None:
        xs = torch.randn(count, 4, 8)
        assert rows.equal(rows.run(*xs), *xs)

    for _ in range(4):
        call(one, 1)
        call(other, 1)
    (cycle,) = cycles(one.model)
    whole = len(cycle.passes)
    for _ in range(2):
        call(one, 1)
        call(other, 3)
    assert cycle.jumps == 0 and len(cycle.passes) == whole
    call(other, 3)
    assert cycle.jumps == 1 and other.program.call.counts.off_cycle == 1
    for _ in range(2):
        call(one, 3)
        call(other, 1)
    assert len(cycle.passes) == whole
    call(one, 1)
    call(other, 1)
    assert len(cycle.passes) == whole + 1 and cycle.jumps == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.randn(5, 8), r"is \[4, 8\] in float32 on cpu in row 0 and \[5, 8\] in float32 on cpu in row 2"),
        (torch.randn(4, 8).double(), "in float64 on cpu in row 2"),
        (4, "is .* in row 0 and 4 in row 2"),
    ],
)
def test_rows_of_other_shapes_are_refused(other: Any, message: str, no_grad: None) -> None:
    rows = stack()
    with pytest.raises(ChunkflowError, match=message):
        rows.run(torch.randn(4, 8), torch.randn(4, 8), other)
    rows.check()
    assert rows.program.executor.cost.primed == 0


def test_rows_of_a_graph_with_a_collective_are_refused(one_rank: None) -> None:
    rows = Rows(lambda: Coalesced(8, 20), torch.randn(4, 8), min_bytes=256, debug="poison")
    with pytest.raises(ChunkflowError, match="computes one row only, because its collectives are issued once per pass"):
        rows.run(*torch.randn(2, 4, 8))
    x = torch.randn(4, 8)
    assert rows.equal(rows.run(x), x)
    assert rows.program.executor.cost.primed == 0
