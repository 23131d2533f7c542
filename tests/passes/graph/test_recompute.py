"""Values that are computed again in each region that reads them: which, from what, and with which results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.fx import Node

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.regions import Cut, CutRegion
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.program.contracts import check_cut

TOKENS, WIDTH = 512, 128
# Each region reads one product's weight.
GROUP_BYTES = 1


class Block(nn.Module):
    """As a block of Wan2.2 with a timestep per token: a table and the timestep's vectors, added in float32.

    ``way``: what is handed over: a sum, a product, a sum in the precision of the model, a sum that a product reads, or
    the sum of a norm, which a kernel computes together with the sum, without rounding it.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        vectors = timestep.unflatten(2, (6, -1))
        if self.way == "normed":
            vectors = nn.functional.layer_norm(vectors, vectors.shape[-1:])
        if self.way in ("sum", "operand", "normed"):
            modulation = self.table.unsqueeze(0) + vectors.float()
        elif self.way == "product":
            modulation = self.table.unsqueeze(0) * vectors.float()
        else:
            modulation = self.table.unsqueeze(0).to(vectors.dtype) + vectors
        parts = [part.squeeze(2) for part in modulation.chunk(6, dim=2)]
        for (shift, scale), projection in zip(list(pairwise(parts))[::2], self.projections, strict=True):
            if self.way == "operand":
                shift = shift @ shift.new_ones(WIDTH, WIDTH)
            x = projection((x.float() * (1 + scale) + shift).type_as(x))
        return x


class Model(nn.Module):
    def __init__(self, way: str = "sum", blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 6 * WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(way) for _ in range(blocks))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        timestep = self.embed(t)
        for block in self.blocks:
            x = block(x, timestep)
        return x


def given(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(1, tokens, WIDTH).bfloat16(), "t": torch.randn(1, tokens, 8).bfloat16()}


def model(way: str = "sum", blocks: int = 2) -> nn.Module:
    made = Model(way, blocks).bfloat16()
    for block in made.blocks:
        block.table.data = block.table.data.float()
    return made


def traced(way: str = "sum", tokens: int = TOKENS, blocks: int = 2) -> Traced:
    # the tables are too small to stream
    return trace(model(way, blocks), given(tokens), min_bytes=6 * WIDTH * 4 + 1)


def handed_over(cut: Cut) -> int:
    """Bytes of the values that regions hand over, memory that is shared counted once."""
    values = [node.meta["val"] for region in cut.regions for node in region.outputs]
    return sum({v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in values}.values())


def run(cut: Cut, *arguments: torch.Tensor) -> torch.Tensor:
    """What the regions of a cut compute, one after the other."""
    graph = cut.source.graph
    values: dict[Node, torch.Tensor] = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
    for region in cut.sequence:
        assert isinstance(region, CutRegion)
        values.update(zip(region.outputs, region.module(*(values[n] for n in region.inputs)), strict=True))
    (result,) = graph.output_node().all_input_nodes
    return values[result]


def test_a_sum_in_float32_is_computed_again_where_it_is_read() -> None:
    before, after = (make_cut(replace(traced(), fused=fused), GROUP_BYTES) for fused in (False, True))
    check_cut(after)
    whole = TOKENS * 6 * WIDTH * 4
    assert handed_over(before) - handed_over(after) == 2 * whole  # of two blocks
    assert before.problem.digest != after.problem.digest  # the tables are read by more regions
    assert [r.info.weights for r in before.regions] != [r.info.weights for r in after.regions]
    by_block = [[r.info.key for r in after.regions if r.info.block == f"blocks.{i}"] for i in range(2)]
    assert by_block[0][1:] == by_block[1][1:] and len(by_block[0]) == 3
    moved = sum((Counter(dict(r.info.cost.traffic)) for r in after.regions[1:]), Counter[int]())
    assert not moved[whole] and moved[whole // 2] == 2 * (whole // 2), "each region reads its part of the source"
    nodes = after.source.graph.find_nodes(op="placeholder")
    arguments = [torch.randn(n.meta["val"].shape).to(n.meta["val"].dtype) for n in nodes]
    assert torch.equal(run(after, *arguments), after.source(*arguments)[0])


@pytest.mark.parametrize(
    "way, tokens",
    [
        ("product", TOKENS),  # a GPU would fuse it with the addition that follows
        ("rounded", TOKENS),
        ("operand", TOKENS),  # it would be stored by each region
        ("normed", TOKENS),
        ("sum", 16),  # small
    ],
)
def test_other_values_are_handed_over(way: str, tokens: int) -> None:
    cut = make_cut(traced(way, tokens, 1), GROUP_BYTES)
    assert not cut.recomputed and handed_over(cut) == handed_over(
        make_cut(replace(cut.traced, fused=False), GROUP_BYTES)
    )


def test_a_streamed_weight_is_read_where_it_was() -> None:
    """Its slot would otherwise be needed for longer."""
    streamed = trace(model(blocks=1), given(), min_bytes=0)
    assert not make_cut(streamed, GROUP_BYTES).recomputed
