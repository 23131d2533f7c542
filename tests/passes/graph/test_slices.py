"""Phases of a block, run slice by slice, against the block as a whole: bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from chunkflow_compile.catalog.families import FAMILIES
from chunkflow_compile.catalog.sizes import Config, Size
from chunkflow_compile.catalog.small import SMALL_MODELS
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.passes.graph.coarsen import grouped
from chunkflow_compile.passes.graph.discover import discover
from chunkflow_compile.passes.graph.regions import Cut, cut
from chunkflow_compile.passes.graph.slice_check import check_phases
from chunkflow_compile.passes.graph.slices import Phase, Slice, phases

# Slices of 16 rows and more: kernels of the CPU add up products of fewer rows in another order.
SIZES: Mapping[str, Any] = {"height": 16, "width": 16, "frames": 1, "text": 16, "layers": 1, "singles": 1}
_HEADS = {"num_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16}
CONFIGS: Mapping[str, Config] = {
    "sd3": {
        **_HEADS,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 16,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    },
    "ltx": {**_HEADS, "in_channels": 16, "out_channels": 16, "cross_attention_dim": 64, "caption_channels": 32},
}


@cache
def blocks_of(family: str, dtype: torch.dtype, **sizes: Any) -> Cut:
    """The graph of a small model, one region per block."""
    size = Size(**{"batch": 1, **SIZES, **sizes})
    config = CONFIGS[family] if family in CONFIGS else SMALL_MODELS[family](size)
    traced = trace_without_weights(
        lambda: FAMILIES[family].model_and_inputs(config, size, dtype), min_bytes=64, dtype=dtype
    )
    found = discover(traced)
    return cut(traced, found, groups=grouped(cut(traced, found), None))


def random_inputs(module: GraphModule) -> list[torch.Tensor]:
    """Values for the inputs of a graph, with their strides."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for node in module.graph.find_nodes(op="placeholder"):
        given = node.meta["val"]
        value = torch.empty_strided(tuple(given.shape), given.stride(), dtype=given.dtype)
        if given.is_floating_point() or given.is_complex():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype) / 4)
        else:
            value.fill_(1)
        values.append(value)
    return values


def taken(value: torch.Tensor, part: Slice | None, call: int) -> torch.Tensor:
    return value if part is None else value.narrow(part.dim, part.offset + call * part.size, part.size)


def run(module: GraphModule, found: Sequence[Phase], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph, by its phases.  Fresh memory is full of NaN; inputs may be overwritten."""
    placeholders = module.graph.find_nodes(op="placeholder")
    values: dict[Node, torch.Tensor] = dict(zip(placeholders, inputs, strict=True))
    for phase in found:
        if not phase.writes:
            (given,) = [[taken(values[n], part, 0) for n, part in zip(phase.inputs, phase.slices, strict=True)]]
            values.update(zip(phase.outputs, phase.module(*given), strict=True))
        for write in phase.writes:
            if write.over is not None:
                values[write.value] = inputs[write.over]
            elif write.value not in values:
                meta = write.value.meta["val"]
                fresh = torch.empty_strided(tuple(meta.shape), meta.stride(), dtype=meta.dtype)
                values[write.value] = fresh.fill_(float("nan"))
        for call in range(phase.repeat if phase.writes else 0):
            given = [taken(values[n], part, call) for n, part in zip(phase.inputs, phase.slices, strict=True)]
            given += [taken(values[w.value], w.slice, call) for w in phase.writes if w.over is None]
            phase.module(*given)
    (returned,) = module.graph.output_node().args
    return [values[n] for n in returned]  # type: ignore[union-attr,index]


def assert_equal_in_slices(module: GraphModule, repeat: int) -> tuple[Phase, ...]:
    """The phases of a graph compute what the graph computes, in place where they may."""
    inputs = random_inputs(module)
    wanted = module(*[x.clone() for x in inputs])
    found = phases(module, repeat, range(len(inputs)))
    check_phases(module, found)
    for got, want in zip(run(module, found, inputs), wanted, strict=True):
        assert torch.equal(got, want)
    assert max(phase.repeat for phase in found) == repeat
    return found


def assert_blocks_equal(pieces: Cut, repeats: Sequence[int]) -> list[tuple[Phase, ...]]:
    """The blocks of each type, in slices, compute what they compute as a whole."""
    names = {r.info.block for r in pieces.regions if re.search(r"blocks\.0$", r.info.block)}
    modules = {r.info.key: r.module for r in pieces.regions if r.info.block in names and "refiner" not in r.info.block}
    assert modules
    return [assert_equal_in_slices(module, repeat) for module in modules.values() for repeat in repeats]


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("wan", torch.float32, {}),
        ("wan", torch.bfloat16, {"timestep": "token"}),
        ("wan", torch.bfloat16, {"batch": 2}),
        ("flux", torch.bfloat16, {"height": 8, "width": 8}),
        ("hunyuanvideo", torch.float32, {}),
        ("qwen-image", torch.bfloat16, {"height": 8, "width": 8}),
        ("sd3", torch.float32, {}),
        ("ltx", torch.float32, {"height": 8, "width": 8}),
    ],
)
def test_a_block_in_slices_is_bit_equal(family: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    assert_blocks_equal(blocks_of(family, dtype, **sizes), (1, 2, 4))
