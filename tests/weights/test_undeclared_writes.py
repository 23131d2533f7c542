"""Writes that the schema of an op does not declare: collectives into a weight, and ops of extensions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Stack
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore

LEAST = 1024
STREAMING = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}
RESIDENT = {**STREAMING, "policy": "resident"}
ONE, OTHER = "blocks.0.up.weight", "blocks.1.up.weight"


def steps(run: Any, twin: nn.Module, seed: int) -> None:
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed + step))
        assert torch.equal(run(x), twin(x))


def pair(rank: int, options: dict[str, Any], share: bool) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    model = Stack().eval()
    twin = copy.deepcopy(model)
    offload(model, min_bytes=LEAST, share=share)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    steps(run, twin, 0)
    (program,) = programs(model)
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 2
    assert (program.plan.moved_bytes > 0) == (options == STREAMING)
    return model, twin, run


# Each writes weights of one rank or both: a model, its rank.
def broadcast(model: nn.Module, rank: int) -> None:
    for p in model.parameters():
        dist.broadcast(p, 0)


def broadcast_data(model: nn.Module, rank: int) -> None:
    for p in model.parameters():
        dist.broadcast(p.data, 1)


def broadcast_later(model: nn.Module, rank: int) -> None:
    works = [dist.broadcast(p, 0, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()


def by_futures(model: nn.Module, rank: int) -> None:
    for future in [dist.all_reduce(p, async_op=True).get_future() for p in model.parameters()]:
        future.wait()


def coalesced(model: nn.Module, rank: int) -> None:
    with dist.distributed_c10d._coalescing_manager():
        for p in model.parameters():
            dist.all_reduce(p)


def scatter_and_gather(model: nn.Module, rank: int) -> None:
    one, other = model.get_parameter(ONE), model.get_parameter(OTHER)
    dist.scatter(one, [one * 3, one * 4] if rank == 0 else None)
    dist.all_gather(list(other.data.chunk(2)), torch.full_like(other[: len(other) // 2], rank))
    dist.all_gather_into_tensor(one.data, other[: len(other) // 2].contiguous())
    dist.reduce_scatter_tensor(other[:4].data, torch.ones_like(other[:8]) * rank)
    dist.reduce(one, 1)
    dist.all_to_all_single(other.data, one * rank)


def synchronised(model: nn.Module, rank: int) -> None:
    """As DistributedDataParallel begins."""
    dist._broadcast_coalesced(dist.group.WORLD, [p.detach() for p in model.parameters()], 1 << 20, 0)


def into_a_state_dict(model: nn.Module, rank: int) -> None:
    """No op on a weight.  Ranks that share weights get copies there."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    model.state_dict()[ONE].numpy()[:] += rank


def functional(model: nn.Module, rank: int) -> None:
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    ops.wait_tensor(ops.broadcast_(model.get_parameter(ONE), 1, group))
    ops.wait_tensor(ops.all_reduce_(model.get_parameter(OTHER), "sum", group))


ALL = (
    broadcast,
    broadcast_data,
    broadcast_later,
    by_futures,
    coalesced,
    scatter_and_gather,
    synchronised,
    functional,
)


def written(rank: int, options: dict[str, Any], share: bool) -> None:
    model, twin, run = pair(rank, options, share)
    begin = [p.clone() for p in twin.parameters()]
    for number, write in enumerate((*ALL, into_a_state_dict)[: len(ALL) + (not share)]):
        for m in (model, twin):
            for p, values in zip(m.parameters(), begin, strict=True):
                p.copy_(values * (1 + rank + number / 8))
        steps(run, twin, number)
        for m in (model, twin):
            write(m, rank)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), (write.__name__, name)
        steps(run, twin, number)


@pytest.mark.parametrize("options", [STREAMING, RESIDENT], ids=["streaming", "resident"])
def test_collectives_write_weights(on_ranks: Callable[..., None], options: dict[str, Any]) -> None:
    on_ranks(written, options, options == STREAMING)


def from_one_rank_to_another(rank: int) -> None:
    model, _, _ = pair(rank, RESIDENT, True)
    weight = model.get_parameter(ONE)
    if rank == 0:
        dist.isend(weight, 1).wait()
        return
    found = torch.empty_like(weight).cpu()
    for receive in (dist.recv, dist.irecv):
        with pytest.raises(ChunkflowError, match=rf"recv.* needs the memory of {ONE}"):
            receive(weight, 0)
    dist.recv(found, 0)
    assert torch.equal(found, weight)
    dist.distributed_c10d._world.pg_coalesce_state[dist.group.WORLD] = []
    with pytest.raises(ChunkflowError, match=rf"broadcast_.* writes {ONE} with a batch of collectives"):
        dist.broadcast(weight, 0)
    del dist.distributed_c10d._world.pg_coalesce_state[dist.group.WORLD]


def test_weights_are_sent_and_what_writes_them_later_is_refused(on_ranks: Callable[..., None]) -> None:
    on_ranks(from_one_rank_to_another)


@torch.library.custom_op("chunkflow_tests::halve", mutates_args=())
def halve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its schema is wrong."""
    weight.mul_(0.5)
    return x @ weight


halve.register_fake(lambda x, weight: x @ weight)


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(halve(self.up(x), self.down.weight))


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("options", [STREAMING, RESIDENT], ids=["streaming", "resident"])
def test_forward_may_not_write_unseen(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Halving()
    before, x = model.down.weight.clone(), torch.randn(2, 32)
    offload(model, min_bytes=LEAST)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    for _ in range(2):
        with pytest.raises(ChunkflowError, match=r"writes the weight down\.weight .* chunkflow_tests\.halve\.default"):
            run(x)
    assert torch.equal(model.down.weight, before)
    model(x)  # outside a program it is seen
    assert torch.equal(model.down.weight, before * 0.5)
    assert torch.equal(restore(model).down.weight, before * 0.5)


@pytest.mark.usefixtures("no_grad")
def test_what_nothing_tells_is_refused() -> None:
    model = Halving()
    offload(model, min_bytes=LEAST)
    with torch.library._scoped_library("chunkflow_tests", "FRAGMENT") as library:
        library.define("rows(Tensor x) -> Tensor")
        library.impl("rows", lambda x: x[1:], "CompositeExplicitAutograd")
        with pytest.raises(ChunkflowError, match=r"returns memory of down\.weight, which its schema does not declare"):
            torch.ops.chunkflow_tests.rows(model.down.weight)
    with pytest.raises(ChunkflowError, match=r"irecv.* needs the memory of down\.weight"):
        torch.ops._c10d_functional.irecv(model.down.weight, 0, 0, "0")


@pytest.mark.usefixtures("no_grad")
def test_a_state_dict_that_is_kept_may_be_written_at_any_time() -> None:
    model, twin, run = pair(0, RESIDENT, False)
    states = [m.state_dict() for m in (model, twin)]
    with pytest.warns(UserWarning, match=r"Tensors of a state_dict\(\) of Stack are still in use"):
        steps(run, twin, 0)
    for seed in (1, 2):
        for state in states:
            state[ONE].numpy()[:] *= 0.5
        steps(run, twin, seed)
    del states, state
    steps(run, twin, 3)
    (program,) = programs(model)
    seen = program.steps
    steps(run, twin, 4)
    assert programs(model) == (program,) and program.steps == seen + 2, "what is dropped is counted once"


@pytest.mark.usefixtures("no_grad")
def test_running_statistics_are_written() -> None:
    model, twin = nn.BatchNorm1d(512), nn.BatchNorm1d(512)
    offload(model, min_bytes=LEAST)
    x = torch.randn(4, 512)
    assert torch.equal(model(x), twin(x))
    assert torch.equal(model.running_mean.clone(), twin.running_mean)  # type: ignore[union-attr]
