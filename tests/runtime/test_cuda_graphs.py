"""A call as one CUDA graph, on the fake GPU: what is recorded, when it is launched, and when it is dropped."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import OwnClock
from conftest import OPTIONS, WRAPS
from fake_cuda import FakeCuda, FakeEvent
from fake_graphs import FakeGraph
from helpers import Stack, UlyssesStack, graphs, twins, without_joins
from torch import nn

from chunkflow_compile import cycles, explain, programs, replan, restore
from chunkflow_compile.hardware.loopback import join_loopback
from chunkflow_compile.passes import planning
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.runtime import capture, instructions
from chunkflow_compile.runtime.cuda import CudaDevice
from chunkflow_compile.runtime.cuda_graphs import MOST_GRAPHS, PASSES, CaptureLog, CudaGraph
from chunkflow_compile.runtime.device_base import FIRST_STEPS
from chunkflow_compile.weights.counts import Counts

EAGER = {**OPTIONS, "lowering": "eager", "cudagraphs": True}


def compiled(
    cuda: FakeCuda, make: Any = lambda: Stack(3), dynamic: bool | None = None, **options: Any
) -> tuple[nn.Module, nn.Module, Any]:
    """A model on a GPU, its twin, and the compiled model."""
    model, twin = twins(make)
    chosen = {**EAGER, "arena": options.get("arena") or cuda.arena(), "debug": "poison", **options}
    if {"weight_memory", "policy"} & options.keys():
        chosen.pop("slowdown")
    return model, twin, torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=dynamic, options=chosen)


def log_of(model: nn.Module) -> CaptureLog:
    return programs(model)[0].call.captures


def test_a_call_is_launched_as_one_graph_and_its_outputs_are_right(no_grad: None) -> None:
    cuda = FakeCuda(copy_s=1e-4)
    model, twin, run = compiled(cuda, weight_memory=35_000)
    kept = []
    for step in range(50):
        x = torch.randn(16, 8)
        kept.append((run(x), twin(x)))
        if step == 20:
            with torch.no_grad():
                for m in (model, twin):
                    m.blocks[1].up.weight.mul_(1.5)
    assert all(torch.equal(got, expected) for got, expected in kept)
    log = log_of(model)
    assert log.why_not == "" and (log.captures, log.launches) == (1, 50 - PASSES)
    assert programs(model)[0].plan.moved_bytes > 0 and cuda.graphs[0].launches == log.launches
    restore(model)
    assert cuda.graphs[0].nodes is None


def stepped(cuda: FakeCuda, mutate: Callable[[], None]) -> list[bool]:
    """Steps of one model."""
    model, twin, run = compiled(cuda, hardware=WRAPS)
    xs = [torch.randn(16, 8) for _ in range(PASSES + 4)]
    assert all(torch.equal(run(x), twin(x)) for x in xs[:PASSES])
    assert any(op.next_step for _, op in prefetches(programs(model)[0].program))
    mutate()
    equal = [torch.equal(run(x), twin(x)) for x in xs[PASSES:]]
    assert log_of(model).launches >= 3
    return equal


def in_turns(cuda: FakeCuda, mutate: Callable[[], None]) -> list[bool]:
    """Steps of two models that have an arena in turns, so each begins with a cold start."""
    arena = cuda.arena()
    pairs = [compiled(cuda, hardware=WRAPS, arena=arena, disable=["cycle"]) for _ in range(2)]
    xs = [torch.randn(16, 8) for _ in range(PASSES + 2)]
    assert all(torch.equal(run(x), twin(x)) for x in xs[:PASSES] for _, twin, run in pairs)
    mutate()
    equal = [torch.equal(run(x), twin(x)) for x in xs[PASSES:] for _, twin, run in pairs]
    assert all(log_of(model).launches for model, _, _ in pairs)
    return equal


def without_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = instructions._wait

    def no_arrivals(target: Any, event: Any, window: int | None) -> Any:
        return wait(target, event, window) if window is None else lambda step: None

    monkeypatch.setattr(instructions, "_wait", no_arrivals)


def without_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "launch", lambda self, graph: graph.replay())


@pytest.mark.parametrize(
    ("remove", "work", "slow"),
    [(without_arrivals, stepped, {}), (without_tails, in_turns, {"launched_copy_s": 0.0, "late": True})],
)
def test_without_one_kind_of_event_numbers_are_wrong(
    remove: Any, work: Any, slow: Any, no_grad: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(work(FakeCuda(copy_s=5e-3, **slow), lambda: None))
    assert not all(work(FakeCuda(copy_s=5e-3, **slow), lambda: remove(monkeypatch)))


def test_a_recording_that_fails_is_said_and_the_call_goes_on(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    without_joins(monkeypatch, capture)
    model, twin, run = compiled(FakeCuda(), hardware=WRAPS)
    sized(model, twin, run, [16], PASSES + 3)
    log = log_of(model)
    assert "unjoined work" in log.why_not and log.captures == log.launches == 0


def sized(model: nn.Module, twin: nn.Module, run: Any, sizes: Sequence[int], passes: int) -> None:
    for _ in range(passes):
        for size in sizes:
            x = torch.randn(size, 8)
            assert torch.equal(run(x), twin(x))


def test_each_size_has_its_graph_and_an_arena_keeps_those_used_last(no_grad: None) -> None:
    cuda = FakeCuda()
    model, twin, run = compiled(cuda, dynamic=True)
    sizes = range(16, 16 + MOST_GRAPHS)
    sized(model, twin, run, sizes, PASSES + 2)
    arena = programs(model)[0].arena
    assert [g.launches for g in cuda.graphs] == [2] * MOST_GRAPHS and arena.graphs.nbytes > 0
    sized(model, twin, run, [99], PASSES + 1)
    assert [g.nodes is None for g in cuda.graphs] == [True] + [False] * MOST_GRAPHS
    arena.evict()
    assert arena.graphs.nbytes == 0 and all(g.nodes is None for g in cuda.graphs)
    sized(model, twin, run, sizes[:1], 2)
    assert cuda.graphs[-1].launches == 1, "what a recording needs is loaded already"


def without_memory(cuda: FakeCuda) -> None:
    failing(cuda, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB"))


def with_an_op_that_refuses(cuda: FakeCuda) -> None:
    failing(cuda, ValueError("not while a graph is recorded"))


def failing(cuda: FakeCuda, error: Exception) -> None:
    """It is found at the end: collectives are called in a recording of this GPU, and the other rank is in them."""
    whole = cuda.capturing

    @contextlib.contextmanager
    def capturing(pool: Any) -> Iterator[Any]:
        with whole(pool) as streams:
            yield streams
            raise error

    cuda.capturing = capturing


def without_pinned_memory(cuda: FakeCuda) -> None:
    def pin(host: torch.Tensor) -> Any:
        raise OSError("CUDA error 2, out of memory")

    cuda.pin = pin


@pytest.mark.filterwarnings("ignore:.*could not be pinned")
@pytest.mark.parametrize(
    ("spoil", "options", "why"),
    [
        (without_memory, {}, "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB"),
        (with_an_op_that_refuses, {}, "ValueError: not while a graph is recorded"),
        (without_pinned_memory, {}, "some weights could not be pinned"),
        (lambda cuda: None, {"policy": "layerwise"}, ""),
    ],
)
def test_a_call_that_cannot_be_a_graph_says_why_and_is_right(
    spoil: Any, options: Any, why: str, no_grad: None, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    spoil(cuda)
    model, twin, run = compiled(cuda, **options)
    sized(model, twin, run, [16], PASSES + 3)
    log = log_of(model)
    assert log.why_not.startswith(why) and (log.launches == 0) == bool(why)
    said = [r.getMessage() for r in caplog.records if "is no CUDA graph" in r.getMessage()]
    assert len(said) == bool(why) and log.note in str(explain(model, details=True)).replace("\n", " ")
    restore(model)


def moved(*models: nn.Module) -> None:
    """A weight that is read in place gets other memory."""
    for m in models:
        m.head.bias.data = m.head.bias.detach() + 1


def planned_again(model: nn.Module) -> None:
    replan(model, weight_memory=30_000)


def given_memory(model: nn.Module, name: str = "blocks.2.up.weight") -> None:
    """A streamed weight gets other memory on the host."""
    weight = model.get_parameter(name)
    weight.data = weight.detach() * 2


def measured_again(model: nn.Module) -> None:
    programs(model)[0].arena.streams.measure(1)


@pytest.mark.parametrize("change", [moved, planned_again, given_memory, measured_again])
def test_what_a_graph_rests_on_changes(change: Callable[[nn.Module], None], no_grad: None) -> None:
    cuda = FakeCuda(copy_s=1e-4)
    model, twin, run = compiled(cuda, weight_memory=35_000)
    sized(model, twin, run, [16], PASSES + 8)
    assert cuda.graphs[0].launches == 8
    change(model)
    twin.load_state_dict(model.state_dict())
    sized(model, twin, run, [16], PASSES + 3)
    assert cuda.graphs[0].nodes is None and cuda.graphs[1].launches >= 1, "dropped, and recorded again"
    assert len(cuda.graphs) == 2 and not log_of(model).why_not


def test_a_graph_fits_inputs_as_it_was_recorded_with_alone() -> None:
    """Weights at the same addresses, tensors of the same layout, equal numbers."""
    x, weight = torch.randn(4, 6), torch.randn(6)
    inputs: list[Any] = [torch.randn(4, 6), weight, 7, 0.5]
    nothing: Any = {"outputs": [], "suspects": [], "moved_bytes": 0, "nbytes": 0}
    copied, fixed = [(0, x)], [(2, 7), (3, 0.5)]
    cuda: Any = FakeCuda()
    log = CaptureLog(Counts())
    graph = CudaGraph(object(), cuda, log, copied=copied, in_place=[(1, weight)], fixed=fixed, **nothing)
    assert graph.misfit(inputs) == ""
    layout, memory = "an input has another layout", "a weight that it reads in place has other memory"
    for position, other, why in (
        (0, torch.randn(3, 6), layout),
        (0, torch.randn(6, 4).t(), layout),
        (0, torch.randn(4, 6).double(), layout),
        (1, weight.clone(), memory),
        (2, 8, "a number among the inputs has changed"),
        (3, 0.25, "a number among the inputs has changed"),
    ):
        assert graph.misfit([*inputs[:position], other, *inputs[position + 1 :]]) == why
    graph.graph = None
    assert graph.misfit(inputs) == "it was dropped"


def test_a_graph_ends_with_its_model_or_where_it_is_dropped(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    arena = cuda.arena()
    gone, kept = (compiled(cuda, arena=arena, disable=["cycle"]) for _ in range(2))
    sized(*gone, [16], PASSES + 2)
    sized(*kept, [16], PASSES + 2)
    assert arena.graphs.nbytes == 2000
    del gone
    gc.collect()
    assert len(arena.graphs._live) == 1 and arena.graphs.nbytes == 2000, "the pool of both gives nothing back yet"
    graph: Any = programs(kept[0])[0].executor._graph
    if (child := os.fork()) == 0:  # it has no GPU
        with contextlib.suppress(BaseException):
            graph.drop("")
            os._exit(cuda.graphs[-1].nodes is None)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FakeGraph, "reset", interrupted)
        graph.drop("")
    sized(*kept, [16], 2)
    assert arena.graphs.nbytes == 1000 and programs(kept[0])[0].executor._graph is not graph


class Views(Stack):
    """Its outputs share memory, among them and with its input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = super().forward(x)
        return y, y[1:].t(), y.sum(0).expand(3, -1), x, torch.complex(y, y).conj()


def test_outputs_share_memory_as_they_do_op_by_op(no_grad: None) -> None:
    model, twin, run = compiled(FakeCuda(), lambda: Views(2))
    for _ in range(PASSES + 3):
        x = torch.randn(16, 8)
        got, expected = run(x), twin(x)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and got[3] is x
        got[0].mul_(2)
        assert torch.equal(got[1], 2 * expected[1]) and got[1].stride() == expected[1].stride()
    assert log_of(model).launches == 3


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every other column": lambda y: y[:, ::2],
    "an expanded row": lambda y: y[0].expand(3, 8),
    "windows that overlap": lambda y: y.unfold(0, 3, 1),
    "a part of a transposed tensor": lambda y: y.t()[2:5, 1:],
    "nothing": lambda y: y[:0, ::2],
    "a lazy conjugate": lambda y: torch.complex(y, 2 * y).conj()[:, ::2],
    "a lazy negative": lambda y: torch.complex(y, 2 * y).conj().imag,
}


def test_outputs_keep_their_strides(no_grad: None) -> None:
    """Op by op and as a graph.  Code after a graph break is guarded for them, and is not compiled again."""

    class Viewed(Stack):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = super().forward(x)
            return tuple(view(y + i) for i, view in enumerate(VIEWS.values()))  # each of memory of its own

    model, twin, run = compiled(FakeCuda(), lambda: Viewed(2))
    after = torch.compile(lambda y: y + 1, backend="eager", dynamic=False)
    made = []
    for _ in range(PASSES + 2):
        x = torch.randn(16, 8)
        got, expected = run(x), twin(x)
        for name, mine, plain in zip(VIEWS, got, expected, strict=True):
            assert torch.equal(mine, plain) and torch.equal(after(mine), plain + 1), name
        made.append(({n: (v.stride(), v.is_conj(), v.is_neg()) for n, v in zip(VIEWS, got, strict=True)}, graphs()))
    assert log_of(model).launches == 2 and made == made[:1] * len(made)
    forms, count = made[0]
    assert count <= 1 + len(VIEWS)
    for name, plain in zip(VIEWS, expected, strict=True):
        assert name == "a lazy negative" or forms[name] == (plain.stride(), plain.is_conj(), plain.is_neg()), name


def test_a_write_waits_for_the_launch(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a launch are on no stream of the device; the event after it is the last one that compute has recorded."""
    cuda = FakeCuda()
    model, twin, run = compiled(cuda)
    sized(model, twin, run, [16], PASSES)
    awaited, recorded = list[FakeEvent](), list[FakeEvent]()
    wait, record = FakeEvent.synchronize, FakeEvent.record
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: (awaited.append(self), wait(self))[1])
    monkeypatch.setattr(FakeEvent, "record", lambda self, stream: (recorded.append(self), record(self, stream))[1])
    replay = FakeGraph.replay
    monkeypatch.setattr(FakeGraph, "replay", lambda self: (replay(self), recorded.clear())[0])
    sized(model, twin, run, [16], 2)
    assert log_of(model).launches == 2 and recorded and not {*recorded} & {*awaited}
    for m in (model, twin):
        m.blocks[1].up.weight.mul_(1.5)
    assert {*recorded} & {*awaited}
    sized(model, twin, run, [16], 1)


def test_graphs_that_do_not_last_are_recorded_no_more(no_grad: None) -> None:
    cuda = FakeCuda()
    model, twin, run = compiled(cuda)
    for _ in range(6):
        sized(model, twin, run, [16], PASSES + 1)
        moved(model, twin)
    assert "3 graphs were dropped after fewer than 8 calls" in log_of(model).why_not and len(cuda.graphs) == 3


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """One process that stands for two ranks: collectives go through host memory."""
    join_loopback(2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("wanted", "groups"),
    [pytest.param(True, False, marks=pytest.mark.long), ("collectives", False), ("collectives", 2)],
)
def test_collectives_are_recorded_if_they_are_asked_for(
    wanted: Any, groups: Any, two_ranks: None, no_grad: None
) -> None:
    """Also if they exchange groups of heads."""
    cuda = FakeCuda(copy_s=1e-4)
    model, twin, run = compiled(cuda, lambda: UlyssesStack(2, width=64), cudagraphs=wanted, exchange_groups=groups)
    for _ in range(PASSES + 4):
        x = torch.randn(16, 64)
        assert torch.equal(run(x), twin(x))
    log = log_of(model)
    problem = programs(model)[0].program.problem
    assert len(problem.collectives) == 8 * problem.exchange_groups == 8 * (groups or 1)
    assert log.launches == (4 if wanted == "collectives" else 0)
    assert ('cudagraphs="collectives"' in log.why_not) == (wanted is True)


def with_a_rank_that_cannot(rank: int) -> None:
    """Both record; then their graphs are dropped, and one of them cannot record again."""
    cuda = FakeCuda(copy_s=1e-4)
    model, twin, run = compiled(cuda, lambda: UlyssesStack(2, width=64), cudagraphs="collectives")

    def steps(count: int) -> CaptureLog:
        for step in range(count):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            assert torch.equal(run(x), twin(x))
        return log_of(model)

    log = steps(PASSES + 4)
    assert log.launches == 4 and log.why_not == "" and [graph.nodes is None for graph in cuda.graphs] == [False]
    given_memory(model, "blocks.1.out.weight")
    twin.load_state_dict(model.state_dict())
    if rank == 1:
        without_memory(cuda)
    log = steps(PASSES + 4)
    assert log.launches == 0 and "OutOfMemoryError" in log.why_not and ("on rank 1: " in log.why_not) == (rank == 0)
    assert cuda.graphs[0].launches == 4 and len(cuda.graphs) == 2 - rank and all(g.nodes is None for g in cuda.graphs)


def test_ranks_record_together_or_not_at_all(on_ranks: Callable[..., None]) -> None:
    on_ranks(with_a_rank_that_cannot)


@pytest.mark.parametrize("clock", [None, OwnClock(tick=1e-7).host])
def test_auto_records_where_the_host_is_the_bound(clock: Any, no_grad: None) -> None:
    """On the fake GPU the caller's thread computes, so the host is always busy; by its own clock, only while it issues."""
    cuda = FakeCuda(0.0 if clock is None else 0.004, *(() if clock is None else (clock,)), late=clock is not None)
    model, twin, run = compiled(cuda, cudagraphs="auto")
    sized(model, twin, run, [16], PASSES)
    log = log_of(model)
    assert log.note == "8 measured calls decide whether a call is one CUDA graph"
    sized(model, twin, run, [16], FIRST_STEPS + 2 - PASSES)
    assert programs(model)[0].plan.joins and (log.launches > 0) == (clock is None)
    assert log.why_not == "" if clock is None else "of a step only" in log.why_not


def test_auto_joins_no_copies_where_that_costs(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_JOIN_LOSS", -1.0)
    model, twin, run = compiled(FakeCuda(), cudagraphs="auto")
    sized(model, twin, run, [16], FIRST_STEPS + 2)
    assert not programs(model)[0].plan.joins and "predicted to cost 1 %" in log_of(model).why_not


def test_each_call_of_a_cycle_is_a_graph(no_grad: None) -> None:
    """Two models in turns in one arena, also while passes are measured that are asked for; then one of them alone, which is
    a jump in each step."""
    cuda = FakeCuda(copy_s=1e-4)
    arena = cuda.arena()
    pairs = [compiled(cuda, lambda width=width: Stack(2, width=width), arena=arena) for width in (32, 48)]

    def passes(count: int) -> None:
        for step in range(count):
            for _, twin, run in pairs:
                x = torch.randn(16, 8)
                assert torch.equal(run(x), twin(x)), step

    passes(PASSES + 8)
    (cycle,) = cycles(pairs[0][0])
    assert len(cycle.calls) == 2 and cycle.plan.joins == (*cycle.cycle.starts[1:], len(cycle.cycle.problem.regions))
    launches = [log_of(model).launches for model, _, _ in pairs]
    assert all(launches) and cycle.jumps == 0 and cycle.plan.moved_bytes > 0
    before = len(cycle.passes)
    arena.streams.measure(2)
    passes(4)
    assert len(cycle.passes) == before + 1, "the first tells which copies run into the second"
    launches = [log_of(model).launches for model, _, _ in pairs]
    model, twin, run = pairs[0]
    sized(model, twin, run, [16], 3)
    assert cycle.jumps > 0 and log_of(model).launches > launches[0]
