"""Programs that share an arena, weights and threads."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import FAST, OPTIONS, RESIDENT, WITHIN, WRAPS
from helpers import Stack, check_steps, join_closers
from torch import nn
from torch.torch_version import TorchVersion

import chunkflow_compile
from chunkflow_compile import Arena, ChunkflowError, cycles, explain, offload, programs, restore
from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.runtime import tenants

OPTIONS = {**OPTIONS, "lowering": "eager", "hardware": WRAPS}
THREADS = ("threads", "poison")
SHAPES = [(4, 8), (6, 8), (2, 3, 8)]
# Keeps some weights and streams the others, on a machine on which copies do not hide.
TIGHT: dict[str, object] = {"weight_memory": 40000, "slowdown": None, "chunk_bytes": 8192, "hardware": FAST}
# Some chunks of a weight that streams stay on the device.
PARTLY = {**TIGHT, "weight_memory": 45500, "chunk_bytes": 2048, "min_bytes": 0}


def stack(layers: int = 3, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(layers).eval()


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=False, options={**OPTIONS, **options})


@pytest.mark.parametrize("debug", [(), THREADS])
def test_two_resolutions_take_turns_in_one_arena(debug: tuple[str, ...], no_grad: None) -> None:
    model, twin = stack(), stack()
    run = compiled(model, **{**TIGHT, "debug": debug})
    for step in range(4):
        for shape in SHAPES:
            check_steps(run, twin, 1 + step % 2, shape)
    sessions = programs(model)
    assert len(sessions) == len(SHAPES)
    arena = sessions[0].arena
    assert arena.nbytes == max(s.plan.arena_bytes for s in sessions)
    assert len({s.plan.placement for s in sessions}) == 1, "one placement, taken over from the first program"
    memory, residents = set[int](), list[dict[str, int]]()
    for session in sessions:
        assert [m.moved_bytes for m in session.measurements][1:] == [session.plan.moved_bytes] * 5
        bound = session.executor.binding
        memory |= {slot.untyped_storage().data_ptr() for slot in bound.slots.values()}
        assert all(slot.data_ptr() % 256 == 0 for slot in bound.slots.values())
        residents.append({n: v.data_ptr() for n, v in bound.values.items() if n not in bound.slots})
    assert len(memory) == 1, "one allocation"
    assert residents[0] and residents == residents[:1] * 3, "copied once for all programs"
    assert sum(bool(m.primed_bytes) for s in sessions for m in s.measurements) == 1, "only the first call began cold"
    other = stack(seed=1)
    model.load_state_dict(other.state_dict())
    for shape in (*SHAPES, SHAPES[0]):
        check_steps(run, other, 1, shape)
    restore(model)
    assert all(torch.equal(v, other.state_dict()[n]) for n, v in model.state_dict().items())
    assert arena.nbytes == 0 and not arena.programs


@pytest.mark.parametrize(
    "goal",
    [
        {**TIGHT, "debug": THREADS},
        PARTLY,
        {},
        {"policy": "layerwise", "slowdown": None, "debug": THREADS},
        {"policy": "resident", "slowdown": None},
    ],
)
def test_what_was_written_is_copied_again_alone(goal: dict[str, Any], no_grad: None) -> None:
    """Whatever the weight: one that streams, has chunks that stay, is fetched by the step before, or is resident."""
    model, twin = stack(), stack()
    run = compiled(model, **goal)
    check_steps(run, twin, 2)
    (session,) = programs(model)
    before = {name: value.data_ptr() for name, value in session.executor.binding.values.items()}
    primed = dict[str, int]()
    for name, buffer in session.buffers.items():
        if buffer.nbytes < 4096:  # only the first passes are all measured
            continue
        values = twin.get_parameter(name) * 0.5
        for m in (model, twin):
            m.get_parameter(name).copy_(values)
        for _ in range(2):
            assert torch.equal(run(x := torch.randn(4, 8)), twin(x)), name
        assert programs(model) == (session,), "neither planned nor bound again"
        written, after = session.measurements[-2:]
        primed[name] = written.primed_bytes
        assert written.primed_bytes <= buffer.nbytes and not after.primed_bytes, name
        assert written.moved_bytes == after.moved_bytes == session.plan.moved_bytes
    assert {name: value.data_ptr() for name, value in session.executor.binding.values.items()} == before
    if goal == PARTLY:
        assert any(None in w.windows for w in session.plan.streamed) and any(primed.values())
    if goal.get("weight_memory"):
        assert not all(primed.values()), "some come later anyway"


def test_what_a_call_of_a_cycle_reads_is_copied_again_alone(no_grad: None) -> None:
    model, twin = stack(6), stack(6)
    chunkflow_compile.compile(model, **{k: v for k, v in OPTIONS.items() if k != "min_bytes"}, min_bytes=4096)
    for _ in range(6):
        check_steps(model, twin, 1)
        if (found := cycles(model)) and found[0].measurements:
            break
    (bound,) = cycles(model)
    for name in ("blocks.3.up.weight", "blocks.0.down.weight", "blocks.5.up.weight"):
        values = twin.get_parameter(name) * 0.5
        for m in (model, twin):
            m.get_parameter(name).copy_(values)
        for _ in range(2):
            assert torch.equal(model(x := torch.randn(4, 8)), twin(x)), name
        written, after = bound.measurements[-2:]
        assert written.primed_bytes <= twin.get_parameter(name).nbytes and not after.primed_bytes
        assert written.moved_bytes == after.moved_bytes == bound.cycle.plan.moved_bytes > 0
    assert cycles(model) == (bound,) and not bound.jumps


def test_several_models_share_the_arena_that_they_are_given(no_grad: None) -> None:
    arena = Arena()
    models, twins = [stack(1 + i, i) for i in range(3)], [stack(1 + i, i) for i in range(3)]
    runs = [compiled(model, arena=arena, debug="poison") for model in models]
    for _ in range(3):
        for run, twin in zip(runs, twins, strict=True):
            check_steps(run, twin, 2)
    assert len(arena.programs) == 3
    assert arena.nbytes == max(s.plan.arena_bytes for s in arena.programs)
    for run in runs:
        assert "calls began cold" in str(explain(run).summary), "one after each change to another model"
    restore(models[0])
    x = torch.randn(4, 8)
    assert torch.equal(models[0](x), twins[0](x)) and torch.equal(runs[1](x), twins[1](x))
    for model in models[1:]:
        restore(model)
    assert arena.nbytes == 0 and not arena.programs
    assert torch.equal(runs[2](x), twins[2](x)), "the arena is allocated again when it is needed"


def test_an_arena_grows_with_the_largest_of_its_programs(no_grad: None) -> None:
    arena, model, twin = Arena(), stack(), stack()
    small = compiled(model, **{**TIGHT, "arena": arena, "weight_memory": 30000})
    x = torch.randn(4, 8)
    small(x)
    (first,) = programs(model)
    large = compiled(model, arena=arena, policy="layerwise", slowdown=None, group_bytes=1)
    for _ in range(3):
        assert torch.equal(large(x), twin(x)) and torch.equal(small(x), twin(x))
    assert not first.closed and len(arena.programs) == 2
    assert first.plan.arena_bytes < arena.nbytes == max(s.plan.arena_bytes for s in arena.programs)
    gc.collect()
    alive = [
        o for o in gc.get_objects() if type(o) is torch.Tensor and o.untyped_storage().nbytes() == arena.nbytes + 256
    ]
    assert len({o.untyped_storage().data_ptr() for o in alive}) == 1


def test_what_does_not_fit_an_arena_is_refused(no_grad: None) -> None:
    arena = Arena()
    compiled(stack(1), arena=arena)(torch.randn(4, 8))
    kept = stack(1, seed=1)
    with pytest.raises(ChunkflowError, match="run on the same streams"):
        compiled(kept, arena=arena, debug="threads")(torch.randn(4, 8))
    restore(kept)
    assert torch.equal(compiled(kept)(torch.ones(4, 8)), stack(1, seed=1)(torch.ones(4, 8)))
    with pytest.raises(Exception, match=r"arena='cpu' must be a chunkflow_compile.Arena"):
        compiled(stack(1), arena="cpu")(torch.randn(4, 8))


def test_programs_are_verified_together_once_where_they_meet(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(*programs: Program) -> None:
        seen.append(len(programs))
        if len(seen) > 3:
            raise FindingError("not safe in one arena")

    monkeypatch.setattr(tenants, "verify_together", spy)
    model, twin = stack(1), stack(1)
    run = compiled(model)
    for shape in (*SHAPES, *SHAPES):
        run(torch.randn(*shape))
    assert len(seen) == 3, "each pair of the three"
    model.load_state_dict(twin.state_dict())
    for shape in SHAPES:
        run(torch.randn(*shape))
    assert len(seen) == 3, "new values make new sessions, not new programs"
    with pytest.raises(FindingError, match="not safe in one arena"):
        run(torch.randn(5, 8))
    restore(model)
    unverified = compiled(model, disable=["verify"])
    for shape in SHAPES[:2]:
        check_steps(unverified, twin, 1, shape)
    assert len(seen) == 4


def test_an_arena_whose_models_are_dropped_is_emptied(no_grad: None) -> None:
    arena = Arena()
    compiled(stack(1), arena=arena)(torch.randn(4, 8))
    assert arena.nbytes > 0
    torch._dynamo.reset()
    gc.collect()
    join_closers()
    assert arena.nbytes == 0 and not arena.programs
    model, twin, x = stack(1), stack(1), torch.randn(4, 8)
    assert torch.equal(compiled(model, arena=arena, debug="threads")(x), twin(x)), "on other streams than before"


@pytest.mark.parametrize("policy", ["resident", "none"])
def test_a_copy_of_a_model_without_moved_weights_is_an_ordinary_model(policy: str, no_grad: None) -> None:
    model, x = stack(1), torch.randn(4, 8)
    if policy == "resident":
        torch.compile(model, backend="chunkflow", fullgraph=True, options={**RESIDENT, "lowering": "eager"})(x)
    else:
        offload(model, min_bytes=1 << 30)
    copied = copy.deepcopy(model)
    offload(copied, min_bytes=4096)
    run = compiled(copied, arena=Arena())
    assert torch.equal(run(x), stack(1)(x)) and programs(copied)[0].plan.moved_bytes > 0
    restore(copied)
    assert torch.equal(copy.deepcopy(run)(x), stack(1)(x))


def test_streams_compute_in_the_caller_s_modes_of_autograd() -> None:
    model, twin = stack(1), stack(1)
    run = compiled(model, debug="threads")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                x = torch.randn(4, 8)
                out = run(x)
                assert torch.equal(out, twin(x)) and not out.requires_grad
                assert out.is_inference() == (mode is torch.inference_mode)


def in_threads(*works: Callable[[], None]) -> None:
    """Runs the works at the same time, and raises the first error of any of them."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def go(work: Callable[[], None]) -> None:
        try:
            barrier.wait(WITHIN)
            with torch.no_grad():
                work()
        except BaseException as error:  # noqa: BLE001  (raised below, where pytest sees it)
            errors.append(error)

    threads = [threading.Thread(target=go, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12", reason="torch 2.11 crashes where threads compile at once, on any backend"
)
@pytest.mark.parametrize("placed_first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_threads_whose_first_calls_meet_take_turns(placed_first: bool, no_grad: None) -> None:
    for seed in range(2):
        torch._dynamo.reset()
        model, twin = stack(2, seed), stack(2, seed)
        if placed_first:
            offload(model, min_bytes=4096)
        run = compiled(model)

        def work(shape: tuple[int, ...], run: nn.Module = run, twin: nn.Module = twin) -> None:
            check_steps(run, twin, 4, shape)

        in_threads(*(lambda s=s: work(s) for s in (*SHAPES, SHAPES[0])))
        assert len(programs(model)) >= len(SHAPES), "two threads may compile the same shape"
        restore(model)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_calls_that_share_an_arena_wait_for_each_other(no_grad: None) -> None:
    """Two models, with copies so slow that their steps would overlap."""
    arena = Arena()
    models, twins = [stack(1, 0), stack(2, 1)], [stack(1, 0), stack(2, 1)]
    runs = [compiled(model, arena=arena, debug="poison") for model in models]
    for run in runs:
        run(torch.randn(4, 8))
    plain, inside, most = arena.streams.copy_bytes, [0], [0]

    def slow(target: torch.Tensor, source: torch.Tensor, lane: str) -> None:
        time.sleep(0.001)
        plain(target, source, lane)

    arena.streams.copy_bytes = slow
    for model in models:
        executor = programs(model)[0].executor
        enqueue = executor.enqueue

        def counted(*args: Any, enqueue: Callable[..., Any] = enqueue) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            try:
                return enqueue(*args)
            finally:
                inside[0] -= 1

        executor.enqueue = counted

    def work(i: int) -> None:
        check_steps(runs[i], twins[i], 6)

    in_threads(lambda: work(0), lambda: work(1), lambda: work(0))
    assert most == [1]


def test_a_program_that_reads_weights_in_place_ends_its_step_before_another_moves_them(no_grad: None) -> None:
    model, twin, x = stack(2), stack(2), torch.randn(4, 8)
    resident = torch.compile(
        model, backend="chunkflow", fullgraph=True, options={**RESIDENT, "lowering": "eager", "min_bytes": 4096}
    )
    streamed = compiled(model)
    resident(x)  # compiled now, while nothing is placed

    def work(run: nn.Module) -> None:
        check_steps(run, twin, 10)

    in_threads(lambda: work(resident), lambda: work(streamed))


# Seconds until Python changes threads: its own default, or so few that each line of restore meets calls of the others.
@pytest.mark.parametrize(("interval", "times"), [(None, 10), (1e-6, 100)])
def test_threads_may_restore_while_others_call(
    no_grad: None, interval: float | None, times: int, request: pytest.FixtureRequest
) -> None:
    if interval is not None:
        request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
        sys.setswitchinterval(interval)
    model, twin = stack(), stack()
    # Without fullgraph: torch counts the frames of all threads together then, and finds none in one of them.
    run = torch.compile(model, backend="chunkflow", dynamic=False, options=OPTIONS)
    run(torch.randn(4, 8))

    def call() -> None:
        check_steps(run, twin, times)

    def back() -> None:
        for _ in range(times):
            restore(model)

    in_threads(call, call, back)
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
