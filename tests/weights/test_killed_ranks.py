"""Ranks that share memory and do not come, or are killed: the others raise, memory returns, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import WITHIN, forking
from helpers import Stack, in_memory, load_stack, save_stack, stack_inputs
from test_drive import LEAST, OPTIONS, same
from torch import nn

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.runtime.executor import Executor
from chunkflow_compile.weights import loader
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.drive import Scratch
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_store import HostStore
from chunkflow_compile.weights.source import DriveBytes

# The rank that leads, the other one, and both.
WHO = ((0,), (1,), (0, 1))


def shared(model: nn.Module) -> bool:
    return any(
        (buffer := buffer_of(p)) is not None and buffer.backing.where is Where.SHARED for p in model.parameters()
    )


def run_all(work: Callable[..., None], *args: Any, ranks: int = 2) -> list[int | None]:
    processes = [forking().Process(target=work, args=(rank, *args)) for rank in range(ranks)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(2 * WITHIN)
    return [p.exitcode for p in processes]


def nothing_is_left(codes: list[int | None], who: tuple[int, ...], folder: Path) -> None:
    """Of what the ranks noted there with :func:`kill` no process has any.  Others of this machine have their own."""
    assert codes == [-signal.SIGKILL if rank in who else 0 for rank in range(len(codes))]
    assert not any("chunkflow" in name for name in os.listdir("/dev/shm"))
    noted = {inode for file in folder.glob("held*") for inode in file.read_text().split()}
    assert len(list(folder.glob("held*"))) == len(who) and noted, "each of the killed"
    held = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            held |= inodes(process)
    assert not noted & held


def inodes(process: Path) -> set[str]:
    """Those of the files without a name that a process has open or mapped."""
    held = {line.split()[4] for line in (process / "maps").read_text().splitlines() if nameless(line)}
    for file in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            if nameless(os.readlink(file)):
                held.add(str(file.stat().st_ino))
    return held


def nameless(file: str) -> bool:
    """Whether it is shared memory, or a part of the drive: a link of a process, or a line of its mappings."""
    return "memfd:chunkflow" in file or (f"{tempfile.gettempdir()}/" in file and file.endswith("(deleted)"))


def kill(folder: str, rank: int) -> None:
    """Note what this process holds and has not inherited, and kill it."""
    mine = inodes(Path("/proc/self")) - inodes(Path(f"/proc/{os.getppid()}"))
    Path(folder, f"held{rank}").write_text(" ".join(mine))
    os.kill(os.getpid(), signal.SIGKILL)


def without_name() -> int:
    """Files without a name that this process has open, and mappings of them."""
    held = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    held += Path("/proc/self/maps").read_text().splitlines()
    return sum(map(nameless, held))


def large() -> nn.Module:
    """64 MiB of weights."""
    torch.manual_seed(0)
    return Stack(layers=4, width=1024)


def killed_at(rank: int, folder: str, who: tuple[int, ...], when: str) -> None:
    """One of two ranks is killed, and the other must raise and keep its weights; or both are."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, twin = large(), large()
    if rank in who:
        owner, name = {
            "write": (HostStore, "finish_move") if rank else (loader, "fill"),
            "compare": (loader.SharedPages, "same" if rank else "report"),
            "drive": (DriveBytes, "mapped") if rank else (Scratch, "write"),
        }[when]
        plain, left = getattr(owner, name), [1 if name in ("finish_move", "report") else 5]

        def dies(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                (taken,) = re.findall(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
                Path(folder, f"taken{rank}").write_text(taken)
                kill(folder, rank)
            return plain(*args)

        setattr(owner, name, dies)
    began, said, files = time.monotonic(), "", without_name()
    try:
        offload(model, min_bytes=LEAST, share=True, host_memory=0 if when == "drive" else None)
    except ChunkflowError as error:
        said = str(error)
    if len(who) > 1:
        kill(folder, rank)  # the other one was the first
    assert f"The weights are not placed, because rank {1 - rank} is gone: its process has ended." in said, said
    assert same(model, twin)
    assert time.monotonic() - began < WITHIN and not shared(model)
    gc.collect()
    assert without_name() == files
    os._exit(0)


CASES = [(who, when) for who in WHO for when in ("write", "compare", "drive")]
SHORT = (((0,), "compare"), ((0,), "drive"))


@pytest.mark.parametrize(
    ("who", "when"), [pytest.param(*c, marks=() if c in SHORT else pytest.mark.long) for c in CASES]
)
def test_a_rank_is_killed(tmp_path: Path, who: tuple[int, ...], when: str) -> None:
    nothing_is_left(run_all(killed_at, str(tmp_path), who, when), who, tmp_path)
    if when == "compare":
        assert max(int(p.read_text()) for p in tmp_path.glob("taken*")) > 8 << 10, "there was something to return"


class Meeting(nn.Module):
    """A block after which the ranks of a group meet."""

    def __init__(self, block: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.block, self.group = block, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(self.block(x), "max", self.group)


def pair(file: str, group: Any = None, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model whose ranks meet in each block, those of a group or all, and one that has been cast."""
    model, twin = load_stack(file), in_memory(load_stack(file, dtype))
    for m in (model, twin):
        for i, block in enumerate(m.blocks):  # type: ignore[arg-type]
            m.blocks[i] = Meeting(block, group or dist.group.WORLD)  # type: ignore[index, operator]
    return model, twin


def killed_in_a_call(rank: int, folder: str) -> None:
    """The first of two groups of two ranks loses one in a step.  The other rank of it raises and restores its weights, and
    the other group, which shares the weights, goes on.

    Half of the weights are in memory, and half on the drive.
    """
    timeout = timedelta(seconds=WITHIN)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4, timeout=timeout)
    torch.set_grad_enabled(False)
    group = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    model, twin = pair(f"{folder}/model.safetensors", group)
    offload(model, min_bytes=LEAST, share=True, host_memory=sum(p.nbytes for p in model.parameters()) // 2)
    assert shared(model) and any((h := buffer_of(p)) is not None and h.source.file for p in model.parameters())
    run, dying = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS), Path(folder, "dying")
    plain, left = Executor._finish, 3

    def dies(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            dying.touch()
            kill(folder, rank)
        return plain(self, *args)

    if rank == 0:
        Executor._finish = dies  # type: ignore[method-assign]

    def steps(first: int, end: int) -> None:
        for step in range(first, end):
            inputs = stack_inputs(step + rank // 2)
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0])

    if rank < 2:
        with pytest.raises((ChunkflowError, RuntimeError)):
            steps(0, 40)
    else:
        steps(0, 10)
        while not dying.exists():
            time.sleep(0.05)
        steps(10, 40)
    restore(model)
    assert same(model, twin) and not shared(model)
    os._exit(0)


@pytest.mark.long
def test_a_rank_is_killed_in_a_call(tmp_path: Path) -> None:
    save_stack(tmp_path)
    nothing_is_left(run_all(killed_in_a_call, str(tmp_path), ranks=4), (0,), tmp_path)
