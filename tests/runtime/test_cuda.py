"""The cuda device through its protocol: real copies on a real thread, on a fake GPU of threads and host memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from clocks import OwnClock
from conftest import OPTIONS, WITHIN, WRAPS
from fake_cuda import FakeCuda, FakeStream
from helpers import Broken, Stack, UlyssesStack, anonymous_bytes, check_steps, twins
from hypothesis import given
from hypothesis import strategies as st
from random_programs import Bench, Choices, Spec, choices, examples, pooled
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, cycles, offload, programs, restore
from chunkflow_compile.frontend.preconditions import device_of
from chunkflow_compile.hardware.loopback import join_loopback
from chunkflow_compile.hardware.profiles import load_profile, profile_names
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.passes.ring import slot_bytes
from chunkflow_compile.runtime.cuda import CudaDevice
from chunkflow_compile.runtime.cuda_time import FRAMES, Clock
from chunkflow_compile.runtime.device import DeviceKind, check_device, check_kind
from chunkflow_compile.runtime.device_base import EVERY, FIRST_STEPS, Device
from chunkflow_compile.runtime.read_ahead import DriveReader, InRing
from chunkflow_compile.runtime.streams import CallingStream, Engine
from chunkflow_compile.weights.host_memory import empty_pages, fill, parse_cpus
from chunkflow_compile.weights.host_store import HostStore
from chunkflow_compile.weights.loader import WeightLoader, keep_dtype
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.source import DriveBytes, WeightFile
from chunkflow_compile.weights.staging import GpuStagings

EAGER = {**OPTIONS, "lowering": "eager"}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """One process that stands for two ranks: collectives go through host memory."""
    join_loopback(2)
    yield
    dist.destroy_process_group()


def compiled(cuda: FakeCuda, make: Any = lambda: Stack(3), **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model on a GPU, its twin, and the compiled model."""
    model, twin = twins(make)
    chosen = {**EAGER, "arena": cuda.arena(), "debug": "poison", **options}
    if {"weight_memory", "policy"} & options.keys():
        chosen.pop("slowdown")
    return model, twin, torch.compile(model, backend="chunkflow", fullgraph=True, options=chosen)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Stack(3), {"weight_memory": 35_000}),
        (lambda: UlyssesStack(2, width=64), {}),
        (lambda: UlyssesStack(2, width=64), {"policy": "layerwise"}),
    ],
)
def test_steps_are_right_and_bytes_are_those_of_the_plan(make: Any, options: dict[str, Any], no_grad: None) -> None:
    cuda = FakeCuda(copy_s=1e-4)
    model, twin, run = compiled(cuda, make, **options)
    width = 8 if isinstance(model, Stack) else 64
    for _ in range(5):
        x = torch.randn(16, width)
        assert torch.equal(run(x), twin(x))
    session = programs(model)[0]
    session.executor.device.copy.synchronize()
    steps = session.measurements
    assert session.plan.moved_bytes > 0 and len(steps) == 5
    assert session.executor.traffic.copied_bytes == session.plan.moved_bytes * 5 + steps[0].primed_bytes
    assert sorted(cuda.pinned.values()) == sorted(w.nbytes for w in session.plan.streamed), "no byte more is pinned"
    restore(model)
    assert not cuda.pinned


def test_a_step_allocates_nothing_and_waits_for_nothing(no_grad: None) -> None:
    cuda = FakeCuda()
    _, _, run = compiled(cuda, debug=())
    for _ in range(FRAMES + 2):
        run(torch.randn(4, 8))
    before = {**cuda.calls, "copy": 0, "on": 0}
    for _ in range(3):
        run(torch.randn(4, 8))
    assert {**cuda.calls, "copy": 0, "on": 0} == before and before["allocate"] == before["stream"] == 1
    assert before["event"] > 10 and "synchronize" not in before


@pytest.mark.parametrize("options", [{}, {"pin_memory": 0}])
def test_copies_that_nobody_times_take_one_change_of_stream_up_to_a_mark(
    options: dict[str, Any], no_grad: None
) -> None:
    cuda = FakeCuda(copy_s=1e-4)
    model, twin, run = compiled(cuda, policy="layerwise", **options)
    check_steps(run, twin, 3)
    session = programs(model)[0]
    copies, device = [op for _, op in prefetches(session.program)], session.executor.device
    windows = len({op.window for op in copies})
    device.measure(0)
    check_steps(run, twin, 1)
    before = cuda.calls.copy()
    check_steps(run, twin, 3)
    made = cuda.calls - before
    assert made["copy"] == 3 * len(copies) and made["on"] == 3 * windows < made["copy"]
    cuda.in_profiler = True
    check_steps(run, twin, 1)
    assert len([name for name in cuda.names if name.startswith("prefetch")]) == len(copies), "each has its name there"


def test_time_is_measured_by_the_device(no_grad: None) -> None:
    cuda = FakeCuda(0.004, OwnClock(tick=1e-7).host, late=True)
    cuda.in_profiler = True
    model, _, run = compiled(cuda)
    for _ in range(8):
        run(torch.randn(4, 8))
    session = programs(model)[0]
    count = len(list(prefetches(session.program)))
    copies, steps = 0.004 * count, session.measurements[1:]
    # The last copies of a step, for the next one, may end in either.
    assert sum(step.copy_s for step in steps) == pytest.approx(copies * len(steps), abs=0.005) and copies > 0
    for step in steps:
        assert step.copy_s == pytest.approx(copies, abs=0.005) and step.alone_s == step.copy_s
        assert abs(step.alone_bytes - step.moved_bytes) <= step.moved_bytes / count * 2
        assert 0.004 <= step.exposed_h2d_s < step.step_s < 2 * copies
        assert all(s > 0 for s in step.windows.compute_s)
    regions = {w for w in cuda.names if w.startswith("region_")}
    assert len(regions) == len(session.plan.regions) and any("blocks.1" in w for w in regions)
    assert f"prefetch {session.plan.streamed[0].name}" in " ".join(cuda.names)
    cuda.in_profiler = False
    shown = len(cuda.names)
    run(torch.randn(4, 8))
    assert len(cuda.names) == shown


@examples(7, 8)
@given(pooled, st.lists(choices, min_size=2, max_size=2))
def test_random_programs(spec: Spec, plans: list[Choices]) -> None:
    """As on the threads device: several steps, new inputs, slots full of NaN between them."""
    found = Bench(spec)
    for chosen in plans:
        program = found.program(chosen)
        cuda = FakeCuda(copy_s=2e-4 * (chosen.seed % 2))
        with torch.no_grad():
            executor, inputs = found.executor(program, cuda.arena()), found.inputs(4)
            for x, right in zip(inputs, found.expected([(program, x) for x in inputs]), strict=True):
                assert torch.equal(executor.run([found.arguments(program, x)])[0][0], right)
            executor.forget()
        assert executor.traffic.copied_bytes >= 4 * program.plan.moved_bytes
        cuda.engine.close()


def test_the_callers_stream_may_be_another_in_every_step(no_grad: None) -> None:
    cuda = FakeCuda(copy_s=1e-3)
    model, twin, run = compiled(cuda)
    for changes in range(3):
        cuda.callers = FakeStream(cuda, CallingStream())
        check_steps(run, twin, 1)
        handover = programs(model)[0].executor.device._handover
        assert handover.event.recorded == changes and (handover in cuda.callers.awaited) == (changes > 0)


@pytest.mark.parametrize("yields", ["soft", "hard"])
def test_a_hard_yield_keeps_late_copies_from_running_beside_collectives(yields: str, no_grad: None) -> None:
    """The profile has a faster link than the device, so each window gets more copies than fit into it."""
    cuda = FakeCuda(copy_s=1e-2)
    model, twin, run = compiled(cuda, lambda: UlyssesStack(2, width=64), hardware=WRAPS, **{"yield": yields})
    check_steps(run, twin, 4, (16, 64))
    session = programs(model)[0]
    assert bool(session.plan.barriers) == (yields == "hard") and session.plan.moved_bytes > 0
    assert any(prefetch.next_step for _, prefetch in prefetches(session.program))
    beside = [sum(m.windows.beside_s) for m in session.measurements[1:]]
    assert sum(beside) == 0 if yields == "hard" else sum(beside) > 0


def test_new_weights_are_written_after_the_copies_that_read_the_old(no_grad: None) -> None:
    cuda = FakeCuda(copy_s=2e-3)
    model, twin, run = compiled(cuda)
    run(torch.randn(4, 8))
    new = Stack(3).state_dict()
    before = cuda.calls["synchronize"]
    model.load_state_dict(new)
    twin.load_state_dict(new)
    assert cuda.calls["synchronize"] > before
    check_steps(run, twin, 2)


def test_a_step_that_fails_leaves_the_model_usable(no_grad: None) -> None:
    cuda = FakeCuda()
    model, twin, run = compiled(cuda)
    run(torch.randn(4, 8))
    executor = programs(model)[0].executor
    at, bad = len(executor.instructions) // 2, [True]

    def fail(step: Any) -> None:
        if bad.pop() if bad else False:
            raise RuntimeError("CUDA out of memory")

    executor.instructions.insert(at, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(torch.randn(4, 8))
    check_steps(run, twin, 3)
    assert len(programs(model)[0].measurements) == 4, "the failed step is not measured"


@pytest.fixture
def late() -> Iterator[tuple[FakeCuda, FakeStream, Engine]]:
    """A GPU, its stream for copies, and what runs that stream: it comes to nothing until it is resumed."""
    cuda, engine = FakeCuda(), Engine(("copy",))
    cuda.engine = engine
    engine.pause()
    yield cuda, FakeStream(cuda, engine.streams["copy"]), engine
    engine.close()


def test_the_clock_never_waits(late: tuple[FakeCuda, FakeStream, Engine]) -> None:
    cuda, copy, engine = late
    clock, caller = Clock(lambda: cuda.event(True), most=0), cuda.current()
    told: list[tuple[float, float, bool]] = []
    for number in range(FRAMES):
        found = clock.begin(caller, True, consecutive=number != 2)
        assert found is not None
        clock.end(found, caller, [copy], lambda *times: told.append(times))
    assert clock.begin(caller, True, True) is None, "all frames are in use: the call is not measured"
    clock.collect()
    assert not told
    engine.resume()
    clock.collect(wait=True)
    assert len(told) == FRAMES and told == sorted(told) and all(a <= b for a, b, _ in told)
    assert [whole for *_, whole in told] == [number != 2 for number in range(FRAMES)]


def test_each_call_is_measured_however_late_the_device_is(late: tuple[FakeCuda, FakeStream, Engine]) -> None:
    cuda, copy, engine = late
    clock, caller, calls = Clock(lambda: cuda.event(True)), cuda.current(), 120
    told: list[int] = []
    for call in range(calls):
        frame = clock.begin(caller, True, True)
        assert frame is not None
        clock.end(frame, caller, [copy], lambda *_, call=call: told.append(call))
        clock.collect()
    assert not told
    engine.resume()
    clock.collect(wait=True)
    assert told == [*range(calls)]


def test_the_passes_that_are_marked() -> None:
    device = Device()
    chosen = [step for step in range(FIRST_STEPS + 2 * EVERY + 1) if device.choose(step)]
    pair = FIRST_STEPS + EVERY - 1
    assert chosen == [*range(FIRST_STEPS + 1), pair, pair + 1, pair + EVERY, pair + EVERY + 1]
    device.measure(2)
    assert [device.choose(step) for step in range(5)] == [True, True, False, False, False]
    device.measure(None)
    assert all(device.choose(step) for step in range(5))


def test_an_event_that_is_gone_leaves_no_record() -> None:
    """Another event may have its id."""
    device = CudaDevice(FakeCuda())
    device.stage()
    for _ in range(3):
        device.copy.record(device.event())
    device.start(False, True)
    device.finish(None, lambda *_: None)
    assert not device.copy._records  # type: ignore[union-attr]
    device.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (1000, 257), ()])
def test_pages_hold_a_weight_and_nothing_else(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    values = values.T if values.dim() == 2 else values
    found = empty_pages(values)
    fill(found, values, frozenset(range(1)), GpuStagings())
    assert torch.equal(found, values) and found.stride() == values.stride() and found.dtype == values.dtype
    assert found.data_ptr() % 4096 == 0 and found.data_ptr() != values.data_ptr()
    assert found.untyped_storage().nbytes() == values.numel() * values.element_size()


def test_placing_takes_no_second_copy_of_the_weights() -> None:
    model, device = nn.ParameterList(), torch.device("cpu")
    like = torch.empty(8 << 20, dtype=torch.uint8, device="meta")
    for i in range(32):  # not of the allocator, which may keep what is freed
        model.append(nn.Parameter(empty_pages(like).fill_(i), requires_grad=False))
    store, before, total = HostStore(model, device, contextlib.nullcontext), anonymous_bytes(), 256 << 20
    loader = WeightLoader(device, [(str(i), p) for i, p in enumerate(model)], keep_dtype, pages=True)
    for i, weight in enumerate(model):
        store.add((str(i),), weight, loader)
        assert type(weight).__name__ == "HostWeight" and anonymous_bytes() - before <= 0.05 * total
    assert all(h.host[-1] == i and h.host.data_ptr() % 4096 == 0 for i, h in enumerate(store.buffers))


def test_lists_of_processors() -> None:
    assert parse_cpus("0-3,8\n") == {0, 1, 2, 3, 8} and parse_cpus("\n") == frozenset()


def test_a_pin_budget_is_kept(no_grad: None) -> None:
    cuda = FakeCuda()
    model, twin, run = compiled(cuda, pin_memory=30_000)
    with pytest.warns(
        UserWarning, match=r"could not be pinned after [\d.]+ K?i?B of other weights \(the budget is 29\.3 KiB"
    ):
        check_steps(run, twin, 1)
    assert 0 < sum(cuda.pinned.values()) <= 30_000 < sum(w.nbytes for w in programs(model)[0].plan.streamed)
    restore(model)


def test_dropping_a_model_unpins_its_pages(no_grad: None) -> None:
    cuda = FakeCuda()
    model, _, run = compiled(cuda)
    run(torch.randn(4, 8))
    assert cuda.pinned
    del model, run
    torch._dynamo.reset()
    deadline = time.monotonic() + WITHIN
    while cuda.pinned and time.monotonic() < deadline:  # the thread that closes the program holds it until then
        gc.collect()
        time.sleep(0.02)
    assert not cuda.pinned


@needs_no_gpu
def test_errors_without_a_gpu(no_grad: None) -> None:
    model, x = Stack(2).eval(), torch.ones(1, 8)
    before = model(x)
    with pytest.raises(ChunkflowError, match=r"There is no cuda: this torch .* Run chunkflow doctor"):
        offload(model, "cuda", min_bytes=0)
    with pytest.raises(ChunkflowError, match=r"There is no cuda:3: this torch"):
        Arena("cuda:3")
    with pytest.raises(ChunkflowError, match="ChunkFlow does not run on meta: place the model on cuda, or on the cpu"):
        check_device(torch.device("meta"))
    assert torch.equal(model(x), before), "unchanged"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (DeviceKind(threads=True), "imitates a GPU with host threads: leave it out on cuda"),
        (DeviceKind(link=LinkEmulation(bandwidth=1e8)), "use a profile without link_emulation"),
    ],
)
def test_options_that_a_gpu_refuses(kind: DeviceKind, said: str) -> None:
    with pytest.raises(ChunkflowError, match=said):
        check_kind(torch.device("cuda", 0), kind)
    check_kind(torch.device("cpu"), kind)


def test_cards_have_profiles() -> None:
    cards = [card for name in profile_names() for card in load_profile(name).cards]
    assert len(cards) == len(set(cards)) > 30
    assert all("bfloat16" in load_profile(name).gemm_flops for name in profile_names() if name != "cpu")


def test_tensors_that_forward_moves_may_be_on_another_device() -> None:
    """Tables that are not buffers, as in Qwen-Image."""
    graph = torch.fx.Graph()
    moved, read = graph.placeholder("moved"), graph.placeholder("read")
    graph.output((graph.call_method("to", (moved, "cuda")), graph.call_function(torch.relu, (read,))))
    module, inputs = torch.fx.GraphModule({}, graph), [torch.empty(4, device="meta"), torch.empty(4)]
    weight = {2: nn.Parameter(torch.empty(4))}
    assert device_of(weight, inputs, module) == torch.device("cpu")
    with pytest.raises(ChunkflowError, match="input 1 is on meta: move the input to cpu"):
        device_of(weight, inputs[::-1], module)


def test_a_jump_leaves_the_ring_to_copies_in_flight(tmp_path: Path) -> None:
    """The host runs ahead: the copies of the call before are issued, and the readers of their weights are still to run."""
    content = torch.randint(256, (1024,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(bytes(content.tolist()))
    file = WeightFile(Descriptor(os.open(tmp_path / "file", os.O_RDONLY)), "the file")
    device = CudaDevice(FakeCuda(copy_s=0.05))
    cycle = [DriveBytes(file, 64 * i, 64) for i in range(16)]
    device.stage()
    device.start(True, True)
    reader, slots = DriveReader(device.pin), torch.zeros(16, 64, dtype=torch.uint8)
    reads, step, read = device.stream("read"), 4 * slot_bytes(64), [device.read_event() for _ in range(4)]

    def start_and_copy(first: int) -> None:
        for op in begin:
            op()
        for i, at in enumerate(range(0, step, slot_bytes(64))):
            reads.run(partial(reader.read, cycle[first + i], at, step))
            reads.record(read[i])
            device.copy.wait(read[i])
            source = InRing(reader, cycle[first + i], at)
            device.copy.run(partial(device.copy_bytes, slots[first + i], source), None, "copy")

    join, handover = device.event(), device.event()
    begin = [partial(device.copy.record, join), partial(device.compute.wait, join)]
    begin += [partial(device.compute.record, handover), partial(reads.wait, handover)]
    start_and_copy(0)
    start_and_copy(8)
    device.copy.synchronize()
    expected = content.view(16, 64)
    assert torch.equal(slots[8:12], expected[8:12])
    assert torch.equal(slots[:4], expected[:4])
    copied = device.event()
    for i in range(2):  # a read after the copy out of its bytes, although the event is recorded again before it waits
        device.copy.record(copied)
        reads.wait(copied)
        reads.run(partial(reader.read, cycle[i], 0, step))
        reads.record(read[0])
        device.copy.wait(read[0])
        device.copy.run(partial(device.copy_bytes, slots[i + 12], InRing(reader, cycle[i], 0)), None, "copy")
    device.copy.synchronize()
    assert torch.equal(slots[12:14], expected[:2])
    device.close()


@pytest.mark.parametrize("name", ["read", "copy"])
def test_the_collector_unpins_memory_on_a_thread_of_ours(name: Literal["read", "copy"]) -> None:
    """It waits for no copy that waits for this thread, and the step still waits for its copies."""
    device = CudaDevice(FakeCuda())
    device.stage()
    device.start(False, True)
    reads, read, collects, collected = device.stream("read"), device.read_event(), Event(), Event()

    def collect() -> None:
        assert collects.wait(WITHIN)
        device.sync_copies()
        collected.set()

    def broken() -> None:
        raise ValueError("a broken copy")

    device.stream(name).run(collect)
    reads.record(read)
    device.copy.wait(read)
    device.copy.run(broken)
    collects.set()
    try:
        assert collected.wait(WITHIN)
    finally:
        read.reach(1)  # else a failure would never end
    with pytest.raises(ChunkflowError, match="A copy to the device failed: a broken copy"):
        device.copy.end_step()
    device.close()


@pytest.mark.parametrize(("release", "forked"), [("5.4.0-150-generic", False), ("6.8.0-31-generic", True)])
def test_pages_that_a_device_reads_are_not_forked_by_old_kernels(
    release: str, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    pages = empty_pages(torch.ones(1 << 16))
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for before, after in pairwise(regions):
        bounds = [line.split()[0].split("-") for line in before.splitlines() if "-" in line.split(" ")[0]]
        if bounds and int(bounds[-1][0], 16) <= pages.data_ptr() < int(bounds[-1][1], 16):
            assert ("dc" in after.splitlines()[0].split()) != forked
            return
    raise AssertionError("the pages are in no region")


def test_rocm_without_a_driver_is_not_called_a_build_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ChunkflowError, match="finds no GPU or no driver"):
        check_device(torch.device("cuda"))


def test_a_program_between_the_calls_of_a_cycle_leaves_its_passes_whole(no_grad: None) -> None:
    """One that streams nothing, and so is no jump: it runs in each pass, and its steps have other numbers."""
    cuda = FakeCuda()
    torch.manual_seed(0)
    model = Broken().eval()
    offload(model, min_bytes=OPTIONS["min_bytes"])
    run = torch.compile(model, backend="chunkflow", options={**EAGER, "arena": cuda.arena()})
    for _ in range(2):
        run(torch.randn(4, 8))
    passes = FIRST_STEPS + EVERY + 1
    for _ in range(passes):
        run(torch.randn(4, 8))
    (route,) = cycles(model)
    assert len(route.keys) == 2 and len(programs(model)) == 3 and route.jumps == 0
    assert len(route.measurements) == FIRST_STEPS + 2, "the first ones, and the second of each pair"
