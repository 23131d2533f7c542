"""Declared collectives: custom ops that communicate are found, costed, proved and run as collectives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mutations
import pytest
import torch
import torch.distributed as dist
from conftest import OPTIONS
from helpers import UlyssesStack, cut_of, fake_ranks, plan_of
from opaque import OpaqueStack, declaring, exchange, exchange_into, exchange_three

import chunkflow_compile
from chunkflow_compile import ChunkflowError, register_collective
from chunkflow_compile.frontend.preconditions import note_ops_of_others
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.program.collectives import check_collectives
from chunkflow_compile.passes.program.happens_before import HappensBefore
from chunkflow_compile.passes.program.memory import program_memory
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.passes.step import Finish

X = torch.randn(4, 32)


@pytest.fixture
def two() -> Iterator[None]:
    with fake_ranks():
        yield


@pytest.mark.usefixtures("two")
def test_an_undeclared_one_is_taken_for_compute_and_named() -> None:
    traced, notes = trace(OpaqueStack(), {"x": X}, 0), list[str]()
    assert make_cut(traced).problem.collectives == ()
    note_ops_of_others(traced, notes.append)
    for op, note in zip(("exchange_three", "exchange"), notes, strict=True):
        assert note.startswith(f"no FLOP formula is declared for chunkflow_tests::{op}: ")
        assert note.endswith("chunkflow_compile.register_collective.")
    note_ops_of_others(trace(UlyssesStack(1), {"x": X}, 0), notes.append)
    assert len(notes) == 2, "those of torch are known"
    with declaring():
        note_ops_of_others(traced, notes.append)
        assert len(notes) == 2, "nothing more"


@pytest.mark.usefixtures("two")
def test_a_declared_one_is_a_collective() -> None:
    with declaring():
        cut = cut_of(OpaqueStack(), X)
        theirs = cut_of(UlyssesStack(1), X).problem.collectives
        mine = cut.problem.collectives
        assert [c.kind for c in mine] == ["all-to-all"] * 4 and {c.engine for c in mine} == {"sm"}
        assert [c.nbytes for c in mine] == [3 * theirs[0].nbytes, theirs[3].nbytes] * 2
        assert [c.until for c in mine] == [c.before for c in mine], "it completes itself"
        program = rewrite(cut, plan_of(cut.problem))
        assert program.plan.moved_bytes
        verify(program)
        order = HappensBefore((program,), 1)
        ends = [each for each in order.ops if isinstance(each.op, Finish)]
        assert [each.label for each in ends] == [f"completion of {c.name}" for c in mine]
        broken = mutations.release_before_the_reader(program, random.Random(0))
        assert broken is not None and list(check_collectives(broken, program_memory(broken)))


@pytest.mark.usefixtures("two")
def test_bytes_group_and_engine_are_what_was_declared() -> None:
    group = dist.group.WORLD
    assert group is not None
    with declaring(bytes=lambda *tensors: 7 * tensors[0].shape[0], group=group, engine="copy"):
        problem = cut_of(OpaqueStack(1), X).problem
        assert [(c.nbytes, c.ranks, c.engine) for c in problem.collectives] == [(14, 2, "copy")] * 2
        kernels = replace(problem, collectives=tuple(replace(c, engine="sm") for c in problem.collectives))
        assert problem.digest != kernels.digest and problem.structure != kernels.structure


@pytest.mark.usefixtures("two")
def test_another_kind_than_the_sizes_say_is_refused() -> None:
    with declaring():
        register_collective(exchange, "all-gather")
        with pytest.raises(
            ChunkflowError, match=r"exchange \(node \w+\) is declared as all-gather: on 2 ranks it would"
        ):
            cut_of(OpaqueStack(1), X)


def wrong() -> Iterator[tuple[Callable[[], None], str]]:
    yield lambda: register_collective(exchange, "all-to-al"), "no kind of a collective; did you mean 'all-to-all'"  # type: ignore[arg-type]
    yield (
        lambda: register_collective(exchange, "all-to-all", engine="ce"),  # type: ignore[arg-type]
        "'ce' is no engine of a collective",
    )
    yield lambda: register_collective(exchange_three, "all-to-all"), "which of its arguments holds the process group"
    yield lambda: register_collective(exchange, "all-to-all", group="pg"), "It takes x, group_name"
    yield lambda: register_collective(exchange_into, "all-to-all"), "exchange_into.*writes to its arguments"
    yield lambda: register_collective("nobody::knows", "all-to-all"), "there is no op 'nobody::knows'"
    yield lambda: register_collective(dist.all_reduce, "all-reduce"), "no op of torch"


@pytest.mark.parametrize(("call", "says"), wrong())
def test_a_wrong_declaration_is_refused(call: Callable[[], None], says: str) -> None:
    with pytest.raises(ChunkflowError, match=says):
        call()


def test_an_op_goes_by_its_name_too() -> None:
    with declaring():
        for op in ("chunkflow_tests::exchange", torch.ops.chunkflow_tests.exchange):
            register_collective(op, "all-to-all")


def test_ranks_exchange_by_a_declared_op(on_ranks: Callable[..., None]) -> None:
    on_ranks(_exchanges)


def _exchanges(rank: int) -> None:
    with declaring():
        torch.manual_seed(0)
        model = OpaqueStack(3, 64).eval()
        torch.manual_seed(0)
        twin = OpaqueStack(3, 64).eval()
        options: dict[str, Any] = {**OPTIONS, "lowering": "eager", "debug": "threads"}
        chunkflow_compile.offload(model, min_bytes=4096)
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
        for step in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            with torch.no_grad():
                got, want = run(x), twin(x)
            (program,) = chunkflow_compile.programs(model)
            newest = program.measurements[-1]
            assert newest.moved_bytes == program.plan.moved_bytes > 0 and newest.collectives == 6
            assert torch.equal(got, want)
        chunkflow_compile.restore(model)
