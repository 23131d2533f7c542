"""Discovery and cutting: weights, their readers, the cuts of the graph, and regions of equal structure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers import Stack, cut_of, fake_ranks, plan_of, ulysses_cut
from torch import nn

from chunkflow_compile.passes.graph.discover import crossing_bytes
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify


class Views(nn.Module):
    """One weight read through a transpose, a split and a slice, in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(32, 96))
        self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.shared.split(32, dim=1)
        x = self.blocks[0](x @ q)
        x = self.blocks[1](x @ k.t())
        return x @ self.shared[:, 64:]


def test_a_weight_is_used_wherever_a_view_of_it_is_read() -> None:
    """And no view of it crosses a region."""
    cut = cut_of(Views(), torch.randn(4, 32))
    uses = {w.name: w.uses for w in cut.problem.weights}
    assert [r.block for r in cut.problem.regions] == ["", "blocks.0", "", "blocks.1", ""]
    assert uses == {"shared": (0, 2, 4), "blocks.0.weight": (1,), "blocks.1.weight": (3,)}
    storages = {w.node.meta["val"].untyped_storage()._cdata for w in cut.discovery.weights}
    for region in cut.regions:
        assert not {n.meta["val"].untyped_storage()._cdata for n in region.outputs} & storages


class Collectives(nn.Module):
    """One of each collective, and its autograd variant if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        x = funcol.all_to_all_single(self.proj(x), None, None, group)
        x = funcol.all_to_all_single_autograd(x * 2, None, None, group)
        x = funcol.all_gather_tensor(x + 1, 0, group)
        x, _ = funcol.all_gather_into_tensor_coalesced([x + 1, x + 2], group)
        x = funcol.reduce_scatter_tensor(x + 1, "sum", 0, group)
        return funcol.all_reduce(x + 1, "sum", group) + 1


def test_every_kind_of_collective_stays_at_the_top_level_in_order() -> None:
    with fake_ranks():
        cut = cut_of(Collectives(), torch.randn(4, 8))
    kinds = [c.kind for c in cut.problem.collectives]
    assert kinds == ["all-to-all", "all-to-all", "all-gather", "all-gather", "reduce-scatter", "all-reduce"]
    assert [c.nbytes for c in cut.problem.collectives] == [64, 64, 128, 512, 256, 256]  # what crosses
    assert [c.before for c in cut.problem.collectives] == [1, 2, 3, 4, 5, 6]
    for region in cut.regions:
        assert not any("c10d" in str(n.target) for n in region.module.graph.nodes)


@pytest.mark.parametrize("out", [False, True])
def test_what_crosses_is_what_others_send_whether_the_result_is_new_or_given(out: bool) -> None:
    graph = torch.fx.Graph()
    x, result = graph.placeholder("x"), graph.placeholder("result")
    x.meta["val"], result.meta["val"] = torch.empty(256), torch.empty(512)
    ops = torch.ops._c10d_functional
    op = ops.all_gather_into_tensor_out.default if out else ops.all_gather_into_tensor.default
    node = graph.call_function(op, (x, 2, "0"), {"out": result} if out else {})
    assert crossing_bytes(node, 2) == 1024


def test_views_between_collectives_make_no_region_of_their_own() -> None:
    for region in ulysses_cut().regions:
        assert any(
            n.op == "call_function" and not getattr(n.target, "is_view", False) for n in region.module.graph.nodes
        )


def test_equal_blocks_are_one_lowered_region() -> None:
    for layers in (2, 6):
        cut = cut_of(Stack(layers), torch.randn(4, 8))
        assert len(cut.regions) == layers + 2
        assert len({r.info.key for r in cut.regions}) == 3


def test_regions_of_other_shapes_are_not_shared() -> None:
    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    cut = cut_of(Widths(), torch.randn(4, 8))
    assert len(cut.regions) == 4
    assert len({r.info.key for r in cut.regions}) == 3


def test_regions_with_nested_graphs_are_not_shared() -> None:
    class Branch(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * torch.tensor([self.factor]), lambda x: x.sin(), (x,))

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Branch(2.0), Branch(3.0)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    cut = cut_of(Branches(), torch.rand(4, 8))
    keys = [r.info.key for r in cut.regions if any("cond" in str(n.target) for n in r.module.graph.nodes)]
    assert len(keys) == len(set(keys)) == 2


def test_a_region_above_group_bytes_is_cut_before_the_weight_that_exceeds_it() -> None:
    whole = cut_of(Stack(), torch.randn(4, 8)).problem
    torch._dynamo.reset()
    finer = cut_of(Stack(), torch.randn(4, 8), group_bytes=64 * 32 * 4).problem
    assert [r.weights for r in whole.regions if r.block == "blocks.0"] == [
        ("blocks.0.up.weight", "blocks.0.down.weight")
    ]
    assert [r.weights for r in finer.regions if r.block == "blocks.0"] == [
        ("blocks.0.up.weight",),
        ("blocks.0.down.weight",),
    ]
    assert plan_of(finer).arena_bytes < plan_of(whole).arena_bytes


def test_the_cut_program_computes_what_the_model_does(no_grad: None) -> None:
    model, x = Views(), torch.randn(4, 32)
    cut = cut_of(model, x)
    program = rewrite(cut, plan_of(cut.problem, policy="resident"))
    verify(program)
    weights = dict(model.named_parameters())
    by_input = {placeholder: weights[name] for name, placeholder in program.weight_inputs.items()}
    args = [by_input.get(n.name, x) for n in program.module.graph.nodes if n.op == "placeholder"]
    torch.testing.assert_close(program.module(*args)[0], model(x))
