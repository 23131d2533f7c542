"""Tests that need a GPU: pytest -m gpu, or make test-gpu.  Skipped without one."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Stack, UlyssesStack, check_steps, on_card
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, explain, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.hardware.loopback import join_loopback
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.weights.host_buffer import buffer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not measured: no GPU"),
    pytest.mark.usefixtures("no_grad"),
]
MIB = 1 << 20
OPTIONS: dict[str, Any] = {
    "min_bytes": 4096,
    "chunk_bytes": 1 << 16,
    "hardware": "rtx-4090-pcie",
    "policy": "layerwise",
    "lowering": os.environ.get("CHUNKFLOW_GPU_LOWERING", "inductor"),  # a stand-in of CUDA executes no kernel of Triton
}
# Sides of a matrix whose square takes milliseconds: on a card, and on a stand-in, where a core computes it.
STAND_IN = "CHUNKFLOW_GPU_LOWERING" in os.environ
HEAVY, HEAVIER = (512, 768) if STAND_IN else (2048, 4096)
FAMILIES = ["wan", "flux", "hunyuanvideo", "qwen-image"]


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, twin = make().eval(), make().eval().cuda()
    twin.load_state_dict(model.state_dict())
    return model, twin


def compiled(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(1)
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, **options})


def resident(model: nn.Module) -> Any:
    """The same regions with all weights on the device: the reference, equal bit for bit."""
    return compiled(model, policy="resident")


def streamed(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Any, Any]:
    """A model on the host, what streams it, and what runs the same with all weights on the device."""
    model, twin = twins(make)
    offload(model, "cuda", min_bytes=4096)
    return model, compiled(model, **options), resident(twin)


def check_on_card(run: Any, right: Any, steps: int, shape: tuple[int, ...] = (16, 8)) -> None:
    check_steps(run, right, steps, shape, "cuda")


def check_moved(model: nn.Module, steps: int) -> None:
    session = programs(model)[0]
    session.executor.device.copy.synchronize()
    primed = sum(m.primed_bytes for m in session.measurements)
    assert session.plan.moved_bytes > 0 and len(session.measurements) == steps
    assert session.executor.traffic.copied_bytes == session.plan.moved_bytes * steps + primed


def test_without_arrivals_numbers_are_wrong() -> None:
    """The tests that compare numbers can fail."""
    model, run, right = streamed(lambda: Stack(8, width=1024))
    x = torch.randn(64, 8, device="cuda")
    assert torch.equal(run(x), right(x))
    executor = programs(model)[0].executor
    executor.forget()
    for slot in executor.binding.slots.values():
        slot.fill_(255)
    copy, ballast = executor.device.copy_bytes, torch.randn(HEAVIER, HEAVIER, device="cuda")
    executor.device.copy_bytes = lambda *args: (ballast @ ballast, copy(*args))
    executor.device.compute.wait = lambda event, waited=None: None
    assert not torch.equal(run(x), right(x))


def test_pinned_bytes_are_those_of_the_weights_and_are_given_back() -> None:
    model, run, _ = streamed(lambda: Stack(4, width=512))
    run(torch.randn(4, 8, device="cuda"))
    names = {w.name for w in programs(model)[0].plan.streamed}
    buffers = [buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None]
    assert names and all(h.pinned == (h.name in names) == h.host.is_pinned() for h in buffers)
    assert buffers[0].store.pinned_bytes == sum(h.nbytes for h in buffers if h.name in names)
    restore(model)
    assert not any(h.host.is_pinned() for h in buffers)


def test_memory_stays_within_the_budget() -> None:
    model, _ = twins(lambda: Stack(24, width=1024))
    total, budget = sum(p.numel() * p.element_size() for p in model.parameters()), 40 * MIB
    square = torch.randn(64, 64, device="cuda")
    F.linear(square @ square, square, square[0])  # cuBLAS and cuBLASLt have memory of their own
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    offload(model, "cuda", min_bytes=4096)
    run, x = compiled(model, policy="chunkflow", weight_memory=budget), torch.randn(64, 8, device="cuda")
    run(x)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        run(x)
    activations = 8 * 64 * 1024 * 4 * 8
    assert torch.cuda.max_memory_allocated() - before <= budget + activations < total
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held, "a step leaves nothing behind"


def test_new_weights_may_come_from_the_card() -> None:
    model, twin = twins(lambda: Stack(6, width=512))
    offload(model, "cuda", min_bytes=4096)
    run, right = compiled(model), resident(twin)
    for _ in range(3):
        check_on_card(run, right, 1)
        new = {k: torch.randn_like(v) for k, v in twin.state_dict().items()}
        model.load_state_dict(new)
        twin.load_state_dict(new)
    check_on_card(run, right, 1)


def test_dropping_a_model_during_its_copies_harms_no_other() -> None:
    model, run, _ = streamed(lambda: Stack(8, width=1024))
    for _ in range(2):
        run(torch.randn(16, 8, device="cuda"))
    model.load_state_dict(model.state_dict())  # starts a new session, with streams of its own
    run(torch.randn(16, 8, device="cuda"))
    del model, run
    torch._dynamo.reset()
    gc.collect()
    ones = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert bool((ones == 1).all())


def test_several_models_in_one_arena() -> None:
    arena = Arena("cuda")
    cases = [streamed(partial(Stack, 6, width=w), arena=arena) for w in (256, 128)]
    for _ in range(3):
        for _, run, right in cases:
            check_on_card(run, right, 1)
    assert arena.nbytes == max(programs(model)[0].plan.arena_bytes for model, _, _ in cases)


def test_the_caller_may_use_another_stream() -> None:
    _, run, right = streamed(lambda: Stack(6, width=512))
    results = []
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):  # the host waits for none of them
            x = torch.randn(16, 8, device="cuda")
            results.append((x, run(x)))
    torch.cuda.synchronize()
    assert all(torch.equal(got, right(x)) for x, got in results)


def test_what_was_measured_can_be_explained() -> None:
    model, run, _ = streamed(lambda: Stack(6, width=512))
    for _ in range(4):
        run(torch.randn(16, 8, device="cuda"))
    step = programs(model)[0].measurements[-1]
    assert 0 < sum(step.windows.compute_s) <= step.step_s and step.copy_s > 0
    assert explain(run).plan == programs(model)[0].plan.digest


def test_an_arena_that_does_not_fit() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    model, twin = twins(lambda: Stack(4, width=512))
    offload(model, "cuda", min_bytes=4096)
    run = compiled(model)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(
            Exception, match=r"no room for an arena of .* the least that this model runs in is weight_memory="
        ):
            run(torch.randn(4, 8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    restore(model)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_missing_cards() -> None:
    model, _ = twins(lambda: Stack(2))
    with pytest.raises(ChunkflowError, match=r"There is no cuda:63: this process sees \d+ GPUs"):
        offload(model, "cuda:63")
    with pytest.raises(Exception, match="leave it out on cuda"):  # torch wraps what a backend raises
        offload(model, "cuda", min_bytes=0)
        compiled(model, debug="threads")(torch.randn(4, 8, device="cuda"))


def check_collectives() -> None:
    """With the default process group as it is."""
    try:
        model, run, right = streamed(lambda: UlyssesStack(4, width=256))
        check_on_card(run, right, 4, (64, 256))
        check_moved(model, 4)
        assert programs(model)[0].measurements[-1].collective_s > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("by_kernels", [False, True])
def test_collectives_through_host_memory(by_kernels: bool) -> None:
    if by_kernels and STAND_IN:
        pytest.skip("a stand-in of CUDA executes no kernel of Triton")
    join_loopback(2, by_kernels)
    check_collectives()


@pytest.mark.skipif(STAND_IN or not dist.is_nccl_available(), reason="there is no NCCL")
def test_collectives_of_nccl() -> None:
    """A group of one rank: its kernels run, and each collective returns its input."""
    more = {"device_id": torch.device("cuda", 0)}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, **more)
    check_collectives()


@pytest.mark.parametrize("slow", ["compute", "copy"])
def test_a_heavy_kernel_on_either_side_changes_nothing(slow: str) -> None:
    """A millisecond before regions, or before copies, is enough for a race that a missing event would allow."""
    model, run, right = streamed(lambda: Stack(8, width=256), debug="poison")
    run(torch.randn(64, 8, device="cuda"))
    executor = programs(model)[0].executor
    ballast = torch.randn(HEAVY, HEAVY, device="cuda")

    def heavy() -> None:
        ballast @ ballast

    if slow == "compute":
        issues = executor.instructions
        executor.instructions = [i for issue in issues for i in (lambda step: heavy(), issue)]
    else:
        copy = executor.device.copy_bytes
        executor.device.copy_bytes = lambda *args: (heavy(), copy(*args))
    check_on_card(run, right, 6, (64, 8))


def two_on_one_card(rank: int) -> None:
    model, run, right = streamed(lambda: UlyssesStack(3, width=256))
    for _ in range(4):
        x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
        assert torch.equal(run(x), right(x))
    check_moved(model, 4)


def test_two_processes_on_one_card(on_ranks: Callable[..., None]) -> None:
    on_ranks(two_on_one_card, fresh=True)


def test_a_weight_larger_than_the_cache() -> None:
    model, run, right = streamed(lambda: Stack(2, width=8192), chunk_bytes=16 * MIB)  # 512 MiB a weight
    check_on_card(run, right, 3)
    check_moved(model, 3)


# The families take most of the time, so they come last.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"policy": "chunkflow", "weight_memory": "3MiB"}, {"policy": "layerwise-barrier"}]
)
def test_steps_equal_those_with_all_weights_on_the_device(family: str, options: dict[str, Any]) -> None:
    """One compilation, two plans.  Two compilations by Inductor may differ in rounding: it chooses kernels by their time."""
    size = Size(layers=3, heads=4, head_dim=32, frames=2, height=16, width=16, text=16)
    torch.manual_seed(0)
    model = small_model(family, size).eval()
    offload(model, "cuda", min_bytes=4096)
    run = compiled(model, **options)

    def outputs() -> list[torch.Tensor]:
        given = (small_inputs(family, size, step) for step in range(5))
        return [run(**on_card(each))[0].clone() for each in given]

    got = outputs()
    check_moved(model, 5)
    session = programs(model)[0]
    session.call.active.variant = session.variant.remade(
        goal=session.variant.settings.goal.aimed_at(Goal(policy="resident"))
    )
    want = outputs()
    assert programs(model)[0].plan.moved_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(got[0], got[1])
    restore(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
