"""A move of shared weights that fails: each rank has the values that it had, and needs no memory for that."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from helpers import load_stack, save_stack
from test_drive import LEAST, SIZE, buffers, same
from test_killed_ranks import without_name
from test_shared_weights import PLACED, PLACES, large, shared

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.catalog.small import small_model
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.units import size
from chunkflow_compile.weights import drive, limits, loader
from chunkflow_compile.weights.checkpoint import CheckpointReader, Mappings
from chunkflow_compile.weights.limits import HostMemory


def full() -> HostMemory:
    return HostMemory(1 << 30, 5, Path("/sys/fs/cgroup/memory.max"))


def a_shard_changes(rank: int, folder: str, how: str) -> None:
    """Before rank 1 reads it: other files of the same names, or the last one is cut."""
    model, twin = diffusers.WanTransformer3DModel.from_pretrained(folder), small_model("wan", SIZE)
    _, *others, last = sorted(Path(folder).glob("*.safetensors"))
    plain = CheckpointReader.read

    def read(self: CheckpointReader, part: Any, *args: Any) -> None:
        if rank == 1 and how == "cut" and part.file.name == f"the checkpoint {last}":
            os.truncate(last, 64)
        if rank == 1 and how == "replaced" and not Path(folder, "done").exists():
            Path(folder, "done").touch()
            for file in (*others, last):
                shutil.copy(file, f"{file}.new")
                os.replace(f"{file}.new", file)
        plain(self, part, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "read", read)
        with pytest.raises(ChunkflowError, match=r"was changed while its weights were read|because rank 1 failed"):
            offload(model, min_bytes=LEAST, share=True)
    assert placement_of(model) is None and not shared(model)
    assert how == "cut" or same(model, twin), "also what the other rank was to read"


@pytest.fixture
def shards(tmp_path: Path) -> str:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan", max_shard_size="100KB")  # type: ignore[operator]
    return str(tmp_path / "wan")


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_shard_changes_before_the_other_rank_reads_it(on_ranks: Callable[..., None], shards: str, how: str) -> None:
    on_ranks(a_shard_changes, shards, how)


@pytest.mark.parametrize("host_memory", [None, 0])
def test_weights_go_back_to_their_checkpoint(
    shards: str, host_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of each in memory may be more than the machine has."""
    model, twin = diffusers.WanTransformer3DModel.from_pretrained(shards), small_model("wan", SIZE)
    plain, done = CheckpointReader.read, list[int]()

    def read(self: CheckpointReader, part: Any, *args: Any) -> None:
        if len(done) == 8:
            raise ChunkflowError("The drive is full.")
        done.append(part.nbytes)
        plain(self, part, *args)

    monkeypatch.setattr(CheckpointReader, "read", read)
    with pytest.raises(ChunkflowError, match="The drive is full"):
        offload(model, min_bytes=LEAST, dtype=torch.bfloat16, host_memory=host_memory)
    mappings = Mappings()
    assert all(mappings.part(p.detach()) is not None for p in model.parameters())
    assert same(model, twin)


def memory_runs_out(rank: int) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    plain, asked = limits.host_memory, [0]

    def soon_full() -> limits.HostMemory:
        asked[0] += 1
        return full() if asked[0] > 8 and rank == 0 else plain()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_CHECKED", 1)
        patch.setattr(limits, "host_memory", soon_full)
        said = r"The weights take [\d.]+ [KM]iB more of host memory, and 5 B are free"
        with pytest.raises(ChunkflowError, match=said if rank == 0 else f"because rank 0 failed: {said}"):
            offload(model, min_bytes=LEAST, share=True)
        assert placement_of(model) is None and same(model, twin)
    dist.barrier()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    dist.barrier()
    assert all(torch.equal(a, b + rank) for a, b in zip(model.parameters(), twin.parameters(), strict=True)), "its own"
    offload(model, min_bytes=LEAST)
    assert len(large(model)) > 1


def test_memory_runs_out_while_shared_memory_is_filled(on_ranks: Callable[..., None]) -> None:
    on_ranks(memory_runs_out)


class Fills:
    """A drive that is full at the third write."""

    def __init__(self) -> None:
        self.plain, self.left = os.pwritev, 3

    def __call__(self, *args: Any) -> int:
        self.left -= 1
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.plain(*args)


def no_room(rank: int, file: str) -> None:
    before = without_name()
    model, twin = load_stack(file), load_stack(file)
    free = sum(p.nbytes for p in model.parameters()) // 8  # for each weight, and not for all of them
    there = "There is no room for a scratch file in "
    cases: list[tuple[str, str, tuple[Any, str, Any]]] = [
        (
            PLACES[0],
            r"The weights take [\d.]+ [KM]iB more of host memory, and 5 B are free below /sys/fs/cgroup/memory.max",
            (limits, "host_memory", full),
        ),
        (PLACES[1], rf"{there}/dev/shm: it is in memory itself \(tmpfs\)", (tempfile, "tempdir", "/dev/shm")),
        (
            PLACES[1],
            f"{there}{tempfile.gettempdir()}: {size(free)} are free",
            (drive.shutil, "disk_usage", lambda _: type("", (), {"free": free})),
        ),
        (PLACES[1], f"{there}{tempfile.gettempdir()}: No space left on device", (os, "pwritev", Fills())),
    ]
    for where, said, change in cases:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(*change)
            with pytest.raises(ChunkflowError, match=said if rank == 0 else f"because rank 0 failed: {said}"):
                offload(model, min_bytes=LEAST, share=True, **PLACED[where])
        dtype = PLACED[where].get("dtype")
        assert all(
            torch.equal(a.to(dtype), b.to(dtype)) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )
        gc.collect()
        assert not buffers(model) and without_name() == before
        dist.barrier()


def test_no_room_for_what_is_shared(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    """Said before the kernel kills a rank."""
    on_ranks(no_room, save_stack(tmp_path), fresh=True)


def no_room_to_write(rank: int, file: str) -> None:
    """A write takes memory, too."""
    model, twin = load_stack(file), load_stack(file)
    offload(model, min_bytes=LEAST, share=True)
    name = min(shared(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "host_memory", full)
        with pytest.raises(
            ChunkflowError, match=r"cannot be given memory of its own: 5 B are free below .*max, and [\d.]+ \w+ must"
        ):
            model.get_parameter(name).mul_(2)
    assert name in shared(model)
    restore(model)
    assert same(model, twin)


def test_no_room_to_write(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(no_room_to_write, save_stack(tmp_path))
