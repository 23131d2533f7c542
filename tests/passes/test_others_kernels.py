"""Kernels of others in a graph: Triton's, whose numbers mean nothing in another process, and attention of any library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cut_of, plan_of
from torch import nn
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_flop_count

from chunkflow_compile import explain
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cost.count import without_formula
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.listing import listing
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.problem import Parameter
from chunkflow_compile.passes.program.contracts import check_cut
from chunkflow_compile.passes.program.fidelity import check_readers
from chunkflow_compile.passes.program.memory import effects_of, program_memory
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify


class Kernel:
    """A kernel as torch's table knows it; Triton is not installed everywhere."""

    def __init__(self, name: str, src: str) -> None:
        self.__name__, self.src = name, src


@dataclass(frozen=True)
class Tuned:
    fn: Kernel
    configs: tuple[str, ...]


SCALE = Kernel("scale", "tl.store(out + at, tl.load(x + at) * tl.load(w + at))")


@pytest.fixture(autouse=True)
def table(no_grad: None) -> Iterator[None]:
    kernel_side_table.reset_table()
    yield
    kernel_side_table.reset_table()


def traced_call(kernel: Any = SCALE, block: int = 128, op: Any = triton_kernel_wrapper_functional) -> Traced:
    """``out = kernel(x @ w, w)``, which writes ``out`` or, in place, all of its operands."""
    numbers = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args({"BLOCK": block}),
    }

    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        given = {"x": y, "w": w, "out": torch.empty_like(y)}
        copies = {"tensors_to_clone": ["out"]} if op is triton_kernel_wrapper_functional else {}
        found = op(**numbers, grid=[(1, 1, 1)], tma_descriptor_metadata={}, kwargs=given, **copies)
        return ((given if found is None else found)["out"] + 1,)

    graph = make_fx(forward, tracing_mode="fake")(torch.randn(64, 64), torch.randn(64, 64))
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node.meta["desc"] = PlainAOTInput(position)
    return Traced(graph=graph, parameters=(Parameter(index=1, names=("w",)),), blocks={}, ranks={})


def call_in(cut: Cut) -> Node:
    return next(n for r in cut.regions for n in r.module.graph.nodes if "triton" in str(n.target))


def key(**call: Any) -> str:
    return make_cut(traced_call(**call)).regions[0].info.key


def test_a_kernel_is_content_of_a_region_and_its_program_is_proved() -> None:
    cut = make_cut(traced_call())
    check_cut(cut)
    (region,) = cut.regions
    assert region.info.weights == ("w",) and call_in(cut) in region.module.graph.nodes
    verify(rewrite(cut, plan_of(cut.problem, policy="layerwise")))
    assert effects_of(region.module).writes == frozenset()
    # the GEMM of three operands; the kernel reads three and writes one; the last op and the empty one are others
    assert region.info.cost.operands == 7 * 64 * 64 * 4 and region.info.cost.flops == 2 * 64**3


def test_keys_and_listings_are_of_the_kernel_and_not_of_its_number() -> None:
    first, text = key(), listing(traced_call().graph)
    kernel_side_table.add_kernel(Kernel("scale", "another"))
    assert (key(), listing(traced_call().graph)) == (first, text)
    kernel_side_table.reset_table()
    kernel_side_table.add_kernel(Kernel("other", "before it"))
    kernel_side_table.add_constant_args({"BLOCK": 64})
    assert (key(), listing(traced_call().graph)) == (first, text)
    assert "kernel='scale', constants={'BLOCK': 128}" in text and "_idx" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": Kernel("scale", "tl.store(out + at, tl.load(x + at))")},
        {"block": 64},
        {"kernel": Tuned(SCALE, ("BLOCK: 64",))},
    ],
)
def test_another_kernel_at_the_same_number_is_another_region(change: dict[str, Any]) -> None:
    first = key()
    kernel_side_table.reset_table()
    assert key(**change) != first


def test_a_weight_that_a_kernel_writes_stays_on_the_device() -> None:
    (weight,) = make_cut(traced_call(op=triton_kernel_wrapper_mutation)).problem.weights
    assert weight.keep == "the kernel scale writes it"


def test_a_program_whose_kernel_writes_a_streamed_weight_is_refused_by_name() -> None:
    cut = make_cut(traced_call())
    program = rewrite(cut, plan_of(cut.problem, policy="layerwise"))
    written = make_cut(traced_call(op=triton_kernel_wrapper_mutation)).regions[0]
    (target,) = program.regions
    setattr(program.module, target, written.module)
    streamed: Any = SimpleNamespace(streamed=[SimpleNamespace(name="w")])  # place keeps the only weight of one region
    regions = {target: replace(program.regions[target], module=written.module)}
    changed = replace(program, regions=regions, plan=streamed)
    (said,) = check_readers(changed, program_memory(changed))
    assert said == "w: region_0 (by the kernel scale) writes it, but its slot is filled from host memory only"


def test_a_kernel_has_the_flops_that_are_declared_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_call()
    (said,) = without_formula(traced.graph.graph.nodes).values()
    assert "the kernel scale of Triton" in said and "register_flop_formula(scale)" in said
    monkeypatch.setitem(flop_registry, SCALE, lambda *args, kwargs, **rest: kwargs["x"].numel())
    assert make_cut(traced).regions[0].info.cost.flops == 2 * 64**3 + 64**2
    assert without_formula(traced.graph.graph.nodes) == {}


@torch.library.custom_op("others::flash", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("others::attention_into", mutates_args=("out",))
def attention_into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q)


@torch.library.custom_op("others::attention_mix", mutates_args=())
def mix(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.clone()


flash.register_fake(lambda q, k, v, scale: torch.empty_like(q))
mix.register_fake(lambda x, times: torch.empty_like(x))


def into(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(q)
    attention_into(q, k, v, out)
    return out


class Attends(nn.Module):
    """[tokens, 64] -> the same, through attention of 4 heads whose tensors have tokens at ``axis``."""

    def __init__(self, attend: Callable[..., torch.Tensor], axis: int, layers: int = 1) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(layers)])
        self.attend, self.axis = attend, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up in self.up:
            q = up(x).view(1, -1, 4, 16).transpose(1, self.axis)
            x = self.attend(q, q, q).transpose(1, self.axis).reshape(-1, 64) + x
        return x


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("attend", [lambda q, k, v: flash(q, k, v, 0.5), into])
def test_attention_without_a_formula_is_estimated_and_said(attend: Any, axis: int) -> None:
    cut = cut_of(Attends(attend, axis), torch.randn(32, 64))
    assert sum(r.info.cost.attention for r in cut.regions) == 4 * 4 * 32 * 32 * 16
    (said,) = without_formula(cut.source.graph.nodes).values()
    assert "are estimated as those of attention" in said


@pytest.mark.parametrize(
    ("attend", "op"),
    [
        (lambda q, k, v: flash(q, k, v, 0.5), "flash"),
        (into, "attention_into"),
        (lambda q, k, v: mix(q, 3), "attention_mix"),
    ],
)
def test_a_declared_formula_is_taken(attend: Any, op: str) -> None:
    target = getattr(torch.ops.others, op)
    register_flop_formula(target)(lambda q_shape, *rest, out_shape=None, **_: 7 * q_shape[0])
    try:
        cut = cut_of(Attends(attend, 2), torch.randn(32, 64))
        assert sum(r.info.cost.attention for r in cut.regions) == 7
        assert without_formula(cut.source.graph.nodes) == {}
    finally:
        del flop_registry[target]


def test_an_op_that_is_not_attention_is_taken_by_its_bytes_and_said() -> None:
    traced = trace(Attends(lambda q, k, v: mix(q, 3), 2), {"x": torch.randn(32, 64)}, 0)
    (said,) = without_formula(traced.graph.graph.nodes).values()
    assert said == (
        "no FLOP formula is declared for others::attention_mix: its FLOPs count as none, only its bytes. Declare one with "
        "torch.utils.flop_counter.register_flop_formula(torch.ops.others.attention_mix)."
    )


def test_it_is_said_once_a_process_and_explained_of_every_graph(caplog: pytest.LogCaptureFixture) -> None:
    options = {"min_bytes": 0, "hardware": "h200", "policy": "layerwise", "lowering": "eager"}
    explained = []
    for _ in range(2):
        torch._dynamo.reset()
        model = Attends(lambda q, k, v: flash(q, k, v, 0.5), 2, layers=3)
        torch.compile(model, backend="chunkflow", fullgraph=True, options=options)(torch.randn(32, 64))
        explained.append(" ".join(str(explain(model, details=True)).split()))
    assert all(text.count("no FLOP formula is declared for others::flash") == 1 for text in explained)
    assert caplog.text.count("others::flash") <= 1


def test_flex_attention_and_nested_graphs_take_flops() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    cut = cut_of(Attends(flex_attention, 2), torch.randn(32, 64))
    assert sum(r.info.cost.attention for r in cut.regions) == sdpa_flop_count(*[(1, 4, 32, 16)] * 3)

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x, w: x @ w @ w, lambda x, w: x @ w, (x, self.w))

    cut = cut_of(Branch(), torch.randn(32, 64))
    assert sum(r.info.cost.flops for r in cut.regions) == 2 * 2 * 32 * 64 * 64
