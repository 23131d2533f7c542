"""Random programs of reads, writes, collectives and steps on several ranks, beside a plain twin: equal after each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Stack
from torch import nn

from chunkflow_compile import offload, programs

OPTIONS = {"lowering": "eager", "min_bytes": 1024, "chunk_bytes": 1024}
POLICIES = ("layerwise", "resident")

# An extension whose schema does not declare what it writes.
_LIBRARY = torch.library.Library("chunkflow_tests", "FRAGMENT")
_LIBRARY.define("scale(Tensor weight, float by) -> ()")
_LIBRARY.impl("scale", lambda weight, by: [weight.mul_(by), None][1], "CompositeExplicitAutograd")


class Pair:
    """An offloaded model, compiled, and its plain twin.  Each action is done to both, alike on all ranks."""

    def __init__(self, policy: str, share: bool) -> None:
        torch.manual_seed(0)
        self.model, self.twin = Stack(layers=3).eval(), Stack(layers=3).eval()
        self.twin.load_state_dict(self.model.state_dict())
        offload(self.model, min_bytes=1024, share=share)
        self.run = torch.compile(self.model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "policy": policy})
        self.names = [name for name, p in self.twin.named_parameters() if p.nbytes >= 1024]
        self.shared = share
        self.busy: dict[str, list[Any]] = {}  # what a collective may still write -> its works
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
                dist.broadcast(m.state_dict()[name], source)

    def collect(self, draw: random.Random) -> None:
        """A collective that writes a weight; its work is waited for now, or before the next step."""
        name, world, rank = draw.choice(self.names), dist.get_world_size(), dist.get_rank()
        self.finish(draw, name)
        source, later = draw.randrange(world), draw.random() < 0.5
        kind = draw.choice(("broadcast", "all_reduce", "reduce", "all_gather", "scatter", "coalesced", "rows"))
        works = []
        for p in self.both(name):
            target: Any = draw.choice((p, p.data))
            if kind == "broadcast":
                works.append(dist.broadcast(target, source, async_op=True))
            elif kind == "all_reduce":
                works.append(dist.all_reduce(target, dist.ReduceOp.MAX, async_op=True))
            elif kind == "reduce":
                works.append(dist.reduce(target, source, dist.ReduceOp.MIN, async_op=True))
            elif kind == "rows":
                works.append(dist.broadcast(target[2:5], source, async_op=True))
            elif kind == "all_gather":
                rows = [*target.detach()[: 2 * world].split(2)]
                works.append(dist.all_gather(rows, torch.full_like(rows[0], (rank + 1) / 4), async_op=True))
            elif kind == "scatter":
                sent = [torch.full_like(target, (r + 1) / 8).cpu() for r in range(world)]
                works.append(dist.scatter(target, sent if rank == source else None, source, async_op=True))
            else:
                with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
                    dist.all_reduce(target[:2], dist.ReduceOp.MAX)
                    dist.all_reduce(target[2:], dist.ReduceOp.MAX)
                works.append(manager)
        self.busy[name] = works
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


@pytest.mark.parametrize("policy", POLICIES)
def test_random_programs_equal_their_twin(on_ranks: Callable[..., None], policy: str) -> None:
    on_ranks(randomly, policy, policy == "resident", range(10))


@pytest.mark.long
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [2, 3])
def test_200_random_programs_equal_their_twin(
    on_ranks: Callable[..., None], world: int, policy: str, share: bool
) -> None:
    on_ranks(randomly, policy, share, range(200), world=world)
