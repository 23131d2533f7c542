"""CFG parallelism: the exchange of the branches of guidance in problems, plans and programs, beside Ulysses' collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import OPTIONS
from helpers import Block, InTurn
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs
from chunkflow_compile.catalog.branches import exchange_branches
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.options import Options
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.discover import collective_kind, group_name
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify

SIZE = Size(layers=1)
STEPS = 3


def wan() -> tuple[nn.Module, dict[str, Any]]:
    return small_model("wan", SIZE), small_inputs("wan", SIZE, 0)


def test_a_plan_has_the_exchange_after_the_collectives_of_ulysses() -> None:
    alone, traced = (trace_without_weights(wan, 4, 1024, cfg_parallel=n) for n in (1, 2))
    before, cut = make_cut(alone).problem, make_cut(traced)
    problem, exchange = cut.problem, cut.problem.collectives[-1]
    assert len(before.collectives) == len(problem.collectives) - 1 == 4 * SIZE.layers + 1
    assert problem.collectives[:-1] == before.collectives and problem.digest != before.digest
    latent = small_inputs("wan", SIZE, 0)["hidden_states"]
    assert (exchange.kind, exchange.nbytes) == ("all-gather", latent.nbytes), "the other rank's prediction"
    assert exchange.before == exchange.until == len(problem.regions), "the step ends with it"
    groups = [group_name(n) for n in traced.graph.graph.nodes if collective_kind(n) is not None]
    assert [traced.ranks[g] for g in groups] == [4] * len(before.collectives) + [2]
    assert groups[-1] not in groups[:-1]

    machine = Options(**OPTIONS).profile()
    goal = {"goal": Goal(memory=3 * problem.total_bytes // 5, yields="hard"), "chunk_bytes": 16384}
    plan, without = place(problem, machine, **goal), place(before, machine, **goal)
    assert plan.predicted is not None and without.predicted is not None
    verify(rewrite(cut, plan))
    took = machine.collective_latency_s + exchange.nbytes / machine.collective_bandwidth
    assert plan.predicted.resident_step_s == pytest.approx(without.predicted.resident_step_s + took)
    spans = plan.predicted.spans
    (shown,) = [s for s in spans if s.name == exchange.name]
    assert shown.end == pytest.approx(plan.predicted.step_s) and shown.end - shown.start == pytest.approx(took)
    assert machine.shared_link and plan.moved_bytes > 0
    for copy in (s for s in spans if s.lane == "copy"):
        for turn in (0.0, plan.predicted.step_s):  # one that starts in the step before has a negative time
            assert copy.end + turn <= shown.start + 1e-9 or copy.start + turn >= shown.end - 1e-9, copy


class Split(InTurn):
    """Blocks whose results are summed over a group of ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(Block(32) for _ in range(3))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = funcol.all_reduce(block(x), "sum", self.group) / 3
        return x


def split() -> tuple[nn.Module, dict[str, Any]]:
    """Rank 0 of two ranks for each branch."""
    return Split(dist.new_group([0, 1])).eval(), {"x": torch.randn(4, 32)}


def test_a_plan_made_without_weights_runs_on_two_groups_of_two(tmp_path: Path, on_ranks: Callable[..., None]) -> None:
    traced = trace_without_weights(split, 2, OPTIONS["min_bytes"], cfg_parallel=2)
    options = Options(**OPTIONS)
    plan = place(make_cut(traced).problem, options.profile(), Goal(memory=24 << 10), chunk_bytes=options.chunk_bytes)
    (tmp_path / "plan.json").write_text(plan.to_json())
    on_ranks(two_by_two, str(tmp_path / "plan.json"), world=4)


def two_by_two(rank: int, plan: str) -> None:
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    torch.manual_seed(0)
    model = Split(halves[rank // 2]).eval()
    twin = Split(halves[rank // 2]).eval()
    twin.load_state_dict(model.state_dict())
    exchange_branches(model, pairs[rank % 2])
    offload(model, min_bytes=OPTIONS["min_bytes"])
    model.compile(backend="chunkflow", fullgraph=True, options={"plan": plan, "lowering": "eager"})
    for step in range(STEPS):
        branches = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(step))
        # The twin computes both branches, one call each, on the ranks of this half alone.
        assert torch.equal(model(x=branches[rank // 2]), torch.cat([twin(x) for x in branches])), step
    (session,) = programs(model)
    last = session.measurements[-1]
    assert last.moved_bytes == session.plan.moved_bytes > 0 and last.collectives == 3 + 1


def test_branches_need_two_ranks_and_collectives_of_their_own(one_rank: None) -> None:
    with pytest.raises(ChunkflowError, match=r"needs a group of 2 ranks, .* has 1\. Make a group of each two"):
        exchange_branches(nn.Linear(2, 2), dist.group.WORLD)
