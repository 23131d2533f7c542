"""Packed weights on a card: the same bits as raw ones, through Triton, as one graph, on the drive, after writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import apply, compile, cycles, offload, programs, remove, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.cuda_graphs import PASSES

from .test_captured import on_cuda

SIZE = Size(layers=2, singles=2, heads=4, head_dim=32, frames=2, height=8, width=8, text=8)


def inputs_of(seed: int, family: str = "flux") -> dict[str, Any]:
    inputs = on_cuda(small_inputs(family, SIZE, seed))
    return {n: v.to(torch.bfloat16) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()}


def packed(model: torch.nn.Module) -> int:
    placement = placement_of(model)
    assert placement is not None
    return sum(buffer.compressed for buffer in placement.store.buffers)


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_equal_to_raw_ones(cudagraphs: bool, tmp_path: Path) -> None:
    small_model("flux", SIZE).to(torch.bfloat16).save_pretrained(tmp_path)
    model, twin = (FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16) for _ in range(2))
    twin.cuda()
    options: dict[str, Any] = {"min_bytes": 4096, "chunk_bytes": 1 << 12, "lowering": "eager", "cudagraphs": cudagraphs}
    on_drive = {} if cudagraphs else {"host_memory": sum(p.nbytes for p in model.parameters()) // 2}
    offload(model, "cuda", min_bytes=4096, pack=True, **on_drive)
    count, most = packed(model), sum(p.nbytes for p in twin.parameters())
    compile(model, weight_memory="2MiB", **options)
    name = next(n for n, p in twin.named_parameters() if n.startswith("transformer_blocks.1.") and p.nbytes >= 1 << 15)
    with torch.no_grad():
        for step in range(PASSES + 6):
            inputs = inputs_of(step)
            assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), step
            if step in (PASSES + 1, PASSES + 3):
                for each in (model, twin):
                    each.get_parameter(name).mul_(1.25)
    assert count and packed(model) == count
    ran = (*cycles(model), *programs(model))[0]
    assert 0 < ran.plan.moved_bytes < 0.76 * most and ran.measurements[-1].moved_bytes == ran.plan.moved_bytes
    if cudagraphs:
        assert programs(model)[0].call.captures.launches > 3
    restore(model, "cpu")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(("family", "by_kind"), [("qwen-image", True), ("wan", False)])
def test_other_families(family: str, by_kind: bool) -> None:
    model, twin = (small_model(family, SIZE).to(torch.bfloat16).cuda() for _ in range(2))
    options: dict[str, Any] = {"min_bytes": 4096, "chunk_bytes": 1 << 12, "lowering": "eager", "weight_memory": "2MiB"}
    if by_kind:
        run: Any = compile(model, device="cuda", pack=True, **options)
    else:
        run = torch.compile(offload(model, "cuda", min_bytes=4096, pack=True), backend="chunkflow", options=options)
    with torch.no_grad():
        for step in range(5):
            inputs = inputs_of(step, family)
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0]), step
    placement = placement_of(model)
    assert packed(model) and placement is not None and placement.store.counts.moved_bytes > 0


def test_a_pipeline() -> None:
    """Each component packs what it has in bfloat16; the outputs are those of a raw pipeline."""
    pytest.importorskip("transformers")
    generate, made = SMALL_PIPELINES["flux"].generate, {}
    for pack in (False, True):
        pipe = small_pipeline("flux")
        apply(pipe, device="cuda", memory="2MiB", dtype=torch.bfloat16, pack=pack, min_bytes=2048, lowering="eager")
        made[pack] = [generate(pipe, seed) for seed in range(3)]
        assert bool(packed(pipe.transformer)) == pack
        assert cycles(pipe.transformer)[0].measurements[-1].moved_bytes
        remove(pipe)
    assert all(torch.equal(a, b) for a, b in zip(made[False], made[True], strict=True))
