"""Writes that the schema of an op does not declare: collectives into a weight, and ops of extensions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Stack, check_steps, twins
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.placed.placement import placement_of

LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 1024}
POLICIES = ("layerwise", "resident")
ONE = "blocks.0.up.weight"

# An extension whose schema does not declare what it writes.
_LIBRARY = torch.library.Library("chunkflow_tests", "FRAGMENT")
_LIBRARY.define("scale(Tensor weight, float by) -> ()")
_LIBRARY.impl("scale", lambda weight, by: [weight.mul_(by), None][1], "CompositeExplicitAutograd")


def compiled(model: nn.Module, policy: str) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "policy": policy})


def coalesced(weight: torch.Tensor, source: int) -> Any:
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(weight[:2], dist.ReduceOp.MAX)
        dist.all_reduce(weight[2:], dist.ReduceOp.MAX)
    return manager


def scatter(weight: torch.Tensor, source: int) -> Any:
    sent = [torch.full_like(weight, (r + 1) / 8).cpu() for r in range(dist.get_world_size())]
    return dist.scatter(weight, sent if dist.get_rank() == source else None, source, async_op=True)


def all_gather(weight: torch.Tensor, source: int) -> Any:
    rows = [*weight.detach()[: 2 * dist.get_world_size()].split(2)]
    return dist.all_gather(rows, torch.full_like(rows[0], (dist.get_rank() + 1) / 4), async_op=True)


def from_all_rows(collective: Callable[..., Any]) -> Callable[[torch.Tensor, int], Any]:
    """One that takes two rows for each rank, or gives them."""

    def call(weight: torch.Tensor, source: int) -> Any:
        target = weight[: 2 * dist.get_world_size()]
        if collective is dist.reduce_scatter_tensor:
            return collective(weight[:2], torch.ones_like(target) * dist.get_rank(), async_op=True)
        sent = target if collective is dist.all_to_all_single else target[:2]
        return collective(target, torch.full_like(sent, dist.get_rank() / 4), async_op=True)

    return call


def functional(weight: torch.Tensor, source: int) -> None:
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    ops.wait_tensor(ops.broadcast_(weight, source, group))
    ops.wait_tensor(ops.all_reduce_(weight, "max", group))


# Each writes a weight on all ranks: the weight, and a rank.  Returns what waits for it, None if nothing need.
COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "broadcast": lambda w, source: dist.broadcast(w, source, async_op=True),
    "all_reduce": lambda w, source: dist.all_reduce(w, dist.ReduceOp.MAX, async_op=True),
    "a future": lambda w, source: dist.all_reduce(w, dist.ReduceOp.MAX, async_op=True).get_future(),
    "reduce": lambda w, source: dist.reduce(w, source, dist.ReduceOp.MIN, async_op=True),
    "rows": lambda w, source: dist.broadcast(w[2:5], source, async_op=True),
    "as DistributedDataParallel begins": lambda w, source: dist._broadcast_coalesced(
        dist.group.WORLD, [w.detach()], 1 << 20, source
    ),
    "all_gather": all_gather,
    "all_gather_into_tensor": from_all_rows(dist.all_gather_into_tensor),
    "reduce_scatter_tensor": from_all_rows(dist.reduce_scatter_tensor),
    "all_to_all_single": from_all_rows(dist.all_to_all_single),
    "scatter": scatter,
    "coalesced": coalesced,
    "functional": functional,
}


class Pair:
    """An offloaded model, compiled, and its plain twin.  Each action is done to both, alike on all ranks."""

    def __init__(self, policy: str, share: bool) -> None:
        self.model, self.twin = twins(lambda: Stack(layers=3))
        offload(self.model, min_bytes=LEAST, share=share)
        self.run = compiled(self.model, policy)
        self.names = [name for name, p in self.twin.named_parameters() if p.nbytes >= LEAST]
        self.shared = share
        self.busy: dict[str, list[Any]] = {}  # what a collective may still write -> its works
        self.kinds = itertools.cycle(COLLECTIVES)
        self.done: list[str] = []

    def both(self, name: str) -> list[nn.Parameter]:
        return [self.model.get_parameter(name), self.twin.get_parameter(name)]

    def step(self, draw: random.Random) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
        self.finish(draw)
        for _ in range(draw.choice((1, 1, 2))):
            found, expected = self.run(x), self.twin(x)
            assert torch.isfinite(expected).all() and torch.equal(found, expected), self.done
            x = x + 1

    def read(self, draw: random.Random) -> None:
        name = draw.choice([n for n in self.names if n not in self.busy])
        how = draw.choice((lambda w: w.sum(), lambda w: w[1:3].clone(), lambda w: w @ w.T, lambda w: w.cpu()))
        assert torch.equal(*(how(p) for p in self.both(name))), (name, self.done)

    def write(self, draw: random.Random) -> None:
        name, by = draw.choice([n for n in self.names if n not in self.busy]), draw.choice((0.5, 0.75, -1.0))
        rank = dist.get_rank()
        how = draw.choice(
            (
                lambda p: p.mul_(by),
                lambda p: p[1:3].fill_(by * rank),
                lambda p: p.copy_(p.flip(0) * by),
                lambda p: p.data.add_(rank / 8),
                lambda p: setattr(p, "data", p.data * by),
                lambda p: torch._foreach_mul_([p, p[1]], by),
                lambda p: torch.ops.chunkflow_tests.scale(p, by),
                lambda p: torch.ops.chunkflow_tests.scale(p.t()[1:], by),
            )
        )
        for p in self.both(name):
            how(p)

    def load(self, draw: random.Random) -> None:
        self.finish(draw)
        values = {name: self.twin.get_parameter(name) * 0.5 for name in draw.sample(self.names, 2)}
        for m in (self.model, self.twin):
            m.load_state_dict(values, strict=False)

    def lend(self, draw: random.Random) -> None:
        """Write what state_dict has made, which is the model's memory unless ranks share it."""
        self.finish(draw)
        if not self.shared:
            name, source = draw.choice(self.names), draw.randrange(dist.get_world_size())
            for m in (self.model, self.twin):
                state = m.state_dict()[name]
                dist.broadcast(state, source)
                state.numpy()[:1] += dist.get_rank() / 8

    def collect(self, draw: random.Random) -> None:
        """A collective that writes a weight; its work is waited for now, or before the next step."""
        name, source, later = draw.choice(self.names), draw.randrange(dist.get_world_size()), draw.random() < 0.5
        self.finish(draw, name)
        kind = next(self.kinds)
        self.done.append(kind)
        works = [COLLECTIVES[kind](draw.choice((p, p.data)), source) for p in self.both(name)]
        self.busy[name] = [work for work in works if work is not None]
        if not later:
            self.finish(draw, name)

    def finish(self, draw: random.Random, name: str | None = None) -> None:
        """Wait for the collectives that may write a weight, or any; those of the model in another order on each rank."""
        for key in [*self.busy] if name is None else [k for k in self.busy if k == name]:
            for work in self.busy.pop(key):
                work.wait()


def randomly(rank: int, policy: str, share: bool, seeds: range) -> None:
    pair = Pair(policy, share)
    begin = {name: p.clone() for name, p in pair.twin.named_parameters()}
    actions = (pair.step, pair.read, pair.write, pair.write, pair.collect, pair.collect, pair.load, pair.lend)
    for seed in seeds:
        draw = random.Random(seed)
        for m in (pair.model, pair.twin):
            m.load_state_dict({name: p * (1 + rank / 8) for name, p in begin.items()})
        pair.done = [f"seed {seed}"]
        pair.step(draw)
        for _ in range(12):
            action = draw.choice(actions)
            pair.done.append(action.__name__)
            action(draw)
        pair.step(draw)
    moved = [s.measurements[-1].moved_bytes for s in programs(pair.model)]
    assert moved == [s.plan.moved_bytes for s in programs(pair.model)] and (sum(moved) > 0) == (policy != "resident")


def case(world: int, policy: str, share: bool, count: int) -> Any:
    return pytest.param(world, policy, share, range(count), marks=[pytest.mark.long] * (count > 10))


@pytest.mark.parametrize(
    ("world", "policy", "share", "seeds"),
    [
        case(2, "layerwise", False, 10),
        case(2, "resident", True, 10),
        *(case(world, policy, share, 200) for world in (2, 3) for policy in POLICIES for share in (False, True)),
    ],
)
def test_random_programs_equal_their_twin(
    on_ranks: Callable[..., None], world: int, policy: str, share: bool, seeds: range
) -> None:
    on_ranks(randomly, policy, share, seeds, world=world)


def from_one_rank_to_another(rank: int) -> None:
    model = twins(Stack)[0]
    offload(model, min_bytes=LEAST, share=True)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_forward_may_not_write_unseen(policy: str, no_grad: None) -> None:
    model, x = Halving(), torch.randn(2, 32)
    before = model.down.weight.clone()
    offload(model, min_bytes=LEAST)
    run = compiled(model, policy)
    for _ in range(2):
        with pytest.raises(ChunkflowError, match=r"writes the weight down\.weight .* chunkflow_tests\.halve\.default"):
            run(x)
    assert torch.equal(model.down.weight, before)
    model(x)  # outside a program it is seen
    assert torch.equal(model.down.weight, before * 0.5)
    assert torch.equal(restore(model).down.weight, before * 0.5)


def test_what_nothing_tells_is_refused(no_grad: None) -> None:
    model = Halving()
    offload(model, min_bytes=LEAST)
    with torch.library._scoped_library("chunkflow_tests", "FRAGMENT") as library:
        library.define("rows(Tensor x) -> Tensor")
        library.impl("rows", lambda x: x[1:], "CompositeExplicitAutograd")
        with pytest.raises(ChunkflowError, match=r"returns memory of down\.weight, which its schema does not declare"):
            torch.ops.chunkflow_tests.rows(model.down.weight)
    with pytest.raises(ChunkflowError, match=r"irecv.* needs the memory of down\.weight"):
        torch.ops._c10d_functional.irecv(model.down.weight, 0, 0, "0")


def test_a_state_dict_that_is_kept_may_be_written_at_any_time(no_grad: None) -> None:
    model, twin = twins(Stack)
    offload(model, min_bytes=LEAST)
    run = compiled(model, "resident")
    check_steps(run, twin, 2)
    states = [m.state_dict() for m in (model, twin)]
    with pytest.warns(UserWarning, match=r"Tensors of a state_dict\(\) of Stack are still in use"):
        check_steps(run, twin, 2)
    for _ in range(2):
        for state in states:
            state[ONE].numpy()[:] *= 0.5
        check_steps(run, twin, 2)
    del states, state
    check_steps(run, twin, 2)
    (program,) = programs(model)
    seen = program.call.steps
    check_steps(run, twin, 2)
    assert programs(model) == (program,) and program.call.steps == seen + 2, "what is dropped is counted once"


def test_programs_that_copy_from_the_memory_are_no_users_of_a_state_dict(no_grad: None) -> None:
    model, twin = twins(Stack)
    offload(model, min_bytes=LEAST)
    run, store = compiled(model, "layerwise"), placement_of(model).store  # type: ignore[union-attr]
    check_steps(run, twin, 2)
    assert programs(model)[0].measurements[-1].moved_bytes > 0
    states = [m.state_dict() for m in (model, twin)]
    arrays = [state[ONE].numpy() for state in states]
    with pytest.warns(UserWarning, match="are still in use"):
        check_steps(run, twin, 2)
    del states
    for _ in range(2):  # arrays of dropped tensors still are users
        for array in arrays:
            array[:] *= 0.5
        check_steps(run, twin, 2)
    assert {buffer.name for export in store.exported if (buffer := export.buffer()) is not None} == {ONE}
    del arrays, array
    check_steps(run, twin, 1)
    assert not store.exported


def test_running_statistics_are_written(no_grad: None) -> None:
    model, twin = nn.BatchNorm1d(512), nn.BatchNorm1d(512)
    offload(model, min_bytes=LEAST)
    x = torch.randn(4, 512)
    assert torch.equal(model(x), twin(x))
    assert torch.equal(model.running_mean.clone(), twin.running_mean)  # type: ignore[union-attr]
