"""The executor on real threads: no weight is read too early or overwritten too soon, and it survives failures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import OPTIONS, WITHIN
from helpers import Coalesced, Stack
from schedules import ranked
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, programs, restore
from chunkflow_compile.frontend import trace as tracing
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.runtime.device import ThreadsDevice
from chunkflow_compile.runtime.session import Session
from chunkflow_compile.runtime.streams import CallingStream, Engine, HostEvent, ThreadStream


def streaming(layers: int = 6, **more: Any) -> tuple[Stack, Stack, torch.nn.Module, Session]:
    torch.manual_seed(0)
    model = Stack(layers).eval()
    twin = Stack(layers).eval()
    twin.load_state_dict(model.state_dict())
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "eager", **more})
    run(torch.randn(4, 8))
    return model, twin, run, programs(model)[0]


def slow_copies(runner: Session, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    copy = runner.executor.device.copy_bytes

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        sleep(seconds)
        copy(target, source)

    runner.executor.device.copy_bytes = slow


def test_slots_are_aligned_and_inside_one_arena(no_grad: None) -> None:
    _, _, _, runner = streaming()
    slots = runner.executor.binding.slots.values()
    assert len({slot.untyped_storage().data_ptr() for slot in slots}) == 1
    assert {slot.data_ptr() % 256 for slot in slots} == {0}


def test_compute_waits_for_slow_copies(no_grad: None) -> None:
    """On a device where compute comes first and takes no time, copies come while it waits for them, and the others last."""
    clock = OwnClock()
    device = ThreadsDevice(ranked("compute", "collective", "copy"), clock=clock.host)
    _, twin, run, runner = streaming(arena=Arena(make=lambda *_: device))
    slow_copies(runner, 0.01, clock.sleep)
    device.copy.synchronize()
    for _ in range(4):
        x = torch.randn(4, 8)
        device.engine.pause()  # until the host has enqueued the step
        assert torch.equal(run(x), twin(x))
        device.copy.synchronize()
    copies = sum(not op.next_step for _, op in prefetches(runner.program))
    for measured in runner.measurements[1:]:
        assert measured.exposed_h2d_s == pytest.approx(measured.step_s)
        assert 0 < measured.exposed_h2d_s == pytest.approx(0.01 * copies)


@pytest.mark.parametrize("debug", [(), ("threads", "poison")])
def test_a_failed_copy_is_an_error_and_the_next_step_is_right(debug: tuple[str, ...], no_grad: None) -> None:
    model, twin, run, runner = streaming(debug=debug)
    assert runner.executor.device.name == ("threads" if debug else "cpu")
    copy = runner.executor.device.copy_bytes
    failing = iter([True])

    def fail_once(target: torch.Tensor, source: torch.Tensor) -> None:
        if next(failing, False):
            raise OSError("the link is down")
        copy(target, source)

    runner.executor.device.copy_bytes = fail_once
    with pytest.raises(ChunkflowError, match="A copy to the device failed: the link is down"):
        for _ in range(2):  # nothing waits for a copy for the next step before that step
            run(torch.randn(4, 8))
    for _ in range(2):
        x = torch.randn(4, 8)
        assert torch.equal(run(x), twin(x))
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_step_that_raises_midway_leaves_the_next_one_right(no_grad: None) -> None:
    _, twin, run, runner = streaming()
    executor = runner.executor
    whole = executor._instructions[:]

    def interrupt(step: object) -> None:
        raise KeyboardInterrupt

    executor._instructions[len(whole) // 2] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(torch.randn(4, 8))
    executor._instructions[:] = whole
    x = torch.randn(4, 8)
    assert torch.equal(run(x), twin(x))
    assert runner.measurements[-1].moved_bytes == runner.plan.moved_bytes


def test_a_second_interrupt_leaves_the_next_step_right(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    """It comes before the executor has given up the arena, whose chunks are those of the middle of a step."""
    _, twin, run, runner = streaming(debug="poison", policy="layerwise", slowdown=None)  # copies for the next step
    executor = runner.executor
    whole = executor._instructions[:]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for i in range(1, len(whole), 16):
        run(torch.randn(4, 8))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(executor, "_instructions", [*whole[:i], interrupt, *whole[i + 1 :]])
            patch.setattr(executor.binding.arena, "alone", interrupt)
            run(torch.randn(4, 8))
        x = torch.randn(4, 8)
        assert torch.equal(run(x), twin(x))


def test_two_threads_take_turns(no_grad: None) -> None:
    _, twin, run, runner = streaming()
    slow_copies(runner, 0.001)
    inputs = [torch.randn(4, 8) for _ in range(8)]
    outputs: dict[int, torch.Tensor] = {}

    def work(half: int) -> None:
        with torch.no_grad():
            for i in range(half, 8, 2):
                outputs[i] = run(inputs[i])

    threads = [threading.Thread(target=work, args=(half,)) for half in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(outputs[i], twin(x)) for i, x in enumerate(inputs))


def test_values_are_released_at_their_last_use(no_grad: None) -> None:
    _, _, run, runner = streaming()
    alive: list[int] = []
    regions = runner.executor._issuer._regions
    seen: list[object] = []

    def spy(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: torch.Tensor) -> object:
            outputs = function(*args)
            import weakref

            seen.extend(weakref.ref(o) for o in outputs)
            alive.append(sum(r() is not None for r in seen))
            return outputs

        return call

    issuer = runner.executor._issuer
    issuer._regions = {n: spy(f) for n, f in regions.items()}
    runner.executor._instructions = list(issuer.instructions())
    run(torch.randn(4, 8))
    assert max(alive) <= 2, "a region's input and output, and no older activation"


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
        super().__init__()
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
    options = {**OPTIONS, "min_bytes": 1024}  # biases stay where they are
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


def test_restore_waits_for_a_step_of_another_thread(no_grad: None) -> None:
    model, twin, run, runner = streaming()
    slow_copies(runner, 0.02)
    x, results = torch.randn(4, 8), list[torch.Tensor]()

    def step() -> None:
        with torch.no_grad():
            results.append(run(x))

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.05)
    restore(model)
    thread.join(timeout=WITHIN)
    assert not thread.is_alive() and torch.equal(results[0], twin(x))
    with pytest.raises(ChunkflowError, match="has ended"):
        _ = runner.executor


def test_an_event_waits_for_the_mark_that_was_newest_when_wait_was_called() -> None:
    log: list[str] = []
    gate, clock = threading.Event(), OwnClock()
    engine = Engine(("test",), clock=clock.host)
    copy, event, compute = ThreadStream(engine, "test"), HostEvent(engine.bell), CallingStream(clock.host)
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


def test_the_copy_thread_ends_with_restore(no_grad: None) -> None:
    model, *_ = streaming()
    copying = [t for t in threading.enumerate() if t.name == "chunkflow-copy"]
    assert copying
    restore(model)
    assert not any(t.is_alive() for t in copying[-1:])


def coalesced(rank: int) -> None:
    torch.manual_seed(0)
    model, twin = Coalesced(32, 64).eval(), Coalesced(32, 64).eval()
    twin.load_state_dict(model.state_dict())
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
