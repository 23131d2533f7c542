"""Weights that ranks have parts of: a rank streams its part of a DTensor; FSDP, which moves weights itself, is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack, graphs
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.two_tensor import TwoTensor

from chunkflow_compile import ChunkflowError, compile, offload, programs, restore
from chunkflow_compile.passes.graph.discover import collective_kind, group_name
from chunkflow_compile.placed import streamable
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.exchange import become
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import align, leaves_of, stream_inside

EAGER: dict[str, Any] = {**OPTIONS, "lowering": "eager"}
needs_inside = pytest.mark.skipif(not stream_inside(), reason="needs torch 2.13")


def stack(mesh: DeviceMesh | None, **sizes: int) -> nn.Module:
    """With a mesh, each block is split over its ranks, up by rows and down by columns."""
    torch.manual_seed(0)
    model = Stack(**{"width": 64, **sizes}).eval().requires_grad_(False)
    for block in model.blocks if mesh is not None else ():
        parallelize_module(
            block,  # type: ignore[arg-type]
            mesh,
            {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(input_layouts=Shard(-1))},
        )
    return model


def started(model: nn.Module, entry: str, options: dict[str, Any]) -> nn.Module:
    if entry == "by kind":
        return compile(model, **options)
    if entry == "offload":
        offload(model, min_bytes=options["min_bytes"])
    model.compile(backend="chunkflow", fullgraph=True, options=options)
    return model


def steps(model: nn.Module, twin: nn.Module, n: int = 3) -> None:
    for step in range(n):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        assert torch.equal(model(x), twin(x)), step


def streamed(model: nn.Module) -> int:
    """Bytes that the plans move; the steps moved as many."""
    for program in programs(model):
        assert {m.moved_bytes for m in program.measurements} == {program.plan.moved_bytes}
    return sum(program.plan.moved_bytes for program in programs(model))


def same(model: nn.Module, twin: nn.Module) -> None:
    """The same DTensors, around ordinary tensors."""
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(p) is type(q) and isinstance(p, nn.Parameter) and p.shape == q.shape
        mine, other = (t._local_tensor if isinstance(t, DTensor) else t for t in (p, q))
        assert type(mine) is type(other) and torch.equal(mine, other)
        assert not isinstance(p, DTensor) or (p.placements, p.device_mesh) == (q.placements, q.device_mesh)


WRITES: dict[str, Callable[[Any], object]] = {
    "copy_": lambda p: p.copy_(p * 1.5),
    "add_": lambda p: p.add_(0.01),
    "data": lambda p: p.data.mul_(1.1),
    "new data": lambda p: setattr(p, "data", p.data * 1.1),
    "the shard": lambda p: p.to_local().add_(0.02),
    "a row": lambda p: p[0:1].zero_(),
    "foreach": lambda p: torch._foreach_mul_([p], 1.2),
    "another shard": lambda p: p.copy_(distribute_tensor(torch.full(p.shape, 0.02), p.device_mesh, p.placements)),
}


def shards_stream(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for entry in ("offload", "by kind"):
        torch._dynamo.reset()
        counters.clear()
        model, twin = stack(mesh), stack(mesh)
        started(model, entry, EAGER)
        steps(model, twin)
        assert graphs() == 1, entry
        large = sum(t.nbytes for t in leaves_of(model) if isinstance(t, HostWeight))
        assert large == 4 * 64 * 128 * 4 / 2, "this rank has half of each weight of the blocks"
        assert streamed(model) == large
        nodes = [n for p in programs(model) for n in p.program.module.graph.nodes if collective_kind(n)]
        assert [(collective_kind(n), group_name(n)) for n in nodes] == [("all-reduce", mesh.get_group().group_name)] * 2
    for name, write in WRITES.items():
        for m in (model, twin):
            for block in m.blocks:  # type: ignore[union-attr]
                write(block.up.weight)
        steps(model, twin, 1)
        assert torch.equal(model.blocks[0].up.weight, twin.blocks[0].up.weight), name  # type: ignore[union-attr,index]
    changed = {name: value * 0.9 for name, value in twin.state_dict().items()}
    for name, value in model.state_dict().items():
        assert type(value) is type(changed[name]) and not isinstance(getattr(value, "_local_tensor", value), HostWeight)
        assert torch.equal(value * 0.9, changed[name])
    for m in (model, twin):
        m.load_state_dict(changed)
    steps(model, twin)
    steps(copy.deepcopy(model), twin, 1)
    assert streamed(model) == large
    ids = [id(p) for p in model.parameters()]
    restore(model)
    same(model, twin)
    assert ids == [id(p) for p in model.parameters()]


@needs_inside
def test_the_shards_of_a_rank_stream(on_ranks: Callable[..., None]) -> None:
    on_ranks(shards_stream)


def shared_shards(rank: int) -> None:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chunkflow_compile").addHandler(handler)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = offload(stack(mesh["tensor"], layers=1), min_bytes=4096, share=True)
    assert all(t.buffer.backing.where is not Where.SHARED for t in leaves_of(model) if isinstance(t, HostWeight)), (
        "shards differ"
    )
    model, twin = stack(mesh["tensor"], layers=1), stack(mesh["tensor"], layers=1)
    offload(model, min_bytes=4096, share=mesh["data"].get_group())
    shards = [t for t in leaves_of(model) if isinstance(t, HostWeight)]
    assert len(shards) == 2 and all(t.buffer.backing.where is Where.SHARED for t in shards)
    model.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    steps(model, twin)
    assert streamed(model) > 0
    for m in (model, twin):
        m.blocks[0].down.weight.mul_(rank // 2 + 1.0)  # type: ignore[union-attr,index,operator]
    steps(model, twin)
    restore(model)
    same(model, twin)
    assert not said, said


@needs_inside
def test_ranks_share_equal_shards_only(on_ranks: Callable[..., None]) -> None:
    on_ranks(shared_shards, world=4)


class Sequence(nn.Module):
    """Norm and MLP on a sequence that is split over the ranks."""

    def __init__(self, mesh: DeviceMesh, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList([nn.LayerNorm(64) for _ in range(1)])
        self.ups = nn.ModuleList([nn.Linear(64, hidden) for _ in range(1)])
        self.downs = nn.ModuleList([nn.Linear(hidden, 64) for _ in range(1)])
        self.requires_grad_(False)
        plan = {
            "norms.*": SequenceParallel(use_local_output=True),
            "ups.*": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "downs.*": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1)),
        }
        parallelize_module(self, mesh, plan)
        table = torch.randn(64, 64)
        self.register_buffer("table", distribute_tensor(table, mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.nn.functional.gelu(up(norm(x))))
        return x @ self.table.to_local()


def other_layouts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for hidden in (33, 1):  # of 1, rank 1 has no row
        torch._dynamo.reset()
        model, twin = Sequence(mesh, hidden), Sequence(mesh, hidden)
        offload(model, min_bytes=128, share=True)
        model.compile(backend="chunkflow", fullgraph=True, options={**EAGER, "min_bytes": 128})
        for step in range(3):
            x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(2 * step + rank))
            assert torch.equal(model(x), twin(x))
        assert streamed(model) > 0
        kinds = [c.kind for p in programs(model) for c in p.program.problem.collectives]
        assert kinds == ["all-gather", "reduce-scatter"] or (hidden == 1 and set(kinds) == {"all-gather"})
        assert isinstance(model.table._local_tensor, HostWeight)
        restore(model)
        same(model, twin)
        assert type(model.table._local_tensor) is torch.Tensor


@needs_inside
def test_uneven_and_replicated_shards_and_other_collectives(on_ranks: Callable[..., None]) -> None:
    on_ranks(other_layouts)


FSDP = r"FSDP itself moves the weights of .* leave out fully_shard"


def under_fsdp(rank: int) -> None:
    twin, x = stack(None), torch.ones(8, 8)
    expected = twin(x)

    def by_fsdp2(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        return model

    def by_fsdp1(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    for wrap in (by_fsdp2, by_fsdp1):
        model = wrap(stack(None))
        for place in (offload, compile):
            with pytest.raises(ChunkflowError, match=FSDP):
                place(model)
        assert torch.allclose(model(x), expected, atol=1e-5)
    torch._dynamo.reset()
    model = by_fsdp2(stack(None))
    with pytest.raises(Exception, match=FSDP):
        torch.compile(model, backend="chunkflow", options=EAGER)(x)
    assert not any(isinstance(t, HostWeight) for t in leaves_of(model)) and not programs(model)
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_a_model_under_fsdp_is_refused(on_ranks: Callable[..., None]) -> None:
    on_ranks(under_fsdp)


def views(rank: int) -> None:
    """Shards that are views of a whole, as where no rank sends them: on rank 1, they begin in the middle."""
    mesh = init_device_mesh("cpu", (2,))
    whole, x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0)), torch.ones(4, 64)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, values in zip("ab", whole.clone(), strict=True):
                shard = DTensor.from_local(values.chunk(2)[rank], mesh, [Shard(0)], run_check=False)
                self.register_parameter(name, nn.Parameter(shard, requires_grad=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.linear(x, self.a.to_local())
            return torch.nn.functional.linear(torch.tanh(x) @ self.a.to_local(), self.b.to_local())

    for share in (True, False):  # with one copy for all ranks, and where they are, at the first call
        torch._dynamo.reset()
        model, twin = Views(), Views()
        assert model.a.storage_offset() == 128 * 64 * rank
        if share:
            offload(model, min_bytes=4096, share=True)
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options=EAGER)
        for _ in range(3):
            assert torch.equal(run(x), twin(x))
        torch._dynamo.reset()  # traced again, where they are now
        assert torch.equal(run(x), twin(x))
        assert all(isinstance(t, HostWeight) for t in leaves_of(model))
        restore(model)
        same(model, twin)
        assert torch.equal(run(x), twin(x))


@needs_inside
def test_shards_that_are_views(on_ranks: Callable[..., None]) -> None:
    on_ranks(views)


@needs_inside
def test_a_dtensor_stands_on_the_device_of_its_shard(one_rank: None) -> None:
    model = stack(init_device_mesh("cpu", (1,)))
    weight: Any = model.blocks[0].up.weight  # type: ignore[union-attr,index]
    shard, spec = weight._local_tensor, weight._spec
    become(shard, HostWeight(shard.clone(), torch.device("meta")))
    align(model)
    assert model.blocks[0].up.weight is weight and isinstance(weight, nn.Parameter)  # type: ignore[union-attr,index]
    assert weight.device.type == "meta" and weight._local_tensor is shard and weight._spec == spec
    become(shard, shard.host)
    align(model)
    assert weight.device.type == "cpu"
    steps(model, stack(init_device_mesh("cpu", (1,))), 1)


def test_before_torch_2_13_shards_stay_on_the_device(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamable, "stream_inside", lambda: False)
    mesh = init_device_mesh("cpu", (1,))
    model, twin = stack(mesh), stack(mesh)
    started(model, "offload", EAGER)
    steps(model, twin)
    (program,) = programs(model)
    kept = {w.name: w.keep for w in program.program.problem.weights if "blocks" in w.name}
    assert set(kept.values()) == {"inside a tensor subclass, which needs torch 2.13 to be streamed"}
    restore(model)
    same(model, twin)


def test_shards_are_not_cast_and_need_values(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = stack(mesh)
    with pytest.raises(ChunkflowError, match=r"blocks.0.up.weight is a DTensor .* call model.to\(torch.bfloat16\)"):
        offload(model, min_bytes=4096, dtype=torch.bfloat16)
    steps(model, stack(mesh), 1)
    with torch.device("meta"):
        empty = stack(None)
    parallelize_module(empty, mesh, {"blocks.*.up": ColwiseParallel()})
    with pytest.raises(ChunkflowError, match="parameters on the meta device"):
        offload(empty)


class Scaled(TwoTensor):
    """A tensor subclass that names a number as one of its tensors."""

    scale = 2

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b", "scale"], None


@pytest.mark.parametrize("deep", [False, True])
def test_a_part_that_is_no_tensor_is_named(deep: bool, no_grad: None) -> None:
    values = torch.randn(64, 64)
    inside = Scaled(values, values.clone())
    model, twin = stack(None), stack(None)
    model.odd = nn.Parameter(TwoTensor(inside, inside) if deep else inside, requires_grad=False)
    name = r"odd\.a\.scale" if deep else r"odd\.scale"
    for place in (offload, compile):
        with pytest.raises(ChunkflowError, match=rf"{name} is of type int, but __tensor_flatten__ names it as"):
            place(model, share=False)
    steps(model, twin, 1)


def test_a_nested_tensor_stays_where_it_is(no_grad: None) -> None:
    model, twin = stack(None), stack(None)
    for layout in (torch.strided, torch.jagged):
        parts = [torch.randn(64, 64), torch.randn(32, 64)]
        model.register_buffer(f"nested_{layout}"[-6:], torch.nested.nested_tensor(parts, layout=layout))
    started(model, "offload", EAGER)
    steps(model, twin)
    assert streamed(model) > 0
    restore(model)
    steps(model, twin, 1)
