"""Injected faults: each is an error in words, and the model survives: it can be saved, restored and compiled again."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import WITHIN, forking
from helpers import Stack, UlyssesStack, check_steps, memory_named, twins
from surviving import EAGER, assert_survives, compiled, fail_at, goes_on, run_once, stack
from torch import nn

from chunkflow_compile import ChunkflowError, programs, restore
from chunkflow_compile.runtime.device import CpuDevice
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.units import enough, size


@pytest.fixture
def running(no_grad: None) -> tuple[Stack, Stack, nn.Module, SingleCall]:
    return run_once()


THREADS = ("threads", "poison")
LONG = [pytest.param(*case, marks=pytest.mark.long) for case in ((8, ()), (1, THREADS), (8, THREADS))]


@pytest.mark.parametrize(("call", "debug"), [(1, ()), (3, THREADS), *LONG])
def test_a_copy_that_fails(call: int, debug: tuple[str, ...], no_grad: None) -> None:
    model, twin = stack(), stack()
    run = compiled(model, debug=debug)
    run(torch.randn(4, 8))
    device = programs(model)[0].executor.device
    assert device.name == ("threads" if debug else "cpu")
    device.copy_bytes = fail_at(device.copy_bytes, call, OSError("the link is down"))
    with pytest.raises(ChunkflowError, match="A copy to the device failed: the link is down"):
        for _ in range(3):  # nothing waits for a copy for the next step before that step
            run(torch.randn(4, 8))
    goes_on(model, twin, run)
    assert_survives(model, twin)


@pytest.mark.parametrize("debug", [(), ("threads",)])
def test_a_region_that_fails(debug: tuple[str, ...], no_grad: None) -> None:
    model, twin = stack(), stack()
    run = compiled(model, debug=debug)
    run(torch.randn(4, 8))
    executor = programs(model)[0].executor
    issues = executor.instructions
    failing = fail_at(lambda: None, 1, RuntimeError("no kernel image"))
    issues.insert(len(issues) // 2, lambda step: executor.device.compute.run(failing))
    with pytest.raises((ChunkflowError, RuntimeError), match="no kernel image"):
        run(torch.randn(4, 8))
    goes_on(model, twin, run)
    assert_survives(model, twin)


def test_host_memory_that_cannot_be_pinned(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning fails for the second weight: it and all later ones are copied from pageable memory, with one warning."""
    unpinned: list[int] = []
    tried: list[int] = []

    def pin(self: CpuDevice, host: torch.Tensor) -> Callable[[], None]:
        tried.append(host.data_ptr())
        if len(tried) == 2:
            raise OSError("cudaErrorMemoryAllocation")
        return lambda: unpinned.append(host.data_ptr())

    monkeypatch.setattr(CpuDevice, "pin", pin)
    model, twin = stack(), stack()
    run = compiled(model)
    said = r"host memory of blocks\.\d\.\w+\.weight \(8\.0 KiB\) could not be pinned"
    with pytest.warns(UserWarning, match=said) as told:
        check_steps(run, twin, 3)
    assert len([w for w in told if "pinned" in str(w.message)]) == 1 and len(tried) == 2
    assert len(programs(model)[0].plan.streamed) > 2
    restore(model)
    assert unpinned == tried[:1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The host memory")
        assert_survives(model, twin)


@pytest.mark.parametrize("memory", [None, 40000])
def test_an_arena_that_cannot_be_allocated(memory: int | None, no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    budget = {"slowdown": None, "chunk_bytes": 8192}  # one chunk per weight: with two, planning takes seconds
    options = {} if memory is None else {**budget, "weight_memory": memory}
    run = compiled(model, **options)
    given = "No budget was given" if memory is None else f"The budget was weight_memory={size(memory)}"
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "allocate", fail_at(CpuDevice.allocate, 1, torch.OutOfMemoryError("out of memory")))
        with pytest.raises(
            ChunkflowError, match=rf"no room for an arena of [\d.]+ KiB.*{given}.* weight_memory='"
        ) as told:
            run(x)
    floor = memory_named(told.value)
    with pytest.raises(Exception, match=f"Give weight_memory='{enough(floor)}' "):
        compiled(stack(), **budget, weight_memory=floor - 1024)(x)
    assert torch.equal(run(x), twin(x)), "there is room again"
    assert_survives(model, twin, **budget, weight_memory=floor)


def test_a_checkpoint_that_lacks_a_shard(running: tuple[Stack, Stack, nn.Module, SingleCall]) -> None:
    """As for any model, the file's weights are loaded and the missing ones are named."""
    model, twin, run, _ = running
    torch.manual_seed(1)
    state = {n: v for n, v in Stack(4).state_dict().items() if not n.startswith("blocks.3")}
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.3"):
        model.load_state_dict(state)
    twin.load_state_dict(state, strict=False)
    check_steps(run, twin, 2)


def test_a_weight_that_gets_other_memory(running: tuple[Stack, Stack, nn.Module, SingleCall]) -> None:
    model, twin, run, session = running
    with pytest.raises(ChunkflowError, match="cannot be copied or pickled"):
        pickle.dumps(session.arena)
    pickle.dumps(model)
    for changed in (torch.zeros(64, 32), twin.blocks[1].up.weight.data.clone()):
        for m in (model, twin):
            m.blocks[1].up.weight.data = changed.clone()
            m.head.bias.data = torch.full((8,), float(changed.sum() == 0))  # it stays on the device
        check_steps(run, twin, 2)
    assert_survives(model, twin)


def call_and_restore(model: Stack, run: nn.Module, send: Any) -> None:
    """In a forked process: sends the error of a call, and whether the restored model is whole."""
    with torch.no_grad():
        try:
            run(torch.ones(4, 8))
            said = "nothing"
        except ChunkflowError as error:
            said = str(error)
        restore(model)
        send.send((said, torch.equal(model(torch.ones(4, 8)), stack()(torch.ones(4, 8)))))


@pytest.mark.parametrize("beside_a_step", [False, True])
def test_a_forked_process(beside_a_step: bool, running: tuple[Stack, Stack, nn.Module, SingleCall]) -> None:
    """A step of another thread holds locks, and that thread does not exist in the child."""
    model, twin, run, session = running
    threads, inside, forked = torch.get_num_threads(), threading.Event(), threading.Event()
    torch.set_num_threads(1)  # the child has none of OpenMP's threads either
    run(torch.randn(4, 8))  # torch may compile again for another number of threads: here, not in the child
    session = programs(model)[-1]
    device, plain = session.executor.device, session.executor.device.copy_bytes
    stepping = threading.Thread(target=torch.no_grad()(lambda: run(torch.randn(4, 8))), daemon=True)
    if beside_a_step:
        device.copy_bytes = lambda *args: (inside.set(), forked.wait(WITHIN), plain(*args))
        stepping.start()
        assert inside.wait(WITHIN)
    receive, send = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=call_and_restore, args=(model, run, send))
    child.start()
    forked.set()
    try:
        assert receive.poll(WITHIN), "the child hangs"
        said, whole = receive.recv()
        child.join()
    finally:
        child.kill()
        torch.set_num_threads(threads)
    if beside_a_step:
        stepping.join()
        device.copy_bytes = plain
    assert "process was forked from one that runs a ChunkFlow program" in said and whole
    x = torch.randn(4, 8)
    assert torch.equal(run(x), twin(x)), "the parent continues"
    assert_survives(model, twin)


def die(rank: int, folder: str, how: str, debug: tuple[str, ...], report: Any) -> None:
    """The last of three ranks dies, or hangs, in its second step.  The others raise an error and continue as two ranks."""
    options = {**EAGER, "min_bytes": 1024, "debug": debug}
    timeout = timedelta(seconds=WITHIN)
    dist.init_process_group("gloo", init_method=f"file://{folder}/three", rank=rank, world_size=3, timeout=timeout)
    model, twin = twins(lambda: UlyssesStack(1, 48, 6))
    with torch.no_grad():
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
        assert torch.equal(run(torch.ones(4, 48)), twin(torch.ones(4, 48)))
        if rank == 2:
            session = programs(model)[0]
            issues = session.executor.instructions
            fault = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if how == "killed" else (lambda: time.sleep(WITHIN))
            issues.insert(len(issues) // 2, lambda step: session.executor.device.compute.run(fault))
        if how == "late":  # not sooner: ranks that compile are late too
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8))
        start = time.monotonic()
        with pytest.raises(ChunkflowError, match=r"The collective all_to_all_single\w* failed in step 1: a rank died"):
            run(torch.ones(4, 48))
        took = time.monotonic() - start
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        saved.seek(0)
        assert all(torch.equal(v, twin.state_dict()[n]) for n, v in torch.load(saved).items())
        restore(model)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        dist.destroy_process_group()
        torch._dynamo.reset()
        dist.init_process_group("gloo", init_method=f"file://{folder}/two", rank=rank, world_size=2, timeout=timeout)
        again = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
        check_steps(again, twin, 2, (4, 48))
        report.put((rank, took))


LATE = [pytest.param(*case, marks=pytest.mark.long) for case in (("late", ()), ("killed", ("threads",)))]


@pytest.mark.parametrize(("how", "debug"), [("killed", ()), *LATE])
def test_a_rank_that_is_killed_or_late_mid_step(how: str, debug: tuple[str, ...], tmp_path: Path) -> None:
    context = forking()
    report = context.Queue()
    ranks = [context.Process(target=die, args=(r, str(tmp_path), how, debug, report)) for r in range(3)]
    for rank in ranks:
        rank.start()
    try:
        told = [report.get(timeout=2 * WITHIN) for _ in range(2)]
        for rank in ranks[:2]:
            rank.join(timeout=WITHIN)
    finally:
        for rank in ranks:
            rank.kill()
    assert sorted(r for r, _ in told) == [0, 1] and [r.exitcode for r in ranks[:2]] == [0, 0]
    assert all(took < WITHIN for _, took in told), "before the group's timeout is over, and before the late rank comes"
