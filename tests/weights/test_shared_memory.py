"""Weights that the ranks of a machine share: one copy, proved equal, and private again where a rank writes."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights import limits
from chunkflow_compile.weights.checkpoint import CheckpointReader, FilePart
from chunkflow_compile.weights.home import home_of
from chunkflow_compile.weights.limits import HostMemory
from chunkflow_compile.weights.mapping import whole_pages

SIZE = Size(layers=2)
LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}


def memfds() -> int:
    """Mappings of shared weights in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:chunkflow-weights")


def files() -> Iterator[Path]:
    return (f for f in Path("/proc/self/fd").iterdir() if f.is_symlink())


def shared(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if (home := home_of(p)) and home.shared is not None}


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: home.host.data_ptr() for name, p in model.named_parameters() if (home := home_of(p))}


def large(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.nbytes >= LEAST}


def steps(run: Any, twin: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    with torch.no_grad():
        for step in range(3):
            found = small_inputs("wan", SIZE, seed + step).items()
            inputs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in found}
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0])


def same_model(rank: int) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    names = large(model)
    offload(model, min_bytes=LEAST, share=True)
    assert shared(model) == names and memfds() == 1
    name = "blocks.0.ffn.net.0.proj.weight"
    sizes = [len(pickle.dumps(m.get_parameter(name))) for m in (model, twin)]
    assert sizes[0] == sizes[1], "without the other weights"
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    steps(run, twin)
    (program,) = programs(model)
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 3 > [0] * 3
    # rank 1 writes a weight, and what state_dict gave it: only it sees the first, also through a view from before
    weight = model.blocks[0].ffn.net[0].proj.weight  # type: ignore[union-attr,index]
    view, state = weight[1:], model.state_dict()
    given = state["blocks.1.ffn.net.0.proj.weight"]
    assert torch.equal(given, twin.blocks[1].ffn.net[0].proj.weight)  # type: ignore[union-attr,index]
    if rank == 1:
        with torch.no_grad():
            for m in (model, twin):
                m.blocks[0].ffn.net[0].proj.weight.mul_(2)  # type: ignore[union-attr,index]
            given.zero_()
        assert torch.equal(view, twin.blocks[0].ffn.net[0].proj.weight[1:])  # type: ignore[union-attr,index]
        assert names - shared(model) == {"blocks.0.ffn.net.0.proj.weight"} and not given.any()
    dist.barrier()
    if rank == 0:
        assert shared(model) == names
    steps(run, twin, 7)
    model.load_state_dict(twin.state_dict())
    assert not shared(model)
    steps(run, twin, 11)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    del run, program, view, given, weight, state
    torch._dynamo.reset()
    gc.collect()
    assert memfds() == 0 and not any("chunkflow" in os.readlink(f) for f in files())


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_share_and_write(on_ranks: Callable[..., None], world: int) -> None:
    on_ranks(same_model, world=world)


def a_spoilt_element(rank: int) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    name = "blocks.1.attn1.to_q.weight"
    if rank == 1:
        with torch.no_grad():
            for m in (model, twin):
                m.get_parameter(name)[-1, -1] += 1
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chunkflow_compile").addHandler(handler)
    offload(model, min_bytes=LEAST, share=dist.group.WORLD)
    assert [r for r in records if f"rank 1 has other values than rank 0 in {name}" in r], records
    assert shared(model) == large(twin) - ({name} if rank else set())
    steps(torch.compile(model, backend="chunkflow", options=OPTIONS), twin)
    restore(model)
    assert not shared(model) and torch.equal(model.get_parameter(name), twin.get_parameter(name))


def test_a_spoilt_element_is_named_on_all_ranks(on_ranks: Callable[..., None]) -> None:
    on_ranks(a_spoilt_element)


def sealed(rank: int) -> None:
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    offload(model, min_bytes=LEAST, share=True, device="cpu")
    number = home_of(model[0].weight).shared._descriptor.number  # type: ignore[union-attr,arg-type]
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(number, fcntl.F_GET_SEALS) & wanted == wanted
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(number, size)


def test_no_rank_can_cut_the_memory_of_all(on_ranks: Callable[..., None]) -> None:
    on_ranks(sealed)


def full() -> HostMemory:
    return HostMemory(1 << 30, 5, Path("/sys/fs/cgroup/memory.max"))


def no_room(rank: int) -> None:
    plain = limits.host_memory
    if rank == 0:
        limits.host_memory = full
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    said = r"The weights take \d+ more bytes of host memory, and 5 are free below /sys/fs/cgroup/memory.max"
    with pytest.raises(ChunkflowError, match=said if rank == 0 else f"because rank 0 failed: {said}"):
        offload(model, min_bytes=LEAST, share=True)
    assert not shared(model)
    dist.barrier()
    restore(model)
    limits.host_memory = plain
    # a write, too, takes memory
    offload(model, min_bytes=LEAST, share=True)
    name = min(shared(model))
    limits.host_memory = full
    with pytest.raises(
        ChunkflowError, match=r"cannot be given memory of its own: 5 are free below .*max, and \d+ must"
    ):
        model.get_parameter(name).mul_(2)
    assert name in shared(model)
    limits.host_memory = plain
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_no_room_for_shared_memory(on_ranks: Callable[..., None]) -> None:
    """Said before the kernel kills a rank."""
    on_ranks(no_room)


def other_models(rank: int) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chunkflow_compile").addHandler(handler)
    family = "flux" if rank else "wan"
    model, twin = small_model(family, SIZE), small_model(family, SIZE)
    offload(model, min_bytes=LEAST, share=True)
    assert [
        r for r in records if re.search(rf"rank {rank} shares \d of its \d+ weights: another rank places another", r)
    ]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.long
def test_ranks_that_place_other_models(on_ranks: Callable[..., None]) -> None:
    on_ranks(other_models)


def everywhere(value: int) -> list[int]:
    """The values of all ranks."""
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each weight that this process reads from a checkpoint to place it."""
    plain, sizes = CheckpointReader.read, list[int]()

    def read(self: CheckpointReader, part: FilePart, *args: Any) -> None:
        plain(self, part, *args)
        sizes.append(part.nbytes)

    monkeypatch.setattr(CheckpointReader, "read", read)
    return sizes


def from_one_file(rank: int, folder: str, dtype: torch.dtype | None) -> None:
    model = diffusers.WanTransformer3DModel.from_pretrained(folder)
    twin = diffusers.WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
    names, copy = large(model), sum(p.nbytes for p in model.parameters() if p.nbytes >= LEAST)
    most = max(p.nbytes for p in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        sizes = count_reads(patch)
        offload(model, min_bytes=LEAST, share=True, dtype=dtype)
    read = everywhere(sum(sizes))
    assert sum(read) == copy and abs(read[0] - read[1]) <= 2 * most, "one copy, and each rank reads half of it"
    assert shared(model) == names
    for name, p in twin.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
    dist.barrier()


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.long), torch.bfloat16])
def test_each_rank_reads_a_share_of_the_file(
    on_ranks: Callable[..., None], tmp_path: Path, dtype: torch.dtype | None
) -> None:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    on_ranks(from_one_file, str(tmp_path / "wan"), dtype)


def beside_the_drive(rank: int, folder: str, dtype: torch.dtype) -> None:
    """Half of the weights are shared in host memory, and half are on the drive."""
    model = diffusers.WanTransformer3DModel.from_pretrained(folder)
    twin = diffusers.WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
    budget = sum(p.nbytes for p in twin.parameters() if p.nbytes >= LEAST) // 2
    cast = None if dtype == torch.float32 else dtype
    offload(model, min_bytes=LEAST, share=True, host_memory=budget, dtype=cast)
    homes = {name: home for name, p in model.named_parameters() if (home := home_of(p)) is not None}
    drive, memory = {name for name, home in homes.items() if home.drive is not None}, shared(model)
    assert drive and memory and drive.isdisjoint(memory) and drive | memory == set(homes)
    # buffers are shared too, and each begins at a page
    one, other = homes[min(memory)], homes[min(drive)]
    assert one.shared is not None and other.scratch == (cast is not None)
    placed = [home for home in one.store.homes if home.drive is None]
    assert sum(home.nbytes for home in placed) <= budget
    held = os.fstat(one.shared._descriptor.number).st_size
    assert held == sum(whole_pages(home.nbytes) for home in placed) and memfds() == 1
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    steps(run, twin, dtype=dtype)
    for home in (one, other):
        if rank == 1:
            with torch.no_grad():
                for m in (model, twin):
                    m.get_parameter(home.name).mul_(2)
        dist.barrier()
        steps(run, twin, 5, dtype)
    # what a rank has written is in memory of its own from then on
    assert shared(model) == (memory - {one.name} if rank else memory)
    assert (other.drive is None) == (rank == 1)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_memory_beside_the_drive(on_ranks: Callable[..., None], tmp_path: Path, dtype: torch.dtype) -> None:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    on_ranks(beside_the_drive, str(tmp_path / "wan"), dtype)


def test_share_without_a_group() -> None:
    with pytest.raises(ChunkflowError, match="share needs a process group of several ranks"):
        offload(small_model("wan", SIZE), share=True)
