"""Models whose exchanges under Ulysses are in groups of heads: the same bits, whatever else a call has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import Library
from conftest import EAGER, RESIDENT
from helpers import Block, Combined, UlyssesBlock, UlyssesStack, check_small, memory_named, small_twins
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import chunkflow_compile
from chunkflow_compile import ChunkflowError, enable_adapters
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.frontend import graph_compiler
from chunkflow_compile.frontend.exchange_groups import agreed_groups
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.placed.notes import hoisting_notes, packing_notes
from chunkflow_compile.placed.offload import offload
from chunkflow_compile.private_torch.inductor import InductorError

# Eight heads, four on each of two ranks.
SIZE = Size(layers=2, singles=1, heads=8)
ONE_BLOCK = replace(SIZE, layers=1)
GROUPED = {**EAGER, "exchange_groups": 2}
SLOW = Path(__file__).parent.parent / "slow_compute.json"

pytestmark = pytest.mark.usefixtures("no_grad")


def groups(model: Any) -> set[int]:
    return {program.program.problem.exchange_groups for program in chunkflow_compile.programs(model)}


def family_on_a_rank(rank: int, family: str, count: int) -> None:
    model, twin = small_twins(family, SIZE, dist.get_world_size())
    offload(model, min_bytes=EAGER["min_bytes"])
    options = {**GROUPED, "exchange_groups": count}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    check_small(run, twin, family, SIZE, range(3))
    (program,) = chunkflow_compile.programs(model)
    assert groups(model) == {count} and program.measurements[-1].moved_bytes > 0
    assert f"in {count} groups of heads" in str(chunkflow_compile.explain(model, details=True))


FAMILIES = ("wan", "flux", "hunyuanvideo", "qwen-image")
CASES = [*itertools.product(FAMILIES, (2, 4), (2,)), *itertools.product(FAMILIES, (2,), (4,))]


@pytest.mark.long  # make test combines groups with threads below
@pytest.mark.parametrize(("family", "count", "ranks"), CASES)
def test_families(family: str, count: int, ranks: int, on_ranks: Callable[..., None]) -> None:
    on_ranks(family_on_a_rank, family, count, world=ranks)


DISAGREEING: list[tuple[tuple[Any, Any], str]] = [
    ((2, 4), r"different values of exchange_groups \(2 on rank 0, 4 on rank 1\)"),
    ((2, False), r"different values of exchange_groups \(2 on rank 0, False on rank 1\)"),
    ((3, 3), r"^exchange_groups=3: 3 groups do not divide the 4 attention heads"),
]


def disagreeing_on_a_rank(rank: int) -> None:
    """The ranks pass the values of each case."""
    traced = trace(UlyssesStack(1, 32, 8), {"x": torch.randn(64, 32)}, 0)
    for wanted, said in DISAGREEING:
        settings = Settings(hardware=load_profile("cpu"), goal=Goal(exchange_groups=wanted[rank]))
        if wanted[rank] is False:  # does not wait for the other, which learns of it
            assert agreed_groups(traced, settings) == (traced, ())
        else:
            with pytest.raises(ChunkflowError, match=said):
                agreed_groups(traced, settings)
        if False in wanted:
            dist.barrier()
        else:
            assert agreed_groups(traced, replace(settings, goal=Goal(exchange_groups=4)))[0].exchange_groups == 4


def test_ranks_that_do_not_agree(on_ranks: Callable[..., None]) -> None:
    """All ranks raise the same error, and can agree afterwards."""
    on_ranks(disagreeing_on_a_rank)


def choosing_on_a_rank(rank: int) -> None:
    """On a machine where attention takes as long as its exchange, and on one where the two together gain nothing."""
    machine = replace(
        load_profile(SLOW),
        launch_s=0.0,
        collective_latency_s=0.0,
        gemm_flops={"float32": 1e8},
        collective_bandwidth=3e6,
        attention_slowdown=1.0,
    )
    traced = trace(UlyssesStack(1, 32, 8), {"x": torch.randn(64, 32)}, 0)
    settings = Settings(hardware=machine, goal=Goal(exchange_groups="auto"))
    divided, (note,) = agreed_groups(traced, settings)
    assert divided.exchange_groups == 4 and re.match(
        r"the exchanges .* in 4 groups of heads: 4 groups are predicted to take 8", note
    )
    if rank:
        settings = replace(settings, hardware=replace(machine, attention_slowdown=2.0))
    divided, (note,) = agreed_groups(traced, settings)
    assert divided is traced and ("whole" in note if rank else "another rank chooses 1" in note)


def test_ranks_that_choose_differently_take_the_smallest_number(on_ranks: Callable[..., None]) -> None:
    on_ranks(choosing_on_a_rank)


class Mixed(nn.Module):
    """Blocks that exchange nothing, and then attention with larger weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64, 64) for _ in range(2))
        self.attention = UlyssesBlock(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.attention(x)


def surveying_on_a_rank(rank: int) -> None:
    """The blocks do not fit the budget of one rank, which then plans attention without the other rank."""
    if rank:
        return
    model = Mixed().eval()
    chunkflow_compile.compile(model, memory=10_000, dynamic=False, **{**GROUPED, "slowdown": None, "min_bytes": 0})
    with pytest.raises(ChunkflowError, match=r"is too little") as told:
        model(torch.randn(4, 64))
    assert memory_named(told.value) > model.attention.qkv.weight.nbytes


def test_a_survey_of_one_rank(on_ranks: Callable[..., None]) -> None:
    on_ranks(surveying_on_a_rank)


def retrying_on_a_rank(rank: int) -> None:
    """Inductor fails on the symbols of one rank, which compiles its graph again at fixed sizes."""
    lowered = graph_compiler.lower_regions
    tries = list[str]()

    def lower(program: Any, lowering: str, *args: Any) -> Any:
        tries.append(lowering)
        if rank == 0 and len(tries) == 1:
            raise InductorError(ValueError("a symbol"), None)
        return lowered(program, lowering, *args)

    graph_compiler.lower_regions = lower
    torch.manual_seed(0)
    model, x = UlyssesStack(1, 32, 8).eval(), torch.randn(4, 32)
    run = torch.compile(model, backend="chunkflow", dynamic=True, options={**EAGER, "exchange_groups": "auto"})
    assert torch.equal(run(x), model(x))
    assert len(tries) == 2 - rank and groups(model) == {1}


def test_a_rank_that_compiles_again_at_fixed_sizes(on_ranks: Callable[..., None]) -> None:
    on_ranks(retrying_on_a_rank)


def load_an_adapter(model: Any) -> None:
    enable_adapters(model, rank=4)
    model.load_lora_adapter(Library(small_model("wan", SIZE)).adapter(0, 4), adapter_name="a")


COMBINED = {
    "threads": Combined({"debug": ["poison", "threads"]}),
    "packing, hoisting": Combined({"pack": True, "hoist": True}, dtype=torch.bfloat16),
    "adapters": Combined({}, prepare=load_an_adapter),
    "blocks": Combined({}, "qwen-image", by_kind=True),
    "slices": Combined({"split": 2}, "flux"),
}


def combined_on_a_rank(rank: int, name: str) -> None:
    """With threads, one block, whose weights are about 1 MiB."""
    case, (size, memory) = COMBINED[name], (ONE_BLOCK, "900KiB") if name == "threads" else (SIZE, "2MiB")
    model, run, twin = case.placed(size, GROUPED, 2)

    def check() -> None:
        for seed in range(2):
            inputs = case.inputs(size, seed)
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0]), seed

    check()
    for each in (model, twin):
        next(w for n, w in each.named_parameters() if re.search(r"blocks\.0\..*(net\.2|linear).*weight", n)).mul_(1.5)
    check()
    chunkflow_compile.replan(model, weight_memory=memory)
    check()
    assert bool(hoisting_notes(model)) == ("hoist" in case.options)
    assert bool(packing_notes(model)) == ("pack" in case.options)
    assert 2 in groups(model) and any(p.measurements[-1].moved_bytes for p in chunkflow_compile.programs(model))
    assert "in 2 groups of heads" in str(chunkflow_compile.explain(model, details=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "threads")) for name in COMBINED]
)
def test_what_groups_are_combined_with(name: str, on_ranks: Callable[..., None]) -> None:
    """A weight is written and the plan changes between calls, whose bits are the bits of an equal model."""
    on_ranks(combined_on_a_rank, name)


def compiled_on_a_rank(rank: int, family: str) -> None:
    """Kernels of Inductor, with and without groups."""
    model, whole, eager = (enable_ulysses(small_model(family, SIZE), 2) for _ in range(3))
    offload(model, min_bytes=EAGER["min_bytes"])
    streamed = {**EAGER, "exchange_groups": 2, "lowering": "inductor"}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=streamed)
    resident = torch.compile(whole, backend="chunkflow", fullgraph=True, options=RESIDENT)
    for seed in range(2):
        inputs = small_inputs(family, SIZE, seed)
        output = run(**inputs)[0]
        assert torch.equal(output, resident(**inputs)[0])
        torch.testing.assert_close(output, eager(**inputs)[0], atol=2e-5, rtol=1e-4)
    assert groups(model) == {2} and groups(whole) == {1}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_kernels(family: str, on_ranks: Callable[..., None]) -> None:
    on_ranks(compiled_on_a_rank, family)


def guided_on_a_rank(rank: int) -> None:
    """Each branch of guidance has two ranks, which exchange heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cfg", "ulysses"))
    model, twin = (enable_ulysses(small_model("wan", SIZE), group=mesh["ulysses"]) for _ in range(2))
    offload(model, min_bytes=EAGER["min_bytes"], share=True)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=GROUPED)
    check_small(run, twin, "wan", SIZE, (10 * mesh.get_local_rank("cfg") + step for step in range(2)))
    assert groups(model) == {2}


@pytest.mark.long
def test_branches_of_guidance(on_ranks: Callable[..., None]) -> None:
    on_ranks(guided_on_a_rank, world=4)
