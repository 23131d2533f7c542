"""Ctrl-C at any line of a step, of a handover or of a move: nothing hangs, and no later number is wrong."""

from __future__ import annotations

import gc
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import Stack, check_steps
from surviving import EAGER, assert_survives, compiled, fail_at, goes_on, run_once, stack

from chunkflow_compile import Arena, cycles, offload, programs, restore
from chunkflow_compile.runtime.executor import Executor
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_store import HostStore


def _interrupt(number: int, frame: FrameType | None) -> None:
    """To Dynamo, any error in a guard is a guard that does not hold, and it compiles again: repeat such a Ctrl-C later."""
    codes = [inside.f_code for inside, _ in traceback.walk_stack(frame)]
    in_guard = any(c.co_filename.endswith("torch/_dynamo/guards.py") for c in codes)
    if in_guard or ("<string>", "guard") in [(c.co_filename, c.co_name) for c in codes]:
        threading.Timer(0.001, signal.raise_signal, (number,)).start()
    else:
        signal.default_int_handler(number, frame)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Makes interrupts arrive: shells start background jobs with them ignored, and Python drops those that come during a
    callback of the collector, such as hypothesis has."""
    before = signal.signal(signal.SIGINT, _interrupt)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


class Copies:
    """The copies of a device, which take ``seconds`` longer; one of them can be told to press Ctrl-C when it begins."""

    def __init__(self, device: Any, seconds: float) -> None:
        self.begun = 0
        self.interrupting: int | None = None
        plain = device.copy_bytes

        def slow(target: torch.Tensor, source: torch.Tensor, lane: str) -> None:
            self.begun += 1
            if self.begun == self.interrupting:
                signal.raise_signal(signal.SIGINT)
            time.sleep(seconds)
            plain(target, source, lane)

        device.copy_bytes = slow


def interrupted(
    run: Callable[..., Any], twin: Stack, copies: Copies, moments: int, calls: int, after: Callable[[], None]
) -> int:
    """How many of so many interrupts end a series of calls.  They come during copies of its first ``calls`` calls.

    ``after``: called after two more calls.
    """
    before = copies.begun
    for _ in range(calls):
        run(torch.randn(4, 8))
    most, count = copies.begun - before, 0
    for moment in range(moments):
        copies.interrupting = copies.begun + 1 + most * moment // moments
        try:
            for _ in range(100):
                run(torch.randn(4, 8))
        except KeyboardInterrupt:
            count += 1
        for _ in range(2):
            x = torch.randn(4, 8)
            assert torch.equal(run(x), twin(x))
        after()
    return count


@pytest.mark.parametrize("debug", [pytest.param((), marks=pytest.mark.long), ("threads", "poison")])
def test_an_interrupt_during_a_step(debug: tuple[str, ...], no_grad: None, ctrl_c: None) -> None:
    """Ctrl-C, at ten moments of two steps whose copies are slow."""
    model, twin = stack(), stack()
    run = compiled(model, debug=debug)
    run(torch.randn(4, 8))
    device = programs(model)[0].executor.device
    copies = Copies(device, 0.005)
    device.measure(10_000)  # every step
    cold = list[bool]()

    def after() -> None:
        cold.append(programs(model)[-1].measurements[-2].primed_bytes > 0)

    assert interrupted(run, twin, copies, 10, 2, after) == 10 and sum(cold) >= 5, "the others came between steps"
    assert_survives(model, twin)


def test_an_interrupt_while_an_arena_changes_hands(no_grad: None) -> None:
    """At the first copies: the program that had it before must not take its chunks for whole."""
    arena = Arena()
    models, twins = [stack(), Stack(3).eval()], [stack(), Stack(3).eval()]
    twins[1].load_state_dict(models[1].state_dict())
    runs = [compiled(model, arena=arena, disable=["cycle"]) for model in models]
    for run in (*runs, runs[0]):
        run(torch.randn(4, 8))
    stream = arena.streams.copy
    enqueue = stream.run
    for cut in range(1, 6):
        stream.run = fail_at(enqueue, cut, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            runs[1](torch.randn(4, 8))
        stream.run = enqueue
        for model, twin, run in zip(models, twins, runs, strict=True):
            goes_on(model, twin, run)
        runs[0](torch.randn(4, 8))
    for model, twin in zip(models, twins, strict=True):
        assert_survives(model, twin)


def test_an_interrupt_while_weights_move_back(no_grad: None) -> None:
    model, twin, _, _ = run_once()
    store = next(buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None).store
    third = store.buffers[-3]
    third.unpin = fail_at(third.unpin, 1, KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        restore(model)
    assert all(torch.equal(v, twin.state_dict()[n]) for n, v in model.state_dict().items())
    x = torch.randn(4, 8)
    assert torch.equal(model(x), twin(x))
    assert_survives(model, twin)


def test_an_interrupt_while_weights_move(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    add = HostStore.add

    def late(self: HostStore, *args: Any) -> Any:
        add(self, *args)
        raise KeyboardInterrupt

    for failing in (fail_at(add, 3, KeyboardInterrupt()), late):
        model, twin = stack(), stack()
        with monkeypatch.context() as patch:
            patch.setattr(HostStore, "add", failing)
            with pytest.raises(KeyboardInterrupt):
                offload(model, min_bytes=4096)
        assert torch.equal(model(torch.ones(4, 8)), twin(torch.ones(4, 8)))
        assert_survives(model, twin)


@pytest.mark.parametrize("debug", [(), pytest.param(("threads", "poison"), marks=pytest.mark.long)])
def test_an_interrupt_during_a_cycle(debug: tuple[str, ...], no_grad: None, ctrl_c: None) -> None:
    """Ctrl-C, at twelve moments of passes over blocks that are compiled one by one."""
    model, twin = stack(), stack()
    offload(model, min_bytes=4096)
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**EAGER, "debug": list(debug)})
    for _ in range(3):
        model(torch.randn(4, 8))
    (route,) = cycles(model)
    copies = Copies(programs(model)[0].executor.device, 0.002)
    assert interrupted(model, twin, copies, 12, 2, lambda: None) == 12 and route in cycles(model)
    x = torch.randn(4, 8)
    restore(model)
    assert torch.equal(model(x), twin(x))


def test_an_interrupt_while_an_arena_is_freed(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each wait for an executor's work, of two sizes: those before it are gone, and those after it run on."""
    model, twin = stack(), stack()
    offload(model, min_bytes=4096)
    for block in model.blocks:
        block.compile(backend="chunkflow", options=EAGER)
    check_steps(model, twin, 4)
    assert len(cycles(model)) == 1
    arena = programs(model)[0].arena
    for moment in range(1, 6):
        check_steps(model, twin, 2, (6, 8))
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "forget", fail_at(Executor.forget, moment, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                arena.evict()
        check_steps(model, twin, 2)
    assert_survives(model, twin)
