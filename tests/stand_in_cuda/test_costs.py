"""What a step asks of CUDA, and what a model takes of a card.  Counts and bytes, no times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Stack
from test_gpu import MIB, OPTIONS, compiled
from torch import nn
from torch._inductor.utils import fresh_cache

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.passes.ops import prefetch_of
from chunkflow_compile.runtime.device import DeviceKind, make_device
from chunkflow_compile.runtime.device_base import FIRST_STEPS

from . import control
from .test_findings import placed


def test_calls_of_a_step_of_60_blocks(record_property: Callable[[str, object], None]) -> None:
    """Besides launches, which copies are, at most three calls a transferred window and one a region."""
    model, run, twin = placed(60, width=64, min_bytes=4096)
    x = torch.randn(16, 8, device="cuda")
    found: dict[str, dict[str, int]] = {}
    for step in range(FIRST_STEPS + 2):
        with control.counted() as made:
            got = run(x)
        found["measured" if step < FIRST_STEPS else "not measured"] = made
    assert torch.equal(got, twin(x))
    plan, nodes = programs(model)[0].plan, programs(model)[0].program.module.graph.nodes
    prefetches = [p.copy for n in nodes if (p := prefetch_of(n)) is not None]
    windows, regions = len({p.window for p in prefetches}), len(plan.regions)
    plain = found["not measured"]
    assert plain["cudaMemcpyAsync"] == len(prefetches)
    ordering = sum(plain.get(n, 0) for n in ("cudaEventRecordWithFlags", "cudaEventRecord", "cudaStreamWaitEvent"))
    assert 0 < ordering <= 3 * windows + regions
    for name in ("cudaMalloc", "cudaEventCreateWithFlags", "cudaStreamSynchronize", "cudaEventSynchronize"):
        assert name not in plain, name
    for kind, made in found.items():
        calls = ", ".join(f"{n} {made[n]}" for n in sorted(made) if n.startswith("cuda") and made[n] > 4)
        record_property(
            "counts", f"60 blocks, {regions} regions, {windows} windows, {len(prefetches)} copies, {kind}: {calls}"
        )
    restore(model)


def peaks(policy: dict[str, Any], lowering: str) -> tuple[list[int], nn.Module]:
    """Peaks of bytes allocated and reserved from placing a model to its first step, above what there was before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(24, width=1024).eval()  # the allocator reserves 20 MiB for a smaller arena
    x = torch.randn(64, 8, device="cuda")
    x @ x.T
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    offload(model, "cuda", min_bytes=4096)
    with fresh_cache():  # each tunes its kernels, in 60 MiB that flush a cache
        compiled(model, **{**OPTIONS, **policy, "lowering": lowering})(x)
    torch.cuda.synchronize()
    after = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return [a - b for a, b in zip(after, before, strict=True)], model


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("policy", [{"policy": "layerwise"}, {"policy": "chunkflow", "weight_memory": 150 * MIB}])
def test_peak_memory_is_what_the_plan_says(
    policy: dict[str, Any], lowering: str, record_property: Callable[[str, object], None]
) -> None:
    """Less than the resident arm's peak by the weights that the plan leaves on the host, within 2 %."""
    resident, model = peaks({"policy": "resident"}, lowering)
    weights = programs(model)[0].plan.device_bytes
    restore(model)
    del model
    torch.cuda.empty_cache()
    streamed, model = peaks(policy, lowering)
    plan = programs(model)[0].plan
    saved = weights - plan.device_bytes
    assert saved > 0
    for kind, most, mine in zip(("allocated", "reserved"), resident, streamed, strict=True):
        record_property(
            "counts",
            f"{lowering}, {policy['policy']}: {kind} {mine / MIB:.1f} MiB at most, resident {most / MIB:.1f} MiB, the plan "
            f"saves {saved / MIB:.1f} MiB of {weights / MIB:.1f} MiB",
        )
        assert mine - most <= -saved + 0.02 * weights, kind
    restore(model)


def test_a_smaller_arena_does_not_stay_beside_a_larger_one() -> None:
    device = make_device(torch.device("cuda", 0), DeviceKind())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    memory = device.allocate(30 * MIB)
    assert torch.cuda.memory_reserved() - before == 30 * MIB
    del memory
    device.release()
    memory = device.allocate(44 * MIB)
    assert torch.cuda.memory_reserved() - before == 44 * MIB
    del memory
    device.close()
