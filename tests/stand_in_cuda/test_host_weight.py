"""An offloaded weight on a card: it is a CUDA tensor whose values are in host memory."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import InTurn, Stack, fake_ranks
from test_gpu import MIB, OPTIONS, compiled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import stream_inside

from .test_findings import placed, steps


def weights(model: nn.Module) -> list[HostWeight]:
    return [p for p in model.parameters() if isinstance(p, HostWeight)]


def test_it_is_read_and_written_from_host_memory() -> None:
    model, run, twin = placed()
    steps(run, twin)
    before = torch.cuda.memory_allocated()
    for m in (model, twin):
        for name, p in m.named_parameters():
            if name.endswith("up.weight"):
                p.view(-1)[5:9].fill_(0.5)
                p.t().mul_(0.5)
                p.data = p.data + 0.01
                p[1].lerp_(p[0], 0.25)
    found = weights(model)
    assert found and {w.device.type for w in found} == {"cuda"} and {w.host.device.type for w in found} == {"cpu"}
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.cpu(), q.cpu()) and p.sum() == q.sum()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < MIB, "what was fetched is not kept"
    steps(run, twin)
    assert programs(model)[0].plan.moved_bytes > 0


@torch.no_grad()
def test_a_packed_weight_is_read_and_written_from_host_memory() -> None:
    """By eager ops, moved to the host and back without memory, exchanged, and restored to the card."""
    model, twin = (Stack(width=256).to("cuda", torch.bfloat16).requires_grad_(False) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    offload(model, pack=True, min_bytes=MIB // 8)
    for step in range(3):
        for m in (model, twin):
            for p in m.parameters():
                if p.dim() == 2:
                    p.view(-1)[5:9].fill_(0.5)
                    p.t().mul_(0.5)
                    p.data *= 1.25
                    p[1].lerp_(p[0], 0.25)
            m._apply(lambda t: t.cpu().cuda())
        found = [buffer for w in weights(model) if (buffer := buffer_of(w)) is not None]
        assert found and all(b.compressed and b.nbytes < 0.77 * b.host.nbytes for b in found)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q) and torch.equal(p.cpu(), q.cpu()) and p.sum() == q.sum(), step
        x = torch.randn(16, 8, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(model(x), twin(x))
    assert all(torch.equal(v, twin.state_dict()[n].cpu()) for n, v in model.state_dict().items())
    weight = weights(model)[0]
    weight.copy_(torch.exp(30 * torch.randn_like(weight.cpu(), dtype=torch.float32)))
    assert not weight.buffer.compressed and all(w.buffer.compressed for w in weights(model)[1:])
    values = [p.cpu() for p in model.parameters()]
    restore(model)
    for p, value in zip(model.parameters(), values, strict=True):
        assert p.device.type == "cuda" and not isinstance(p, HostWeight) and torch.equal(p.cpu(), value)


def test_what_apply_makes_of_a_copy_on_the_host_is_its_value() -> None:
    """To the host and back without a copy of the memory; what is written on the way is the copy alone."""
    model, run, twin = placed()
    steps(run, twin)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.cpu()
        tensor.mul_(0.5)
        return copy.to(tensor.device)

    def dropped(tensor: torch.Tensor) -> torch.Tensor:
        tensor.cpu().view(-1).zero_()
        return tensor.mul_(0.5)

    hosts = [w.host.data_ptr() for w in weights(model)]
    for m in (model, twin):
        m._apply(lambda t: t.cpu().cuda())
    assert [w.host.data_ptr() for w in weights(model)] == hosts
    for function in (copied, dropped, lambda t: t.cpu().mul(2).cuda(), lambda t: t.half().float()):
        for m in (model, twin):
            m._apply(function)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.device == q.device and torch.equal(p, q)
        steps(run, twin)
    assert programs(model)[0].plan.moved_bytes > 0


def test_an_eager_call_takes_one_weight_at_a_time() -> None:
    model, _, twin = placed(6, width=512)
    most, total = max(w.nbytes for w in weights(model)), sum(w.nbytes for w in weights(model))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.warns(UserWarning, match="runs outside its compiled form"):
        steps(model, twin, 2)
    assert torch.cuda.max_memory_allocated() - before < 2 * most + MIB < total


def test_a_model_goes_to_the_cpu_and_comes_back() -> None:
    """As enable_model_cpu_offload moves it: the arena is freed, the weights stay where they are, nothing is compiled."""
    model, run, twin = placed()
    steps(run, twin)
    held = {id(w): w.host.data_ptr() for w in weights(model)}
    compilations = len(programs(model))
    model.to("cpu")
    assert {p.device.type for p in model.parameters()} == {"cpu"} and programs(model) == ()
    x = torch.randn(16, 8)
    assert torch.equal(model(x), copy.deepcopy(twin).cpu()(x))
    model.to("cuda")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    steps(run, twin)
    assert {id(w): w.host.data_ptr() for w in weights(model)} == held and len(programs(model)) == compilations
    restore(model)
    assert placement_of(model) is None
    steps(model, twin, 1)


def test_a_model_changes_its_type_without_the_card() -> None:
    model, run, twin = placed()
    steps(run, twin)
    before = torch.cuda.memory_allocated()
    model.to(torch.float64)
    assert torch.cuda.memory_allocated() - before < MIB / 4, "the small weights alone"
    twin.to(torch.float64)
    for _ in range(3):
        x = torch.randn(16, 8, device="cuda", dtype=torch.float64)
        assert torch.equal(run(x), twin(x))
    assert all(w.dtype == torch.float64 for w in weights(model))


@pytest.mark.skipif(not stream_inside(), reason="needs torch 2.13")
def test_quantised_weights_stream_to_the_card() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = InTurn(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(6)).eval().requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    twin = copy.deepcopy(model).to("cuda")
    offload(model, "cuda", min_bytes=4096)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "group_bytes": 1})
    for _ in range(3):
        x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(run(x), twin(x))
    (program,) = programs(model)
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 3
    assert program.plan.moved_bytes >= 0.95 * 6 * 256 * 256
    restore(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.equal(model.to("cuda")(x), twin(x))


@pytest.mark.skipif(not stream_inside(), reason="needs torch 2.13")
def test_the_shards_of_a_rank_stream_to_the_card() -> None:
    """One rank of two: collectives of the fake group return at once, with what the tensors had."""
    with fake_ranks():
        mesh, plan = init_device_mesh("cuda", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        torch.manual_seed(0)
        model = Stack(4, width=256).eval().requires_grad_(False).to("cuda")
        twin = copy.deepcopy(model)
        for block in (*model.blocks, *twin.blocks):
            parallelize_module(block, mesh, plan, src_data_rank=None)
        offload(model, min_bytes=4096)
        shards = [p._local_tensor for p in model.blocks.parameters()]
        assert all(isinstance(shard, HostWeight) and shard.host.device.type == "cpu" for shard in shards)
        assert {t.device.type for t in (*shards, *model.parameters())} == {"cuda"}
        run = compiled(model)
        steps(run, twin)
        for m in (model, twin):
            m.blocks[0].up.weight.mul_(2)
        steps(run, twin)
        (program,) = programs(model)
        assert {m.moved_bytes for m in program.measurements} == {program.plan.moved_bytes}
        assert program.plan.moved_bytes >= sum(shard.nbytes for shard in shards)
        restore(model)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert type(p) is type(q) and p.device == q.device
            assert torch.equal(*(t._local_tensor if isinstance(t, DTensor) else t for t in (p, q)))
