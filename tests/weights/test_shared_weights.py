"""Weights that the ranks of a machine share: one copy, in host memory or in a file, proved equal, private where written."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import OPTIONS as SLOW
from helpers import Stack, in_memory, load_stack, save_stack, twins
from test_drive import LEAST, OPTIONS, SIZE, buffers, counted_reads, planned_reads, same, steps
from test_killed_ranks import without_name
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, offload, programs, restore
from chunkflow_compile.catalog.small import small_model
from chunkflow_compile.weights.backing import Backing, Where
from chunkflow_compile.weights.bytes import flat_bytes
from chunkflow_compile.weights.checkpoint import CheckpointReader
from chunkflow_compile.weights.drive import Scratch
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.mapping import whole_pages
from chunkflow_compile.weights.sharing import SharedPages
from chunkflow_compile.weights.source import DriveBytes

BF16 = torch.bfloat16
PLACES = ["in host memory", "on the drive"]
# A scratch file is for weights that are cast: those that are not stay in their checkpoint.
PLACED: dict[str, dict[str, Any]] = {PLACES[0]: {}, PLACES[1]: {"host_memory": 0, "dtype": BF16}}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return save_stack(tmp_path)


def pair(file: str, where: str) -> tuple[nn.Module, nn.Module]:
    """A model, and one that has the type in which the other is placed."""
    return load_stack(file), in_memory(load_stack(file, PLACED[where].get("dtype")))


def memfds() -> int:
    """Mappings of shared weights in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:chunkflow-weights")


def shared(model: nn.Module) -> set[str]:
    return {name for name, buffer in buffers(model).items() if buffer.backing.where is Where.SHARED}


def large(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.nbytes >= LEAST}


def in_scratch(model: nn.Module) -> dict[str, HostBuffer]:
    return {name: buffer for name, buffer in buffers(model).items() if buffer.backing.in_scratch_file}


def file_of(buffer: HostBuffer) -> tuple[int, int]:
    assert buffer.source.file
    told = os.fstat(buffer.backing.bytes.file.descriptor.number)
    return told.st_dev, told.st_ino


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def said_here() -> list[str]:
    """What this rank logs from now on."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chunkflow_compile").addHandler(handler)
    return records


# Each writes a weight: a model, a name.  The last one writes a copy, unless the weight is on the drive.
WRITES: tuple[Callable[[nn.Module, str], Any], ...] = (
    lambda m, name: m.get_parameter(name)[:1].mul_(2),
    lambda m, name: m.get_parameter(name).data.add_(1),
    lambda m, name: m.load_state_dict({name: torch.full_like(m.get_parameter(name), 0.01)}, strict=False),
    lambda m, name: m.state_dict()[name].add_(1),
)


def in_one_file(model: nn.Module, world: int) -> set[str]:
    """The weights that lie in a file of all ranks."""
    found = in_scratch(model)
    (file,) = {buffer.backing.bytes.file for buffer in found.values() if buffer.source.file}
    ((device, inode),) = {file_of(buffer) for buffer in found.values()}
    assert everywhere((device, inode)) == [(device, inode)] * world, "one file a machine"
    placed = [buffer for buffer in next(iter(found.values())).store.buffers if buffer.backing.in_scratch_file]
    assert len(placed) > len(found), "with buffers"
    assert os.fstat(file.descriptor.number).st_size == sum(whole_pages(buffer.nbytes) for buffer in placed)
    return {*found}


def moves_what_is_planned(model: nn.Module, run: Any, twin: nn.Module, where: str) -> None:
    (program,) = programs(model)
    copies = program.arena.streams.copy
    copies.synchronize()
    with counted_reads() as taken:
        taken.append(0)
        steps(run, twin, 3)
        copies.synchronize()
    on_drive = where == PLACES[1]
    assert taken == [3 * planned_reads(program.plan, [*buffers(model).values()]) if on_drive else 0]
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 6 > [0] * 6


def same_model(rank: int, file: str, where: str, world: int) -> None:
    before = without_name()
    model, twin = pair(file, where)
    names, on_drive = large(model), where == PLACES[1]
    offload(model, min_bytes=LEAST, share=True, **PLACED[where])
    if on_drive:
        assert {name for name, buffer in buffers(model).items() if buffer.source.file} == names
        assert in_one_file(model, world) == names
        first = buffers(model)[min(names)].backing.bytes
    else:
        assert shared(model) == names and memfds() == 1
        assert len({len(pickle.dumps(m.get_parameter(min(names)))) for m in (model, twin)}) == 1, "without the others"
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    steps(run, twin)
    moves_what_is_planned(model, run, twin, where)

    # A rank writes: only it sees that, also through a view from before, and has a copy of its own from then on.
    ways = WRITES if on_drive else WRITES[:-1]
    left, mine, homes_before = iter(sorted(names)), set[str](), buffers(model)
    for writer in (1, 0):
        written = [next(left) for _ in ways]
        values = [homes_before[name].host.clone() for name in written]
        views = [(m.get_parameter(written[0])[1:], m.get_parameter(written[0])[:1]) for m in (model, twin)]
        dist.barrier()
        if rank == writer:
            mine.update(written)
            for m in (model, twin):
                for write, name in zip(ways, written, strict=True):
                    write(m, name)
        dist.barrier()
        if rank != writer:
            assert all(torch.equal(model.get_parameter(n), v) for n, v in zip(written, values, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(*views, strict=True))
        if on_drive:
            private = {
                n
                for n, buffer in buffers(model).items()
                if not buffer.source.file or buffer.backing.bytes.file is not first.file
            }
        else:
            private = names - shared(model)
        assert private == mine
        steps(run, twin, 7)
    if not on_drive:
        given = model.state_dict()[max(names)]
        assert torch.equal(given, twin.get_parameter(max(names)))
        given.zero_()
        assert max(names) in shared(model) and torch.equal(
            model.get_parameter(max(names)), twin.get_parameter(max(names))
        )
        model.load_state_dict(twin.state_dict())
        assert not shared(model)
        steps(run, twin, 11)
    restore(model)
    assert same(model, twin)
    first = given = None
    del run, homes_before, views
    torch._dynamo.reset()
    gc.collect()
    assert memfds() == 0
    assert without_name() == before, "no ordinary tensor keeps the file"


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_share_and_write(on_ranks: Callable[..., None], saved: str, where: str, world: int) -> None:
    on_ranks(same_model, saved, where, world, world=world, fresh=True)


def in_a_cycle(rank: int, file: str) -> None:
    """A cycle has the sources of its copies from its first call on."""
    model, twin = pair(file, PLACES[1])
    offload(model, min_bytes=LEAST, share=True, **PLACED[PLACES[1]])
    run = chunkflow_compile.compile(model, **{**SLOW, "lowering": "eager"})
    for _ in range(4):
        steps(run, twin)
    assert cycles(model)
    for factor in (2, 3):
        if rank == 1:
            for m in (model, twin):
                m.get_parameter("blocks.1.up.weight").mul_(factor)
        dist.barrier()
        steps(run, twin, factor)


def test_a_cycle_reads_what_its_rank_has_written(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(in_a_cycle, saved)


def slow_leader(patch: pytest.MonkeyPatch) -> None:
    """The leader writes late, and each rank looks at once at what it gets."""
    write, backing = Scratch.write, SharedPages.backing

    def late(self: Scratch, *args: Any) -> None:
        time.sleep(0.02)
        write(self, *args)

    def there(self: SharedPages, name: str) -> Backing:
        placed = backing(self, name)
        assert placed.bytes is None or torch.equal(placed.bytes.read_all(), flat_bytes(placed.host))
        return placed

    patch.setattr(Scratch, "write", late)
    patch.setattr(SharedPages, "backing", there)


def differs(rank: int, file: str, where: str) -> None:
    """In one element; and what one rank has written and not changed is compared with what another read."""
    model, twin = pair(file, where)
    placed, names = large(model), ["blocks.0.up.weight", "blocks.1.up.weight"]
    if rank == 1:
        for m in (model, twin):
            m.get_parameter(names[0])[-1, -1] += 1
        model.get_parameter(names[1]).add_(0)  # equal, but no part of the file
    records = said_here()
    with pytest.MonkeyPatch.context() as patch:
        slow_leader(patch)
        offload(model, min_bytes=LEAST, share=dist.group.WORLD, **PLACED[where])
    assert [r for r in records if "other values" in r] == [
        f"rank 1 has other values than rank 0 in {names[0]}, and keeps its own copy of them"
    ]
    if where == PLACES[1]:
        mine, theirs = everywhere({name: file_of(buffer) for name, buffer in in_scratch(model).items()})
        assert mine.keys() == placed and {n for n in mine if mine[n] != theirs[n]} == {names[0]}
    else:
        assert shared(model) == placed - ({names[0]} if rank else set())
    steps(torch.compile(model, backend="chunkflow", options=OPTIONS), twin)
    restore(model)
    assert not shared(model) and same(model, twin)


@pytest.mark.parametrize("where", PLACES)
def test_a_weight_that_differs_is_named_and_private(on_ranks: Callable[..., None], saved: str, where: str) -> None:
    on_ranks(differs, saved, where)


def other_models(rank: int) -> None:
    records = said_here()
    model, twin = twins(lambda: Stack(layers=3, width=64) if rank else Stack())
    offload(model, min_bytes=LEAST, share=True)
    assert [
        r for r in records if re.search(rf"rank {rank} shares \d of its \d+ weights: another rank places another", r)
    ]
    assert same(model, twin)


def test_ranks_that_place_other_models(on_ranks: Callable[..., None]) -> None:
    on_ranks(other_models)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each weight that this process reads from a checkpoint to place it."""
    plain, sizes = CheckpointReader.read, list[int]()

    def read(self: CheckpointReader, part: DriveBytes, *args: Any) -> None:
        plain(self, part, *args)
        sizes.append(part.nbytes)

    monkeypatch.setattr(CheckpointReader, "read", read)
    return sizes


def from_one_file(rank: int, file: str) -> None:
    model, twin = load_stack(file), load_stack(file, BF16)
    names, sizes = large(model), [t.nbytes for t in (*model.parameters(), *model.buffers()) if t.nbytes >= LEAST]
    with pytest.MonkeyPatch.context() as patch:
        mine = count_reads(patch)
        offload(model, min_bytes=LEAST, share=True, dtype=BF16)
    read = everywhere(sum(mine))
    assert sum(read) == sum(sizes) and abs(read[0] - read[1]) <= 2 * max(sizes), (
        "one copy, and each rank reads half of it"
    )
    assert shared(model) == names
    assert same(model, twin)
    dist.barrier()


def test_each_rank_reads_a_share_of_the_file(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(from_one_file, saved)


def beside_the_drive(rank: int, file: str, dtype: torch.dtype | None) -> None:
    """Half of the weights are shared in host memory, and half are on the drive."""
    model, twin = load_stack(file), in_memory(load_stack(file, dtype))
    budget = sum(p.nbytes for p in twin.parameters() if p.nbytes >= LEAST) // 2
    offload(model, min_bytes=LEAST, share=True, host_memory=budget, dtype=dtype)
    found = buffers(model)
    drive, memory = {name for name, buffer in found.items() if buffer.source.file}, shared(model)
    assert drive and memory and drive.isdisjoint(memory) and drive | memory == set(found)
    # buffers are shared too, and each begins at a page
    one, other = found[min(memory)], found[min(drive)]
    assert one.backing.where is Where.SHARED and other.backing.in_scratch_file == (dtype is not None)
    placed = [buffer for buffer in one.store.buffers if not buffer.source.file]
    assert sum(buffer.nbytes for buffer in placed) <= budget
    held = os.fstat(one.backing._descriptor.number).st_size
    assert held == sum(whole_pages(buffer.nbytes) for buffer in placed) and memfds() == 1
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    steps(run, twin)
    for buffer in (one, other):
        if rank == 1:
            for m in (model, twin):
                m.get_parameter(buffer.name).mul_(2)
        dist.barrier()
        steps(run, twin, 5)
    # what a rank has written is in memory of its own from then on
    assert shared(model) == (memory - {one.name} if rank else memory)
    assert (not other.source.file) == (rank == 1)
    restore(model)
    assert same(model, twin)


@pytest.mark.parametrize("dtype", [None, BF16])
def test_shared_memory_beside_the_drive(on_ranks: Callable[..., None], saved: str, dtype: torch.dtype | None) -> None:
    on_ranks(beside_the_drive, saved, dtype, fresh=True)


def test_share_without_a_group() -> None:
    with pytest.raises(ChunkflowError, match="share needs a process group of several ranks"):
        offload(small_model("wan", SIZE), share=True)
