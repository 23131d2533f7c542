"""The executor on real threads: no weight is read too early or overwritten too soon, and it survives failures."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import EAGER, OPTIONS, WITHIN
from helpers import Coalesced, Stack, allocated_peak, check_steps, twins
from torch import nn
from torch.profiler import ProfilerActivity, profile

from chunkflow_compile import ChunkflowError, programs, restore
from chunkflow_compile.frontend import trace as tracing
from chunkflow_compile.passes.program.rewrite import issued
from chunkflow_compile.runtime.instructions import instructions
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.runtime.streams import CallingStream, Engine, HostEvent
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion


def streaming(layers: int = 3, **more: Any) -> tuple[Stack, Stack, torch.nn.Module, SingleCall]:
    model, twin = twins(lambda: Stack(layers))
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "eager", **more})
    run(torch.randn(4, 8))
    return model, twin, run, programs(model)[0]


def test_a_second_interrupt_leaves_the_next_step_right(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """It comes before the executor has given up the arena, whose chunks are those of the middle of a step."""
    _, twin, run, runner = streaming(debug="poison", policy="layerwise", slowdown=None)  # copies for the next step
    executor = runner.executor
    whole = executor.instructions[:]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for i in range(1, len(whole), 4):
        run(torch.randn(4, 8))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(executor, "instructions", [*whole[:i], interrupt, *whole[i + 1 :]])
            patch.setattr(executor, "forget", interrupt)
            run(torch.randn(4, 8))
        check_steps(run, twin, 1)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_value_is_gone_when_the_region_returns_that_reads_it_last(lowering: str, no_grad: None) -> None:
    _, _, run, runner = streaming(lowering=lowering)
    alive: list[int] = []
    executor = runner.executor
    target = executor.target
    seen: list[weakref.ref[torch.Tensor]] = []

    def spy(function: LoweredRegion) -> LoweredRegion:
        def call(inputs: list[Any]) -> Any:
            outputs = function(inputs)
            seen.extend(weakref.ref(o) for o in outputs)
            alive.append(sum(r() is not None for r in seen))
            return outputs

        return call

    target.regions = {n: spy(f) for n, f in target.regions.items()}
    executor.instructions = instructions(target, executor.cycle.ops[0], issued(executor.program))
    for _ in range(2):  # the first call of Inductor's code goes through what torch puts around it
        seen.clear()
        run(torch.randn(4, 8))
    assert len(alive) > 3 and set(alive) == {1}, "a region's output, not its input, and no older activation"


class Widening(nn.Module):
    """Blocks of which each multiplies its input by two weights.  Between the two it needs the input no more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_region_frees_its_input_after_the_last_use_inside(lowering: str, no_grad: None) -> None:
    """By the profile of torch's allocator, in units of a block's input: the wide value and the output are two and one."""
    model = Widening().requires_grad_(requires_grad=False)
    options = {**OPTIONS, "min_bytes": 2048, "chunk_bytes": 2048, "lowering": lowering}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    x = torch.randn(4096, 16)
    run(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(x)
    plan = programs(model)[0].plan
    assert len(plan.regions) == 4 and plan.moved_bytes, "a region is a block"
    assert allocated_peak(profiled) == 3 * x.nbytes, "with the input of the block it would be four"


def test_what_inductor_returns_of_a_slot_is_copied_out_of_it(no_grad: None) -> None:
    """Inductor returns its input if an op does not change it: the next window would overwrite the activation."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(64, 64))
            self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = self.w * torch.ones_like(self.w)
            for block in self.blocks:
                x = block(x) @ scaled / 8
            return x

    model, twin, x = Reads().eval(), Reads().eval(), torch.randn(4, 64)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    for _ in range(3):
        torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-4)
    assert "w" in {w.name for w in programs(model)[0].plan.streamed}


class Returns(Stack):
    """What a call does beside its result."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        super().__init__(1)
        self.requires_grad_(requires_grad=way == "gradients")
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        if self.way == "writes":
            x.mul_(2)
        with torch.enable_grad() if self.way == "gradients" else contextlib.nullcontext():
            y = super().forward(x)
        if self.way == "mode":
            torch.set_grad_enabled(True)
        return {"view": (y, x[1:]), "views": (y, y[1:])}.get(self.way, (y,))


# None: not asked, because it must.
@pytest.mark.parametrize(
    ("way", "bare"),
    [
        ("plain", True),
        ("views", True),
        ("view", False),
        ("writes", False),
        ("mode", False),
        ("symbols", False),
        ("gradients", None),
        ("autocast", None),
    ],
)
def test_aotautograd_wraps_only_what_it_must(
    way: str, bare: bool | None, monkeypatch: pytest.MonkeyPatch, no_grad: None
) -> None:
    answers = list[bool]()
    asked = tracing._needs_no_wrapper
    monkeypatch.setattr(tracing, "_needs_no_wrapper", lambda *given: answers.append(asked(*given)) or answers[-1])
    model, twin = Returns(way).eval(), Returns(way).eval()
    options = {**EAGER, "min_bytes": 1024}  # biases stay where they are
    run = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=way == "symbols", options=options)
    for rows in (4, 4, 6 if way == "symbols" else 4):
        x = torch.randn(rows, 8)
        given, known = x.clone(), len(answers)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"), torch.no_grad():
            found, mode = run(given), torch.is_grad_enabled()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"), torch.no_grad():
            expected = twin(x)
            assert mode == torch.is_grad_enabled()
        torch.testing.assert_close((*found, given), (*expected, x), rtol=2e-2, atol=2e-2)
        assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]
        shared = {t.untyped_storage().data_ptr() for t in (*found, given)}
        assert len(shared) == 2, "a view is one in what is returned too"
        assert known in (0, len(answers)), "compiled once"
    assert answers == ([] if bare is None else [bare])
    assert programs(model)[0].plan.moved_bytes > 0


def test_restore_waits_for_a_step_of_another_thread_and_ends_the_thread_of_copies(no_grad: None) -> None:
    before = set(threading.enumerate())
    model, twin, run, runner = streaming()
    (copies,) = (t for t in set(threading.enumerate()) - before if t.name == "chunkflow-copy")
    copy, inside = runner.executor.device.copy_bytes, threading.Event()
    runner.executor.device.copy_bytes = lambda *args: (inside.set(), time.sleep(0.02), copy(*args))
    x, results = torch.randn(4, 8), list[torch.Tensor]()

    def step() -> None:
        with torch.no_grad():
            results.append(run(x))

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(WITHIN)
    restore(model)
    thread.join(timeout=WITHIN)
    assert not thread.is_alive() and torch.equal(results[0], twin(x)) and not copies.is_alive()
    with pytest.raises(ChunkflowError, match="has ended"):
        _ = runner.executor


def test_an_event_waits_for_the_mark_that_was_newest_when_wait_was_called() -> None:
    log: list[str] = []
    gate, clock = threading.Event(), OwnClock()
    engine = Engine(("test",), clock=clock.host)
    copy, event, compute = engine.streams["test"], HostEvent(engine.bell), CallingStream(clock.host)
    compute.wait(event)  # never recorded: nothing to wait for, as on CUDA
    copy.run(lambda: gate.wait() and None)
    copy.run(lambda: log.append("copied"))
    copy.record(event)
    waited: list[float] = []
    block = event.block
    event.block = lambda mark: (clock.sleep(0.02), gate.set(), block(mark))[2]  # type: ignore[method-assign]
    compute.wait(event, waited.append)
    assert waited == [0.02]
    log.append("read")
    assert log == ["copied", "read"]
    compute.record(event)
    compute.wait(event)
    engine.close()


def coalesced(rank: int) -> None:
    model, twin = twins(lambda: Coalesced(32, 64))
    options = {**OPTIONS, "min_bytes": 1024, "slowdown": 1000.0, "lowering": "eager", "debug": "threads"}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        assert torch.equal(run(x), twin(x))
    (program,) = programs(model)
    assert [m.collectives for m in program.measurements] == [1, 1, 1]
    assert program.measurements[-1].moved_bytes == program.plan.moved_bytes > 0


def test_a_collective_of_several_results(on_ranks: Callable[..., None]) -> None:
    on_ranks(coalesced)
