"""Ranks that differ in speed plan again together, from the largest of their times, and none waits for another."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import OPTIONS, WITHIN
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from chunkflow_compile import ChunkflowError, cycles, offload, programs, replan
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.runtime import measurement
from chunkflow_compile.runtime.rank_times import RankTimes
from chunkflow_compile.weights.groups import Group

RANKS = 4
AFTER = 2
# Passes by which all have planned again: the third pass is the first of a cycle, AFTER + 1 passes are measured, and one more
# is run for each of two groups.
PASSES = 2 + AFTER + 1 + 2 + 2


@torch.library.custom_op("chunkflow_tests::delayed", mutates_args=())
def delayed(x: torch.Tensor) -> torch.Tensor:
    """A copy that takes each rank its own time, and never the same."""
    time.sleep(random.uniform(2e-4, 4e-4) * (1 + 2 * dist.get_rank()))
    return x.clone()


@delayed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Part(nn.Module):
    """Two weights, with a collective over each of some groups between."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], width: int = 48) -> None:
        super().__init__()
        self.groups = groups
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = delayed(self.up(x))
        for group in self.groups:
            y = funcol.all_reduce(y, "avg", group)
        return x + self.down(y)


class Parts(nn.Module):
    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part(groups) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pair(
    folder: Path, groups: Sequence[dist.ProcessGroup], by_kind: bool, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A compiled model and its twin, planned for a machine whose copies are slower than those of any busy one: some weights
    stay, which all stream once that is measured."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, twin = Parts(groups).eval(), Parts(groups).eval()
    twin.load_state_dict(model.state_dict())
    machine = replace(load_profile(OPTIONS["hardware"]), name="wrong", launch_s=1e-5, h2d_bandwidth=1e6, eta_pref=1e-2)
    machine = replace(machine, collective_bandwidth=1e5, node_bandwidth=1e5)  # they are corrected by the same factor
    path = folder / f"rank{dist.get_rank()}.json"
    path.write_text(machine.to_json())
    told = {**OPTIONS, "hardware": str(path), "slowdown": 100.0, "lowering": "eager", **options}
    offload(model, min_bytes=told.pop("min_bytes"))
    for part in model.blocks if by_kind else (model,):
        part.compile(backend="chunkflow", fullgraph=True, options=told)
    return model, twin


def check(model: nn.Module, twin: nn.Module, passes: int) -> None:
    for _ in range(passes):
        x = torch.randn(4, 48)
        dist.broadcast(x, 0)
        assert torch.equal(model(x), twin(x))


def plan_of(model: nn.Module) -> Plan:
    (bound,) = cycles(model) or (programs(model)[-1],)
    return bound.cycle.plan


def from_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def have_one_plan(model: nn.Module) -> bool:
    """Whether all ranks run the same plan, made from measured times: in its digest is every second that it predicts."""
    plan = plan_of(model)
    assert programs(model)[-1].measurements[-1].collectives > 0 and plan.moved_bytes > 0
    return plan.hardware == "wrong, as measured" and from_all(plan.digest) == RANKS * [plan.digest]


def replans(rank: int, folder: Path, by_kind: bool, times: int) -> None:
    """With the rows and the columns of a mesh, and with one group of all ranks in turns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    for turn in range(times):
        groups = [dist.group.WORLD] if turn % 2 else [mesh.get_group(name) for name in ("rows", "columns")]
        model, twin = pair(folder, groups, by_kind, replan_after=AFTER)
        check(model, twin, 3)
        before = plan_of(model)
        assert before.hardware == "wrong" and before.moved_bytes > 0
        check(model, twin, PASSES)
        assert have_one_plan(model), turn
        assert plan_of(model).moved_bytes > before.moved_bytes


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "by_kind", [pytest.param(False, id="whole"), pytest.param(True, id="by kind", marks=pytest.mark.long)]
)
def test_ranks_with_delays_of_their_own_have_one_plan(
    by_kind: bool, times: int, on_ranks: Callable[..., None], tmp_path: Path
) -> None:
    """Once with the mesh alone: the next test has one group of all ranks."""
    on_ranks(replans, tmp_path, by_kind, times, world=RANKS)


def differs(rank: int, folder: Path) -> None:
    """Ranks of which one is not measured, does not plan again, or does not come."""
    heard: list[str] = []
    log = logging.getLogger("chunkflow_compile")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    model, twin = pair(folder, [dist.group.WORLD], False, replan_after=1)
    check(model, twin, 1)
    device = programs(model)[0].arena.streams
    if rank == 1:
        device.measure(0)
    check(model, twin, 2)
    assert plan_of(model).hardware == "wrong"
    device.measure(None)
    check(model, twin, 4)
    assert have_one_plan(model), "two passes later, rank 1 has measured one too"

    model, twin = pair(folder, [dist.group.WORLD], False, replan_after=AFTER if rank < 3 else 0)
    check(model, twin, PASSES)
    assert plan_of(model).hardware == "wrong"
    kept = [text for text in heard if "the current plan is kept" in text]
    assert len(kept) == (rank < 3) and all("rank 3 runs other calls than this one" in text for text in kept)

    if rank == 0:
        named = measurement.group_named
        measurement.group_named = lambda name: replace(named(name), timeout=timedelta(seconds=0.1))  # type: ignore[type-var]
        with pytest.raises(ChunkflowError, match=r"Ranks 1, 2, 3 did not call replan\(as_measured=True\) within 0.1 s"):
            replan(model, as_measured=True)
        measurement.group_named = named
    check(model, twin, 1)
    assert plan_of(model).hardware == "wrong", "nothing has changed"
    replan(model, as_measured=True)
    check(model, twin, 2)
    assert have_one_plan(model)


def test_ranks_that_differ_do_not_wait_for_each_other(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(differs, tmp_path, world=RANKS)


def test_a_rank_that_comes_late_does_not_plan_alone() -> None:
    """The times of a rank that goes on without the others are withdrawn; the next ones count for all."""
    store, within = dist.HashStore(), timedelta(seconds=WITHIN)
    groups = [Group(store, rank, (0, 1), within) for rank in (0, 1)]
    early, late = (Timings(problem="p", compute_s=(s,), collective_s=(0.0,), copy_rate=1.0) for s in (1.0, 2.0))
    for first, second in ((0, 1), (1, 0)):
        for rank in (first, second):
            times = RankTimes([groups[rank]], {"calls": (early, late)[rank]})
            with pytest.raises(ChunkflowError, match=f"rank {1 - rank} runs other calls than this one"):
                times.read()
    both = [RankTimes([groups[rank]], {"calls": (early, late)[rank]}) for rank in (0, 1)]
    for times in both:
        times.read(wait=True)
        assert times.timings["calls"] == late and not times.missing
