"""Coarser cuts: what is joined, and how coarse a plan allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers import fake_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut, make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.coarsen import apart, divided, grouped, merged, repeated, streamed_bytes
from chunkflow_compile.passes.graph.regions import Cut, cut
from chunkflow_compile.passes.graph.traced import Repeats, Traced
from chunkflow_compile.passes.placement import coarsest
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.cycle import Call, problem_of

WIDTH, LAYERS, BLOCKS = 64, 6, 4
WEIGHT = 4 * WIDTH * WIDTH
# A weight is copied in a millisecond; a region takes half of that.
SLOW = replace(load_profile("h100-pcie-x2"), h2d_bandwidth=1e3 * WEIGHT, eta_pref=1.0, chunk_s=0.0, launch_s=5e-4)


class Block(nn.Module):
    def __init__(self, exchanges: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.exchanges = exchanges

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:2](x)
        if self.exchanges:
            x = funcol.all_to_all_single(x, None, None, dist.group.WORLD)
        return self.layers[2:](x).relu()


class Blocks(nn.Module):
    def __init__(self, exchanges: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(exchanges) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(Blocks(), {"x": torch.randn(8, WIDTH)}, 0)


@pytest.fixture
def fine(traced: Traced) -> Cut:
    return make_cut(traced, WEIGHT)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finest cut and those that are tried, as for weights of some MiB."""
    monkeypatch.setattr("chunkflow_compile.passes.cutting.DEFAULT_GROUP_BYTES", WEIGHT)
    monkeypatch.setattr(coarsest, "_MOST", (None, 3 * WEIGHT, 2 * WEIGHT))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_the_largest_group_is_as_small_as_it_can_be(sizes: list[int], count: int) -> None:
    groups = divided(sizes, count)
    assert [i for group in groups for i in group] == list(range(len(sizes))) and len(groups) <= count

    def least(first: int, left: int) -> int:
        rest = sizes[first:]
        if left == 1 or len(rest) < 2:
            return sum(rest)
        return min(max(sum(rest[:n]), least(first + n, left - 1)) for n in range(1, len(rest) + 1))

    assert max(sum(sizes[i] for i in group) for group in groups) == least(0, count)


def test_a_joined_problem_is_that_of_the_coarser_cut() -> None:
    """With collectives too, which no group spans: the same weights, work and places of collectives."""
    with fake_ranks():
        source = trace(Blocks(exchanges=True), {"x": torch.randn(8, WIDTH)}, 0)
        fine = make_cut(source, 1)
    assert fine.problem.collectives
    of_one = Call(fine, {w.name: w.name for w in fine.problem.weights}, {})
    for most, of_block in ((None, [2, 4]), (3 * WEIGHT, [2, 2, 2]), (WEIGHT, [1] * LAYERS)):
        groups = grouped(fine, most)
        coarse, problem = cut(source, fine.discovery, 1, groups=groups), merged(fine, groups)
        forms = fine.problem, coarse.problem, problem, problem.in_blocks, repeated(problem, 2), problem_of([of_one])
        assert {form.ranks for form in forms} == {2}
        assert problem.digest == coarse.problem.digest and problem.structure == coarse.problem.structure
        assert [r.live for r in problem.regions] == [r.live for r in coarse.problem.regions]
        assert sum(r.cost.kernels for r in coarse.problem.regions) <= sum(r.cost.kernels for r in problem.regions)
        assert [len(r.weights) for r in coarse.problem.regions] == BLOCKS * of_block
        assert len({r.key for r in coarse.problem.regions}) <= 2 * len(of_block), "equal blocks are lowered once"


def chosen(traced: Traced, share: float, **settings: object) -> Cut:
    total = BLOCKS * LAYERS * WEIGHT
    return choose_cut(
        traced, Settings(hardware=SLOW, chunk_bytes=4096, goal=Goal(memory=int(share * total)), **settings)
    )


def test_the_coarsest_cut_that_is_as_good(traced: Traced, fine: Cut) -> None:
    """One region a block where all weights fit; as many as the finest where a larger region takes the place of residents."""
    assert [len(r.weights) for r in chosen(traced, 1.1).problem.regions] == [LAYERS] * BLOCKS
    cuts = {share: chosen(traced, share) for share in (0.9, 0.3, 0.1)}
    counts = [len(each.regions) for each in cuts.values()]
    assert counts == sorted(counts) and counts[-1] == len(fine.regions) == BLOCKS * LAYERS, counts
    for share, each in cuts.items():
        settings = Settings(hardware=SLOW, chunk_bytes=4096, goal=Goal(memory=int(share * BLOCKS * LAYERS * WEIGHT)))
        best, plan = make_plan(fine.problem, settings), make_plan(each.problem, settings)
        assert plan.predicted.step_s <= coarsest.AS_GOOD * best.predicted.step_s
    assert len(chosen(traced, 1.1, group_bytes=2 * WEIGHT).regions) == BLOCKS * LAYERS // 2, "as the user says"
    assert len(choose_cut(traced, Settings(hardware=SLOW, part=True)).regions) == BLOCKS * LAYERS, (
        "no blocks of its kind"
    )


def test_a_plan_is_run_on_the_cut_that_it_is_for(traced: Traced, fine: Cut) -> None:
    """Also measured times, and the placement of a program at another size."""
    for groups in (*coarsest.candidates(fine), apart(fine)):
        problem = merged(fine, groups)
        plan = make_plan(problem, Settings(hardware=SLOW, chunk_bytes=4096, goal=Goal(slowdown=2.0)))
        assert len(chosen(traced, 1.1, plan=plan).regions) == len(groups)
        assert len(chosen(traced, 1.1, likes=((problem, plan),)).regions) == len(groups)


def test_a_part_is_judged_with_those_of_its_kind(traced: Traced) -> None:
    """As many regions as the whole model needs; with less memory than the parts together take, more of them."""
    block = trace(Blocks().blocks[0], {"x": torch.randn(8, WIDTH)}, 0)
    total = BLOCKS * LAYERS * WEIGHT
    counts = []
    for share in (1.1, 0.3, 0.1):
        repeats = Repeats(count=BLOCKS, goal=Goal(memory=int(share * total)))
        part = choose_cut(replace(block, repeats=repeats), Settings(hardware=SLOW, chunk_bytes=4096, part=True))
        counts.append(len(part.regions))
    assert counts[0] == 1 and counts[-1] == LAYERS and counts == sorted(counts), counts
    joined_part = choose_cut(replace(block, repeats=repeats), Settings(hardware=SLOW, part=True, joined=True))
    assert len(joined_part.regions) == LAYERS
    asked: list[tuple[int, ...]] = []

    def no_plan(problem: Problem, *, goal: Goal, ends: Sequence[int] | None = None) -> Plan:
        asked.append((len(problem.regions), *(ends or ())))
        raise ChunkflowError("too little")

    finest = make_cut(block, WEIGHT)
    coarsest.coarsest(finest, True, coarsest.judged(finest.problem, repeats, Goal(), no_plan))
    calls = range(1, BLOCKS + 1)
    assert asked == [(BLOCKS * LAYERS, *(LAYERS * call for call in calls))], (
        "each block is a call, which ends by itself"
    )
    problem = make_cut(block, WEIGHT).problem
    again = repeated(problem, 3)
    assert sum(streamed_bytes(again)) == 3 * sum(streamed_bytes(problem)) and len(again.regions) == 3 * LAYERS
