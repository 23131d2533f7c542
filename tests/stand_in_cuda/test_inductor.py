"""Families end to end through Inductor and Triton to cubins.  No kernel of Triton is executed: numbers mean nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import Scaled, graphs, on_card
from torch._dynamo.utils import counters
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache

from chunkflow_compile import compile, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.lowering.lower import lower_regions
from chunkflow_compile.placed.placement import placements_around

from . import control

SIZE = Size(layers=2, singles=2, heads=4, head_dim=32, frames=2, height=16, width=16, text=16)
OPTIONS = {"min_bytes": 4096, "chunk_bytes": 1 << 16, "hardware": "h200", "policy": "layerwise"}
MIB = 1 << 20


class Kernels:
    """Kernels of Triton, watched: their runs, tunings, and pointers that are not aligned as they were compiled for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs: Counter[Any] = Counter()
        self.tuned: Counter[Any] = Counter()
        self.misaligned: list[int] = []
        self.launched_in_lowering = self.allocated_in_lowering = -1
        run, tune = CachingAutotuner.run, CachingAutotuner.benchmark_all_configs
        kernels = self

        def watched_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernels.runs[self] += 1
            kernels.misaligned += [a.data_ptr() for a in args if isinstance(a, torch.Tensor) and a.data_ptr() % 16]
            return run(self, *args, **kwargs)

        def watched_tune(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernels.tuned[self] += 1
            return tune(self, *args, **kwargs)

        def watched_lowering(*args: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            with control.counted() as made:
                found = lower_regions(*args)
            kernels.launched_in_lowering = made.get("launches of Triton", 0)
            kernels.allocated_in_lowering = torch.cuda.max_memory_allocated() - held
            return found

        patch.setattr("chunkflow_compile.frontend.graph_compiler.lower_regions", watched_lowering)
        patch.setattr(CachingAutotuner, "run", watched_run)
        patch.setattr(CachingAutotuner, "benchmark_all_configs", watched_tune)


@pytest.mark.parametrize("family", ["wan", "flux", "hunyuanvideo", "qwen-image"])
def test_a_family_through_inductor(
    family: str, monkeypatch: pytest.MonkeyPatch, record_property: pytest.RecordProperty
) -> None:
    torch.manual_seed(0)
    model = small_model(family, SIZE).eval()
    offload(model, "cuda", min_bytes=4096)
    kernels = Kernels(monkeypatch)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    launches = []
    for step in range(4):
        with control.counted() as made:
            out = run(**on_card(small_inputs(family, SIZE, step)))[0]
            torch.cuda.synchronize()
        launches.append(made["launches of Triton"])
    session = programs(model)[0]
    assert out.is_cuda and len(session.measurements) == 4
    assert session.executor.traffic.copied_bytes >= 4 * session.plan.moved_bytes > 0
    assert kernels.runs and launches[1] == launches[2] == launches[3] > 0
    assert not kernels.misaligned
    assert kernels.launched_in_lowering == 0, "kernels are tuned in the first step"
    assert kernels.allocated_in_lowering < MIB
    assert set(kernels.tuned.values()) <= {1}  # none where the cache knows the best configuration
    assert control.counts()["modules of Triton"] > 0
    regions, lowered = len(session.plan.regions), len(session.variant.regions)
    record_property(
        "counts",
        f"{family}: {regions} regions, {lowered} compiled, {len(kernels.runs)} kernels of Triton, {len(kernels.tuned)} of "
        f"them tuned, {launches[-1]} launches a step",
    )
    restore(model)


def test_beyond_two_to_the_31_elements_indices_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the caches have the region of small sizes: with 32 bits, elements beyond the limit would be those of another
    place.  The memory is not touched."""
    run, lengths = CachingAutotuner.run, list[str]()

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(self.triton_meta["signature"]["xnumel"])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "run", watched)
    with fresh_cache():
        for rows in ((3, 5, 2**25 + 3), (3, 2**25 + 3)):
            torch._dynamo.reset()
            counters.clear()
            lengths.clear()
            model = Scaled()
            offload(model, "cuda", min_bytes=1)
            compiled = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "min_bytes": 1})
            for n in rows:
                compiled(torch.empty(n, 64, dtype=torch.int8, device="cuda"))
            assert lengths == ["i32"] * (len(rows) - 1) + ["i64"]
            assert graphs() == len(rows)
            restore(model)


def test_the_first_step_by_kind() -> None:
    """Inductor compiles each kind once, and no part of few layers; a second process finds its regions."""
    size = Size(layers=4, heads=4, head_dim=32, frames=2, height=16, width=16, text=16)
    seen = []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch._inductor.utils.clear_caches()  # what a process holds of the caches on disk
            counters.clear()
            model = small_model("wan", size).eval()
            compile(model, device="cuda", min_bytes=4096, hardware="h200", weight_memory="2MiB")
            with control.counted() as made:
                model(**on_card(small_inputs("wan", size, 0)))
                torch.cuda.synchronize()
            cached = counters["aot_autograd"]
            hits, misses = cached["autograd_cache_hit"], cached["autograd_cache_miss"]
            seen.append((graphs(), hits, misses, made["launches of Triton"]))
            assert sum(p.store.counts.moved_bytes for p in placements_around(model.parameters())) > 0
            restore(model)
    (compiled, _, missed, launches), (again, hits, missed_again, launches_again) = seen
    assert compiled == again == 5, "a block, the tables of its rotary embedding, and three parts that run op by op"
    assert missed == hits == 2 and not missed_again, "no part that runs op by op"
    assert launches > launches_again > 0, "the first process tunes"
