"""A pipeline within a budget of device memory, counted by torch's allocator."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import ChunkflowError, apply, cycles, explain, programs, remove
from chunkflow_compile.hardware.headroom import budget_for
from chunkflow_compile.pipeline.budget import budget_of

pytest.importorskip("transformers")
MIB = 1 << 20
WAN, FLUX = SMALL_PIPELINES["wan"], SMALL_PIPELINES["flux"]


def peak(pipe: Any, name: str, seed: int, **changed: Any) -> tuple[int, torch.Tensor]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    got = SMALL_PIPELINES[name].generate(pipe, seed, **changed)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), got


MORE = [name for name in SMALL_PIPELINES if name != "wan2.2"]


@pytest.mark.parametrize("name", ["wan2.2", *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_the_memory_of_each_phase(name: str) -> None:
    """With less memory than its weights take, a pipeline runs equal to plain, and never takes more.

    Each phase resets the peak that torch counts, so ``found`` is that of the last one; the budget keeps the most of all.
    """
    if name == "wan-i2v":
        pytest.importorskip("ftfy")  # which diffusers' pipeline needs
    twin = small_pipeline(name).to("cuda")
    plain = [peak(twin, name, seed) for seed in range(6)]
    weights = sum(p.nbytes for m in twin.components.values() if isinstance(m, torch.nn.Module) for p in m.parameters())
    twin.to("cpu")
    torch.cuda.empty_cache()
    less = plain[0][0] - weights // 2
    pipe = apply(small_pipeline(name), device="cuda", memory=budget_for(less), min_bytes=2048, lowering="eager")
    budget = budget_of(pipe)
    assert budget is not None and 0 <= budget.usable - less <= 1
    for seed, (_, want) in enumerate(plain):
        found, got = peak(pipe, name, seed)
        assert torch.equal(got, want)
        assert max(found, budget.most) <= less, "activations and weights together, in each phase"
    assert all(p.activations for p in budget.figures().phases)
    for phase in budget.phases:
        assert phase.activations > 0 and phase.budget is not None
        assert all(p.plan.device_bytes <= phase.budget for p in programs(phase.root))
    planned = [(c.cycle.plan, p.budget) for p in budget.phases for c in cycles(p.root)]
    assert all(plan.device_bytes <= goal for plan, goal in planned)
    remove(pipe)
    torch.cuda.synchronize()
    assert sum(p.arena.nbytes for p in budget.phases) == 0


def test_what_the_allocator_keeps_between_phases() -> None:
    """The activations of each phase have other sizes, and no phase has new memory beside what another has left."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan").to("cuda")
    sizes = {pipe.text_encoder: 48 * MIB, pipe.transformer: 80 * MIB, pipe.vae.decoder: 112 * MIB}
    total = 160 * MIB  # less than their sum
    apply(pipe, device="cuda", memory=total, min_bytes=2048, lowering="eager")

    def take(size: int, *_: Any) -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda")

    for model, size in sizes.items():
        model.register_forward_pre_hook(functools.partial(take, size))
    want = [WAN.generate(twin, seed) for seed in range(3)]
    twin.to("cpu")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for seed in range(3):
        assert torch.equal(WAN.generate(pipe, seed), want[seed])
    assert 112 * MIB < torch.cuda.max_memory_allocated() <= torch.cuda.max_memory_reserved() <= total
    budget = budget_of(pipe)
    assert budget is not None and all(p.streamed > 0 and p.activations > 48 * MIB for p in budget.phases)
    assert 112 * MIB < budget.most <= total and "device memory:  1" in str(explain(pipe))
    remove(pipe)


def test_a_budget_below_the_activations(caplog: pytest.LogCaptureFixture) -> None:
    """Known after the first call of the component, which a warning names."""
    pipe = apply(small_pipeline("wan"), device="cuda", memory=3 * MIB // 2, min_bytes=2048, lowering="eager")
    got = WAN.generate(pipe, 0)
    assert re.search(r"memory=1\.5 MiB is too little for \w+ .* take [\d.]+ MiB", caplog.text)
    remove(pipe)
    pipe.to("cuda")
    assert torch.equal(got, WAN.generate(pipe, 0))


def test_a_pipeline_that_is_moved_after() -> None:
    """The next call refuses it, with a sentence; what is moved back runs on."""
    pipe = apply(small_pipeline("wan"), device="cuda", memory=8 * MIB, min_bytes=2048, lowering="eager")
    want = WAN.generate(pipe, 0)
    pipe.to("cpu")
    with pytest.raises(
        ChunkflowError, match=r"pipe\.\w+ .* was moved from cuda:0 to cpu after compile\(pipe\): .*restore\(pipe\)"
    ):
        WAN.generate(pipe, 0)
    pipe.to("cuda")
    assert torch.equal(WAN.generate(pipe, 0), want)
    pipe.enable_model_cpu_offload()
    with pytest.raises(
        ChunkflowError, match=r"pipe\.\w+ .* came under a hook of accelerate after compile.*restore\(pipe\)"
    ):
        WAN.generate(pipe, 0)
    remove(pipe)
    assert torch.equal(WAN.generate(pipe, 0), want), "accelerate alone"
    pipe.remove_all_hooks()


def test_steps_are_graphs_within_the_budget() -> None:
    """What a graph holds between calls counts as activations; equal numbers over generations, sizes and a smaller budget."""
    pipe, twin = small_pipeline("flux"), small_pipeline("flux").to("cuda")
    want = [FLUX.generate(twin, seed, num_inference_steps=8) for seed in range(3)]
    twin.to("cpu")
    apply(pipe, device="cuda", memory=40 * MIB, min_bytes=2048, lowering="eager", cudagraphs=True)
    for seed in range(3):
        assert torch.equal(FLUX.generate(pipe, seed, num_inference_steps=8), want[seed])
    budget = budget_of(pipe)
    assert budget is not None
    phase = budget.phase_of(pipe.transformer)
    log = programs(pipe.transformer)[0].call.captures
    assert log.launches > 8 and not log.why_not, log
    assert phase is not None and 0 < phase.arena.graphs.nbytes <= phase.activations
    assert not any(program.variant.cudagraphs for program in programs(pipe.text_encoder))
    assert "one CUDA graph" in str(explain(pipe, details=True))
    remove(pipe)
    assert phase.arena.graphs.nbytes == 0
