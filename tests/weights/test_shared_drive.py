"""Weights on the drive in one scratch file that ranks share: written once, proved equal, and private where a rank writes."""

from __future__ import annotations

import errno
import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from conftest import OPTIONS as SLOW
from test_drive import counted_reads, homes, planned_reads, read_so_far
from test_killed_ranks import without_name
from test_shared_memory import LEAST, OPTIONS, SIZE, large, steps
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, courses, offload, programs, restore
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights import drive
from chunkflow_compile.weights.bytes import flat_bytes
from chunkflow_compile.weights.drive import Scratch
from chunkflow_compile.weights.home import Home
from chunkflow_compile.weights.mapping import whole_pages
from chunkflow_compile.weights.sharing import SharedPages
from chunkflow_compile.weights.source import DriveBytes

BF16 = torch.bfloat16


@pytest.fixture
def saved(tmp_path: Path) -> str:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    return str(tmp_path / "wan")


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def pair(folder: str) -> tuple[nn.Module, nn.Module]:
    """A model in float32, and one cast to bfloat16 by diffusers."""
    kind = diffusers.WanTransformer3DModel
    return kind.from_pretrained(folder), kind.from_pretrained(folder, torch_dtype=BF16)


def file_of(home: Home) -> tuple[int, int]:
    assert home.drive is not None
    told = os.fstat(home.drive.file.descriptor.number)
    return told.st_dev, told.st_ino


def in_scratch(model: nn.Module) -> dict[str, Home]:
    return {name: home for name, home in homes(model).items() if home.scratch}


def one_file(rank: int, folder: str) -> None:
    before = without_name()
    model, twin = pair(folder)
    names = large(model)
    offload(model, min_bytes=LEAST, share=True, host_memory=0, dtype=BF16)
    assert {name for name, home in homes(model).items() if home.drive is not None} == names
    found = in_scratch(model)  # the others are in float32 in the model too, and stay in its checkpoint
    (file,) = {home.drive.file for home in found.values() if home.drive is not None}
    ((device, inode),) = {file_of(home) for home in found.values()}
    assert everywhere((device, inode)) == [(device, inode)] * 2, "one file a machine"
    placed = [home for home in next(iter(found.values())).store.homes if home.scratch]  # with buffers
    assert os.fstat(file.descriptor.number).st_size == sum(whole_pages(home.nbytes) for home in placed)

    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    steps(run, twin, dtype=BF16)
    (program,) = programs(model)
    copies = program.arena.streams.copy
    copies.synchronize()
    with counted_reads() as taken:
        taken.append(0)
        steps(run, twin, 3, BF16)
        copies.synchronize()
    assert taken == [3 * planned_reads(program.plan, [*homes(model).values()])]

    # one rank writes a part of a weight, what state_dict gave it, a weight's data, and all of another: only it sees them
    names, mine = iter(sorted(found)), set[str]()
    for writer in (1, 0):
        written = [next(names) for _ in range(4)]
        before_it = [found[name].drive.read_all() for name in written]  # type: ignore[union-attr]
        dist.barrier()
        if rank == writer:
            mine.update(written)
            for m in (model, twin):
                m.get_parameter(written[0])[:1].mul_(2)
                m.state_dict()[written[1]].add_(1)
                m.get_parameter(written[2]).data += 1
                m.load_state_dict({written[3]: torch.full_like(twin.get_parameter(written[3]), 0.01)}, strict=False)
        dist.barrier()
        if rank != writer:
            after_it = [found[name].drive.read_all() for name in written]  # type: ignore[union-attr]
            assert all(torch.equal(a, b) for a, b in zip(before_it, after_it, strict=True))
        private = {name for name, home in found.items() if home.drive is None or home.drive.file is not file}
        assert private == mine
        steps(run, twin, 5, BF16)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    del file, placed, run, program, copies, found, before_it
    torch._dynamo.reset()
    gc.collect()
    assert without_name() == before, "no ordinary tensor keeps the file"


def test_one_scratch_file_for_all_ranks(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(one_file, saved)


def in_a_course(rank: int, folder: str) -> None:
    """A course has the sources of its copies from its first call on."""
    model, twin = pair(folder)
    offload(model, min_bytes=LEAST, share=True, host_memory=0, dtype=BF16)
    run = chunkflow_compile.compile(model, **{**SLOW, "lowering": "eager"})
    for _ in range(4):
        steps(run, twin, dtype=BF16)
        programs(model)[0].arena.courses.settle()  # type: ignore[union-attr]
    assert courses(model)
    name = "blocks.1.ffn.net.0.proj.weight"
    for factor in (2, 3):
        if rank == 1:
            for m in (model, twin):
                m.get_parameter(name).mul_(factor)
        dist.barrier()
        steps(run, twin, factor, BF16)


@pytest.mark.long
def test_a_course_reads_what_its_rank_has_written(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(in_a_course, saved)


# Larger than what the kernel reads ahead at the end of a file.
SEVERAL_MIB = Size(layers=4, heads=8, head_dim=32, text=64)


def out_of_the_page_cache(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_the_disk() -> int:
    """Bytes that this process has caused to be read from a disk."""
    return int(next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_bytes")).split()[1])


def read_once(rank: int, folder: str) -> None:
    (file,) = Path(folder).glob("*.safetensors")
    size, inputs = file.stat().st_size, small_inputs("wan", SEVERAL_MIB, 0)
    for turns in (None, False, True):  # the first round imports and compiles
        gc.collect()  # what is mapped stays in the page cache
        read = 0
        for now in range(2 if turns else 1):
            dist.barrier()
            if rank == 0:
                out_of_the_page_cache(file)
            dist.barrier()
            before = from_the_disk()
            if now == 0:
                model = diffusers.WanTransformer3DModel.from_pretrained(folder)
                offload(model, min_bytes=LEAST, share=True, host_memory=0)
                run = torch.compile(model, backend="chunkflow", options={**OPTIONS, "chunk_bytes": 1 << 20})
            if not turns or rank == now:
                for _ in range(3):
                    run(**inputs)
                programs(model)[-1].arena.streams.copy.synchronize()
            read += from_the_disk() - before
        assert all(each > 2 * size for each in everywhere(read_so_far(model))), "each rank reads all of it in each step"
        found = sum(everywhere(read)) / size
        assert turns is None or (1.5 if turns else 0.98) < found < (2.05 if turns else 1.02), found
        restore(model)
        del model, run
        torch._dynamo.reset()


@pytest.mark.long
def test_ranks_read_each_byte_of_the_drive_once(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    """The page cache is what they have in common: with nothing in it for each of them, the drive reads twice."""
    small_model("wan", SEVERAL_MIB).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    (file,) = (tmp_path / "wan").glob("*.safetensors")
    out_of_the_page_cache(file)
    before = from_the_disk()
    if len(file.read_bytes()) > from_the_disk() - before:
        pytest.skip("the folder for temporary files is on no disk")
    on_ranks(read_once, str(tmp_path / "wan"))


def slow_leader(patch: pytest.MonkeyPatch) -> None:
    """The leader writes late, and each rank looks at once at what it gets."""
    write, kept = Scratch.write, SharedPages.kept

    def late(self: Scratch, *args: Any) -> None:
        time.sleep(0.02)
        write(self, *args)

    def there(self: SharedPages, name: str) -> tuple[torch.Tensor, DriveBytes]:
        host, found = kept(self, name)
        assert torch.equal(found.read_all(), flat_bytes(host))
        return host, found

    patch.setattr(Scratch, "write", late)
    patch.setattr(SharedPages, "kept", there)


def differs(rank: int, folder: str) -> None:
    """In one weight; and what one rank has cast is compared with what another read."""
    model, twin = pair(folder)
    names = [f"blocks.{i}.attn1.to_q.weight" for i in range(2)]
    if rank == 1:
        for m in (model, twin):
            m.get_parameter(names[0])[-1, -1] += 1
        model.get_parameter(names[1]).add_(0)  # equal, but no part of the file
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chunkflow_compile").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        slow_leader(patch)
        offload(model, min_bytes=LEAST, share=True, host_memory=0, dtype=BF16)
    assert [r for r in records if "other values" in r] == [
        f"rank 1 has other values than rank 0 in {names[0]}, and keeps its own copy of them"
    ]
    found = in_scratch(model)
    mine, theirs = everywhere({name: file_of(home) for name, home in found.items()})
    assert {name for name in mine if mine[name] != theirs[name]} == {names[0]}
    steps(torch.compile(model, backend="chunkflow", options=OPTIONS), twin, dtype=BF16)


def test_a_weight_that_differs_is_named_and_private(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(differs, saved)


def no_room(rank: int, folder: str) -> None:
    before = without_name()
    plain, left = os.pwritev, [3]

    def full(*args: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args)

    model, twin = pair(folder)[0], pair(folder)[0]
    free = sum(p.nbytes for p in model.parameters()) // 8  # for each weight, and not for all of them
    cases = {
        r"/dev/shm: it is in memory itself \(tmpfs\)": (tempfile, "tempdir", "/dev/shm"),
        f"{tempfile.gettempdir()}: {free} bytes are free": (
            drive.shutil,
            "disk_usage",
            lambda _: type("", (), {"free": free}),
        ),
        f"{tempfile.gettempdir()}: No space left on device": (os, "pwritev", full),
    }
    for said, change in cases.items():
        told = f"There is no room for a scratch file in {said}"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(*change)
            with pytest.raises(ChunkflowError, match=told if rank == 0 else f"because rank 0 failed: {told}"):
                offload(model, min_bytes=LEAST, share=True, host_memory=0, dtype=BF16)
        assert all(
            torch.equal(a.to(BF16), b.to(BF16)) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )
        gc.collect()
        assert not homes(model) and without_name() == before
        dist.barrier()


def test_no_room_for_the_file(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(no_room, saved)
