"""Hoist: what is split off, what is not, and the contract of the halves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from torch import nn
from torch.fx import GraphModule, Node
from two_blocks import WIDTH, Timed

from chunkflow_compile.catalog.small import SMALL_MODELS, Size, small_inputs, small_model
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError, FindingError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.discover import input_key
from chunkflow_compile.passes.graph.hoist import Halves, check_halves, split
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hoisting import MOST_ROWS, hoisting_of, rows_within
from chunkflow_compile.passes.pass_pipeline import stages
from chunkflow_compile.passes.planning import Settings

SIZE = Size(layers=1, singles=1)
FAST = str(Path(__file__).parents[2] / "fast_compute.json")


def traced_of(model: nn.Module, *inputs: torch.Tensor) -> Traced:
    names = ("x", "t")
    return trace(model.requires_grad_(False), dict(zip(names, inputs, strict=True)), min_bytes=64)


def small_trace(name: str) -> Traced:
    return trace(small_model(name, SIZE).requires_grad_(False), small_inputs(name, SIZE, 0), min_bytes=256)


X, T = torch.randn(64, WIDTH), torch.randn(1, 8)


def hoisted(traced: Traced) -> set[str]:
    halves = split(traced)
    if halves is None:
        return set()
    check_halves(traced, halves)
    return set(halves.hoisted)


MODULATIONS = {f"modulations.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")}


def test_modulations_are_hoisted_with_the_embedding_before_them() -> None:
    traced = traced_of(Timed(), X, T)
    halves = split(traced)
    assert halves is not None
    assert set(halves.hoisted) == MODULATIONS | {"embed.weight", "embed.bias"}
    assert halves.row_bytes == 2 * 2 * WIDTH * 4 and len(halves.slow) == 1
    assert halves.hoisted_bytes == sum(
        p.nbytes for n, p in Timed().named_parameters() if n in halves.hoisted and p.nbytes >= 64
    )
    read = {p.name for p in halves.main.parameters}
    assert read == {f"projections.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")}


def test_nothing_is_hoisted_that_depends_on_drawn_values() -> None:
    assert hoisted(traced_of(Timed(noise=True), X, T)) == {"embed.weight", "embed.bias"}


def test_a_weight_that_the_latent_meets_too_stays_with_all_its_readers() -> None:
    assert hoisted(traced_of(Timed(shared=True), X, T)) == MODULATIONS | {"embed.weight", "embed.bias"}


def test_rows_that_are_as_large_as_their_weights_do_not_pay() -> None:
    """As with one timestep per token."""
    assert hoisted(traced_of(Timed(), X, torch.randn(64, 8))) == set()


def test_named_inputs_are_slow_and_no_others() -> None:
    traced = traced_of(Timed(), X, T)
    inputs = {input_key(n.meta["desc"])[0] for n in traced.graph.graph.find_nodes(op="placeholder")}
    inputs -= {p.index for p in traced.parameters}
    named = {i: split(replace(traced, slow=frozenset([i]))) for i in inputs}
    found = split(traced)
    assert found is not None and len(inputs) == 2
    assert [halves.key for halves in named.values() if halves is not None] == [found.key]


def test_an_input_that_forward_writes_is_not_slow() -> None:
    class Writing(Timed):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            out = super().forward(x, t)
            t.mul_(2)
            return out

    assert hoisted(traced_of(Writing(), X, T)) == set()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("flux", "wan"))) for n in sorted(SMALL_MODELS)]
)
def test_the_halves_of_a_family_compute_what_it_does_and_pass_all_stages(name: str) -> None:
    traced = small_trace(name)
    halves = split(traced)
    assert halves is not None and halves.hoisted
    check_halves(traced, halves)
    settings = Settings(hardware=load_profile(OPTIONS["hardware"]), goal=Goal(slowdown=1.0), chunk_bytes=4096)
    moved = 0
    for half in (halves.preamble, halves.main):
        *_, stage = stages(half, settings, verify_each=True)
        assert stage.proof is not None and stage.cut is not None
        moved += sum(w.nbytes for w in stage.cut.problem.weights)
    whole = [*stages(traced, settings, last="regions")][-1].cut
    assert whole is not None and moved == sum(w.nbytes for w in whole.problem.weights)


def _halves() -> tuple[Traced, Halves]:
    traced = traced_of(Timed(), X, T)
    halves = split(traced)
    assert halves is not None
    return traced, halves


def changed(half: Traced, change: Callable[[GraphModule], None]) -> Traced:
    graph = copy.deepcopy(half.graph)
    change(graph)
    graph.recompile()
    return replace(half, graph=graph)


def _node(graph: GraphModule, target: Any) -> Node:
    return graph.graph.find_nodes(op="call_function", target=target)[0]


def _drop_crossing(graph: GraphModule) -> None:
    """A crossing value is the other one."""
    first, second = [n for n in graph.graph.find_nodes(op="placeholder") if n.name.startswith("row_")]
    second.replace_all_uses_with(first)


def _draw(graph: GraphModule) -> None:
    product = _node(graph, torch.ops.aten.addmm.default)
    with graph.graph.inserting_after(product):
        drawn = graph.graph.call_function(torch.ops.aten.bernoulli.default, (product,))
    drawn.meta = {"val": product.meta["val"]}
    product.replace_all_uses_with(drawn, delete_user_cb=lambda user: user is not drawn)


def _pointwise(graph: GraphModule) -> None:
    """What crosses is the result of a pointwise op."""
    output = graph.graph.output_node()
    product = output.all_input_nodes[0]
    with graph.graph.inserting_before(output):
        doubled = graph.graph.call_function(torch.ops.aten.clone.default, (product,))
    doubled.meta = {"val": product.meta["val"]}
    output.replace_input_with(product, doubled)


@pytest.mark.parametrize(
    ("half", "change", "said"),
    [
        ("main", _drop_crossing, "compute other results"),
        ("preamble", _draw, "which may run once for several calls"),
        ("preamble", _pointwise, "compute other results"),
    ],
)
def test_a_mutation_of_a_half_breaks_the_contract(half: str, change: Callable[[GraphModule], None], said: str) -> None:
    traced, halves = _halves()
    broken = replace(halves, **{half: changed(getattr(halves, half), change)})
    with pytest.raises(FindingError, match=said):
        check_halves(traced, broken)


def test_a_preamble_that_reads_the_latent_breaks_the_contract() -> None:
    traced, halves = _halves()
    with pytest.raises(FindingError, match="which is no slow input"):
        check_halves(traced, replace(halves, slow=()))


SETTINGS = Settings(hardware=load_profile(OPTIONS["hardware"]), goal=Goal(memory=20_000, hoist=True), chunk_bytes=4096)


def test_main_is_planned_with_the_table_and_an_arena_for_the_preamble() -> None:
    traced, halves = _halves()
    hoisting = hoisting_of(traced, SETTINGS)
    assert hoisting is not None
    assert hoisting.rows == rows_within(halves, Goal(memory=20_000)) == 20_000 // 16 // halves.row_bytes
    *_, stage = stages(halves.main, hoisting.main)
    assert stage.plan is not None
    assert stage.plan.arena_bytes >= hoisting.preamble_plan.arena_bytes > 0
    assert stage.plan.device_bytes + hoisting.main.external_bytes <= 20_000
    assert all(w.home == "host" and None not in w.windows for w in hoisting.preamble_plan.streamed)
    assert rows_within(halves, Goal()) == MOST_ROWS


def test_hoisting_that_cannot_be_is_refused() -> None:
    traced, halves = _halves()
    with pytest.raises(ChunkflowError, match="no weight is read by products of small inputs alone"):
        hoisting_of(replace(traced, slow=frozenset()), SETTINGS)
    tight = replace(SETTINGS, goal=Goal(memory=15 * halves.row_bytes, hoist=True))
    with pytest.raises(ChunkflowError, match="at most a sixteenth of weight_memory"):
        hoisting_of(traced, tight)


class Guided(Timed):
    """A second slow input, which takes other values in each generation."""

    def __init__(self) -> None:
        super().__init__()
        self.guide = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return super().forward(x, t + self.guide(g))


def test_auto_hoists_where_a_step_is_shorter() -> None:
    inputs = {"x": X, "t": T, "g": torch.randn(1, 8)}
    traced = trace(Guided().requires_grad_(False), inputs, min_bytes=64)
    auto = replace(SETTINGS, goal=replace(SETTINGS.goal, hoist="auto"))
    tight = hoisting_of(traced, auto)
    assert tight is not None and tight.figures.slow == 2 and tight.figures.seconds_per_call > 0
    # all of it stays on the device, where it costs little, and the copies of the preamble come with each generation
    roomy = replace(auto, goal=replace(auto.goal, memory=10**9), hardware=load_profile(FAST))
    assert hoisting_of(traced, roomy) is None
    assert hoisting_of(replace(traced, slow=frozenset()), auto) is None
