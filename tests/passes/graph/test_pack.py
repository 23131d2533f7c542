"""The pass that packs weights: what its regions compute, which of them stay equal, and what it leaves as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import TestCase
from helpers import Block, InTurn, Size, cut_of, plan_of
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkflow_compile.catalog.small import small_inputs, small_model
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.packing import Layout, pack
from chunkflow_compile.passes.pass_pipeline import Stage
from chunkflow_compile.passes.placement.place import least_memory
from chunkflow_compile.passes.problem import HOST, Weight
from chunkflow_compile.passes.program.contracts import check_cut
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.report.lines import stage_lines
from chunkflow_compile.report.listings import render

X = torch.randn(4, 64, dtype=torch.bfloat16)


def two_blocks() -> Cut:
    return cut_of(InTurn(Block(64) for _ in range(2)).bfloat16(), X)


def by_name(cut: Cut) -> dict[str, Weight]:
    return {weight.name: weight for weight in cut.problem.weights}


def run(cut: Cut, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The regions one after another, for values that each passes to the next."""
    values: dict[object, torch.Tensor] = {}
    for weight in cut.discovery.weights:
        parameter = model.get_parameter(weight.parameter.name).detach()
        if weight.parameter.source.compressed:
            raw, parameter = parameter, torch.empty(Layout.of(parameter.numel()).words, dtype=torch.int32)
            assert pack(raw, parameter)
        values[weight.node] = parameter
    for node in cut.source.graph.find_nodes(op="placeholder"):
        values.setdefault(node, x)
    for region in cut.regions:
        results = region.module(*(values[node] for node in region.inputs))
        values.update(zip(region.outputs, results, strict=True))
    return results[0]


class TestListing(TestCase):
    def test_two_blocks(self) -> None:
        """A weight is unpacked by the region that reads it, just before its reader; equal blocks stay equal."""
        cut = packed(raw := two_blocks(), [name for name in packable(raw) if "down" in name])
        text = render(stage_lines(Stage(name="regions", traced=cut.traced, cut=cut)), full=False)
        self.assertExpectedInline(
            text,
            """\
arg0_1: bfloat16[128, 64]  # blocks.0.up.weight
arg1_1: bfloat16[4, 64]
arg2_1: bfloat16[64, 128]  # blocks.0.down.weight, packed
arg3_1: bfloat16[128, 64]  # blocks.1.up.weight
arg4_1: bfloat16[64, 128]  # blocks.1.down.weight, packed
# blocks.0: region 0
# region_0(arg1_1, arg0_1, arg2_1): blocks.0, 5 ops, key e3102c8ee7cb084e
t: bfloat16[64, 128] = aten.t(arg0_1)
mm: bfloat16[4, 128] = aten.mm(arg1_1, t)
gelu: bfloat16[4, 128] = aten.gelu(mm)
unpack_2_default: bfloat16[64, 128] = unpack_2(arg2_1, [64, 128])
t_1: bfloat16[128, 64] = aten.t(unpack_2_default)
mm_1: bfloat16[4, 64] = aten.mm(gelu, t_1)
add: bfloat16[4, 64] = aten.add.Tensor(arg1_1, mm_1)
# blocks.1: region 1
# region_1(add, arg3_1, arg4_1): blocks.1, 5 ops, key e3102c8ee7cb084e
t: bfloat16[64, 128] = aten.t(arg3_1)
mm: bfloat16[4, 128] = aten.mm(add, t)
gelu: bfloat16[4, 128] = aten.gelu(mm)
unpack_2_default: bfloat16[64, 128] = unpack_2(arg4_1, [64, 128])
t_1: bfloat16[128, 64] = aten.t(unpack_2_default)
mm_1: bfloat16[4, 64] = aten.mm(gelu, t_1)
add: bfloat16[4, 64] = aten.add.Tensor(add, mm_1)
return (add_1,)
""",
        )


class Views(nn.Module):
    """A weight that a region reads through a split, a transpose and a slice; a tied one, and those that do not pack."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Parameter(torch.randn(64, 192))
        self.tied = nn.Parameter(torch.randn(64, 64))
        self.transposed = nn.Parameter(torch.randn(192, 64).t())
        self.small = nn.Parameter(torch.randn(64))
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.split.split(64, dim=1)
        x = (x @ q + x @ k.t()) @ self.split[:, 128:] @ self.tied
        x = self.blocks[1](self.blocks[0](x))
        return x @ self.tied @ self.transposed[:, ::3] * self.small


def test_regions_of_packed_weights_compute_the_same_bits() -> None:
    """Also through views, each of which reads what was unpacked once."""
    torch.manual_seed(0)
    model = Views().bfloat16()
    raw = cut_of(model, X)
    assert packable(raw) == {"split", "blocks.0.weight", "blocks.1.weight"}, "read by one region, contiguous, not small"
    cut = packed(raw, packable(raw))
    check_cut(cut)
    unpacks = [str(n.target) for r in cut.regions for n in r.module.graph.nodes].count("chunkflow.unpack_2.default")
    assert unpacks == 3
    for x in (X, X.flip(0)):
        assert torch.equal(run(cut, model, x), run(raw, model, x))


def test_equal_blocks_with_other_packed_weights() -> None:
    """As after a write that made one raw: each unpacks its own."""
    torch.manual_seed(0)
    model = InTurn(Block(64) for _ in range(2)).bfloat16()
    raw = cut_of(model, X)
    cut = packed(raw, ["blocks.0.down.weight", "blocks.1.up.weight"])
    check_cut(cut)
    assert _keys(raw) == 1 and _keys(cut) == 2
    assert torch.equal(run(cut, model, X), run(raw, model, X))


def test_a_packed_weight_has_the_bytes_of_its_form() -> None:
    raw = two_blocks()
    cut = packed(raw, ["blocks.1.up.weight"])
    before, after = by_name(raw), by_name(cut)
    name = "blocks.1.up.weight"
    assert (after[name].nbytes, after[name].source.values) == (Layout.of(64 * 128).nbytes, before[name].nbytes)
    assert cut.packed == {name} and cut.problem.unpacked_bytes == before[name].nbytes > after[name].nbytes
    assert {n: w for n, w in after.items() if n != name} == {n: w for n, w in before.items() if n != name}
    assert [after is before for after, before in zip(cut.regions, raw.regions, strict=True)] == [True, False]
    assert cut.problem.digest != raw.problem.digest
    cost, dearer = raw.problem.regions[1].cost, cut.problem.regions[1].cost
    assert sum(moved for _, moved in dearer.traffic) == sum(moved for _, moved in cost.traffic) + (
        after[name].nbytes + before[name].nbytes
    )
    assert packed(cut, ()) is raw and packed(cut, [name]).problem.digest == cut.problem.digest
    with pytest.raises(
        ChunkflowError, match="stay on the device, and the values that a region unpacks, and the rest for"
    ):
        plan_of(cut.problem, memory=40_000)
    program = rewrite(cut, plan_of(cut.problem, memory=50_000))
    assert verify(program).edges
    assert program.plan.moved_bytes > 0


def test_values_count_against_memory() -> None:
    """While a region runs, they are on the device besides the weights."""
    raw = two_blocks()
    cut, machine = packed(raw, packable(raw)), load_profile("h100-pcie")
    least = {
        name: least_memory(problem, machine, 4096)
        for name, problem in (
            ("packed", cut.problem),
            ("without", replace(cut.problem, weights=tuple(replace(w, source=HOST) for w in cut.problem.weights))),
        )
    }
    assert least["packed"] == least["without"] + cut.problem.unpacked_bytes


def test_costs_at_other_sizes() -> None:
    """The same regions and weights, in both forms."""
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    traced = trace(InTurn([Block(64)]).bfloat16(), {"x": x}, 0)
    assert traced.sizes
    raw = make_cut(traced)
    more = replace(traced, sizes=dict.fromkeys(traced.sizes, 400))
    cut = packed(raw, packable(raw)).at(more)
    assert cut.problem.digest == packed(raw.at(more), packable(raw)).problem.digest
    assert cut.raw is not None and cut.raw.problem.digest == raw.at(more).problem.digest
    small, large = (packed(c, packable(raw)).problem.regions[0].cost for c in (raw, raw.at(more)))
    assert cut.problem.regions[0].cost == large and large.flops == 100 * small.flops
    assert packed(cut, ()).traced is more


@pytest.mark.long
def test_equal_blocks_are_lowered_once() -> None:
    """Two kinds of block."""
    size = Size(layers=2, singles=2, heads=2, head_dim=32, frames=1, height=16, width=16, text=16)
    inputs = tree_map_only(
        torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, small_inputs("flux", size, 0)
    )
    raw = make_cut(trace(small_model("flux", size).bfloat16(), inputs, 0), 1)
    cut = packed(raw, packable(raw))
    check_cut(cut)
    assert len(cut.packed) > len(raw.regions) / 2 and len(cut.regions) == len(raw.regions)
    assert _keys(cut) <= _keys(raw) + 2


def _keys(cut: Cut) -> int:
    return len({region.info.key for region in cut.regions})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_raw(dtype: torch.dtype) -> None:
    assert not packable(cut_of(InTurn([Block(64)]).to(dtype), X.to(dtype)))
