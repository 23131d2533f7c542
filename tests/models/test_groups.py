"""Groups of ranks beside each other, on four gloo ranks: CFG parallel x Ulysses, and groups that have nothing in common; and
what two ranks cannot split evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import EAGER
from helpers import check_small, small_twins
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.leaves import stream_inside

WAN = Size(layers=3)
LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}
STEPS = 3


class Joined(nn.Module):
    """A model and the collective that joins both branches of guidance, as one program."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model, self.group = model, group

    def forward(self, **inputs: Any) -> torch.Tensor:
        return funcol.all_gather_tensor(self.model(**inputs)[0], 0, self.group)


def everywhere(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def has_one_copy(model: nn.Module) -> None:
    """All large weights lie in one file, which all ranks map."""
    assert all((h := buffer_of(p)) and h.backing.where is Where.SHARED for p in model.parameters() if p.nbytes >= LEAST)
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {tuple(line.split()[3:5]) for line in maps if "memfd:chunkflow-weights" in line}
    assert len(files) == 1 and everywhere(files) == [files] * dist.get_world_size()


def guided(rank: int) -> None:
    """A denoising loop with guidance, a branch on each Ulysses group, beside one rank with both in a batch."""
    mesh, size = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cfg", "ulysses")), Size(layers=1)
    branch = mesh.get_local_rank("cfg")
    model, alone = small_model("wan", size), small_model("wan", size)
    enable_ulysses(model, group=mesh["ulysses"])
    offload(model, min_bytes=LEAST, share=True)
    has_one_copy(model)
    whole = Joined(model, mesh["cfg"].get_group())
    run = torch.compile(whole, backend="chunkflow", fullgraph=True, options=OPTIONS)
    latents = None
    for step in range(STEPS):
        inputs = small_inputs("wan", replace(size, batch=2), step)
        if latents is not None:
            inputs["hidden_states"] = latents.repeat_interleave(2, 0)
        mine = {k: v[branch : branch + 1] if torch.is_tensor(v) and len(v) == 2 else v for k, v in inputs.items()}
        got = run(**mine)
        torch.testing.assert_close(got, alone(**inputs)[0], atol=2e-5, rtol=1e-4)
        without, given = got.chunk(2)
        assert not torch.equal(without, given)
        latents = inputs["hidden_states"][:1] - 0.1 * (without + 3 * (given - without))
    (program,) = programs(model)
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * STEPS > [0] * STEPS
    assert program.plan.moved_bytes > program.program.problem.total_bytes / 2
    restore(model)
    torch._dynamo.reset()


def refused(rank: int) -> None:
    """On one rank, while the others do not call: it waits for none of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cfg", "ulysses"))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank == 3:
        model = small_model("wan", WAN)
        for degree, group, said in (
            (3, None, "groups of 3, and 3 does not divide 4, the number of ranks"),
            (0, None, "a degree is a number of ranks, 1 or more, and not 0"),
            (None, None, "needs a degree"),
            (2, pairs[0], "no process group that rank 3 is in"),
            (4, pairs[1], "the degree is 4, and the group has 2 ranks"),
            (2, DeviceMesh("cpu", [0, 1], _init_backend=False), "rank 3 is not in the group of ranks 0, 1"),
            (None, grid, "log-sum-exp, which the native attention of diffusers does not return"),
            (2, mesh, r"one dimension of a DeviceMesh, .*: pass mesh\['cfg'\] or mesh\['ulysses'\]"),
        ):
            with pytest.raises(ChunkflowError, match=said):
                enable_ulysses(model, degree, group=group)
        assert enable_ulysses(model, 1) is model and model._parallel_config is None
        with pytest.raises(ChunkflowError, match="diffusers does not say how a Linear is split"):
            enable_ulysses(nn.Linear(2, 2), 2)
        enable_ulysses(model, group=pairs[1])
        with pytest.raises(ChunkflowError, match="This WanTransformer3DModel is split over ranks already"):
            enable_ulysses(model, 2)
    dist.barrier()


def apart(rank: int) -> None:
    """The groups run other models and skip other blocks."""
    second = rank > 1
    size = Size(layers=3, head_dim=8) if second else Size(layers=3)
    model, twin = small_twins("wan", size, 2)
    if not second:
        enable_ulysses(small_model("wan", size), 2)  # the other group has no third model
    offload(model, min_bytes=LEAST)
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    for seed, kept in enumerate(((0, 1, 2), (0, 1) if second else (0, 2))):
        for m in (model, twin):
            m.blocks = nn.ModuleList(m.blocks[i] for i in kept)  # type: ignore[index]
        check_small(model, twin, "wan", size, [10 * seed + rank // 2])
    assert sum(m.moved_bytes for p in programs(model) for m in p.measurements) > 0
    dist.barrier()


def on_rank(rank: int) -> None:
    refused(rank)
    guided(rank)
    apart(rank)


@pytest.mark.long
def test_four_ranks_as_two_groups(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_rank, world=4)


def with_its_sum(ctx: Any, q: Any, k: Any, v: Any, *others: Any, **_: Any) -> Any:
    """An attention for a CPU that returns its log-sum-exp, which a ring needs; those of diffusers are for GPUs."""
    heads_first = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first)
    out, lse = out.permute(0, 2, 1, 3), lse.permute(0, 2, 1)
    return (out, lse) if others[5] else out  # return_lse


def streams(model: nn.Module, twin: nn.Module, alone: nn.Module | None = None, share: Any = True) -> Any:
    """Check steps of a model that is offloaded and compiled, and the bytes that they move; returns its program."""
    offload(model, min_bytes=LEAST, share=share)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    for step in range(STEPS):
        inputs = small_inputs("wan", WAN, step)
        got = run(**inputs)[0]
        assert torch.equal(got, twin(**inputs)[0])
        if alone is not None:
            torch.testing.assert_close(got, alone(**inputs)[0], atol=2e-5, rtol=1e-4)
    (program,) = programs(model)
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * STEPS > [0] * STEPS
    return program


def ring(rank: int) -> None:
    from diffusers.models import attention_dispatch

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    model, twin, alone = (small_model("wan", WAN) for _ in range(3))
    for m in (model, twin):
        for module in m.modules():
            if hasattr(getattr(module, "processor", None), "_attention_backend"):
                module.processor._attention_backend = "_native_flash"
        enable_ulysses(m, group=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_dispatch, "_native_flash_attention_forward_op", with_its_sum)
        program = streams(model, twin, alone)
    assert {c.kind for c in program.program.problem.collectives} == {"all-to-all", "all-gather"}


def with_tensor_parallelism(rank: int) -> None:
    """Ulysses groups of ranks with the same shards, which they share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "tensor"))
    model, twin = small_twins("wan", WAN)
    plan = {"ffn.net.0.proj": ColwiseParallel(), "ffn.net.2": RowwiseParallel()}
    for m in (model, twin):
        for block in m.blocks:  # type: ignore[union-attr]
            parallelize_module(block, mesh["tensor"], plan)  # type: ignore[arg-type]
        enable_ulysses(m, group=mesh["ulysses"])
    program = streams(model, twin, share=mesh["ulysses"].get_group()).program
    assert {n.target for n in program.module.graph.nodes if "all_reduce" in str(n.target)}
    assert group_names(program.module.graph) == {mesh[n].get_group().group_name for n in ("ulysses", "tensor")}


@pytest.mark.long
@pytest.mark.parametrize("work", [ring, with_tensor_parallelism])
def test_other_groups(work: Callable[[int], None], on_ranks: Callable[..., None]) -> None:
    if work is with_tensor_parallelism and not stream_inside():
        pytest.skip("needs torch 2.13")
    on_ranks(work, world=4)


def uneven_on_a_rank(rank: int, fullgraph: bool, error: type[Exception], says: str) -> None:
    """The assertion of diffusers, and then the next even call."""
    size = Size(layers=1, singles=1, frames=1, height=6, width=10)  # 15 tokens of an image
    even = replace(size, height=8)
    model, twin = small_twins("wan", size, 2)
    run = torch.compile(model, backend="chunkflow", fullgraph=fullgraph, options=EAGER)
    with torch.no_grad():
        check_small(run, twin, "wan", even, [0])
        with pytest.raises(error, match=says):
            run(**small_inputs("wan", size, 0))
        check_small(run, twin, "wan", even, [1])
    assert programs(model)[0].measurements[-1].moved_bytes > 0
    said = r"the 3 heads of blocks\.0\.attn1 .* cannot be split so: .* degree of 1, 3"
    with pytest.raises(ChunkflowError, match=said):
        enable_ulysses(small_model("wan", Size(layers=1, heads=3)), 2)


@pytest.mark.parametrize(
    ("fullgraph", "error", "says"),
    [
        (True, Unsupported, "Assertion failed"),
        pytest.param(False, AssertionError, "must be divisible by mesh size", marks=pytest.mark.long),
    ],
)
def test_what_the_degree_does_not_divide(
    fullgraph: bool, error: type[Exception], says: str, on_ranks: Callable[..., None]
) -> None:
    on_ranks(uneven_on_a_rank, fullgraph, error, says)
