"""One reader a machine: the first rank reads the drive, and the others copy out of its ring."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import OPTIONS as SLOW
from helpers import in_memory, load_stack, save_stack, stack_inputs
from test_drive import LEAST, OPTIONS, buffers, planned_reads, read_so_far, same
from test_killed_ranks import Meeting, pair
from test_shared_weights import everywhere
from torch import nn

import chunkflow_compile
from chunkflow_compile import offload, programs, restore


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return save_stack(tmp_path)


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, **options})


def step(run: Any, twin: Any, seed: int) -> None:
    inputs = stack_inputs(seed, twin.embed.weight.dtype)
    assert torch.equal(run(**inputs)[0], twin(**inputs)[0])


def end(model: nn.Module) -> None:
    """No rank leaves before the others have what they read from it."""
    restore(model)
    torch._dynamo.reset()
    dist.barrier()


def reader_of(model: nn.Module) -> Any:
    return programs(model)[-1].arena.reader


def together(model: nn.Module) -> bool:
    """Whether this rank takes part: others copy what it reads, or it copies what the first rank has read."""
    found = reader_of(model)
    if (shared := found._ring) is not None and shared.leads:
        return all(shared._words[other] == shared._run != 0 for other in shared._others)
    return bool(found.joined)


def until_together(model: nn.Module, run: Any, twin: nn.Module, seed: int = 0) -> None:
    for turn in range(30):
        step(run, twin, seed + turn)
        if all(found := everywhere(together(model))):
            return
    raise AssertionError(found)


def counted(model: nn.Module, run: Any, twin: nn.Module, seed: int, turns: int = 6) -> tuple[list[int], int, int]:
    """Bytes that each rank reads in so many steps, those that the plan has for one rank, and those of the ring."""
    (program,) = programs(model)
    program.arena.streams.copy.synchronize()
    dist.barrier()
    before = read_so_far(model)
    for turn in range(turns):
        step(run, twin, seed + turn)
    program.arena.streams.copy.synchronize()
    planned = planned_reads(program.plan, [h for h in buffers(model).values() if h.drive is not None])
    return everywhere(read_so_far(model) - before), turns * planned, reader_of(model)._thread._wanted


def read_by_the_first(rank: int, file: str, world: int) -> None:
    model, twin = pair(file)
    offload(model, min_bytes=LEAST, share=True, host_memory=0)
    run = compiled(model)
    until_together(model, run, twin)
    (program,) = programs(model)
    told = len(program.measurements)
    read, planned, ring = counted(model, run, twin, 100)
    assert read[1:] == [0] * (world - 1) and 0 < planned - ring <= read[0] <= planned + ring
    said = sum(m.read_bytes for m in program.measurements[told:])
    assert planned - ring <= said <= planned + ring, "reports say the same on all ranks"
    assert Path("/proc/self/maps").read_text().count("memfd:chunkflow-ring") == 3
    end(model)
    assert same(model, twin)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_rank_reads_for_all(on_ranks: Callable[..., None], saved: str, world: int) -> None:
    on_ranks(read_by_the_first, saved, world, world=world, fresh=True)


def writes(rank: int, file: str) -> None:
    """A rank that writes a weight has an order of its own from then on, and a common one again when all have written it."""
    model, twin = pair(file, dtype=torch.bfloat16)
    offload(model, min_bytes=LEAST, share=True, host_memory=0, dtype=torch.bfloat16)  # to a scratch file
    run = compiled(model)
    until_together(model, run, twin)
    for writer in (1, 0):
        name = f"blocks.{writer}.block.up.weight"
        dist.barrier()
        if rank == writer:
            for m in (model, twin):
                m.get_parameter(name).mul_(2)
        # ranks with other values compute other outputs: the twin does too
        for turn in range(6):
            step(run, twin, turn)
        read, planned, ring = counted(model, run, twin, 20)
        assert not any(everywhere(together(model))), "an order of its own"
        assert planned - ring <= read[rank] <= planned + ring
        for m in (model, twin):
            m.get_parameter(name).fill_(0.01 * (writer + 1))
        until_together(model, run, twin, 40)
    end(model)


@pytest.mark.long
def test_ranks_that_write_read_alone_until_all_have_written(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(writes, saved)


def blocks(rank: int, file: str) -> None:
    """Blocks compiled one by one: the ranks take up their cycle at calls of their own."""
    model, twin = pair(file)
    offload(model, min_bytes=LEAST, share=True, host_memory=0)
    run = chunkflow_compile.compile(model, **{**SLOW, "lowering": "eager"})
    for turn in range(4):
        step(run, twin, turn)
    assert chunkflow_compile.cycles(model)
    until_together(model, run, twin)
    read = everywhere(read_so_far(model))
    for turn in range(4):
        step(run, twin, turn)
    assert everywhere(read_so_far(model))[1] == read[1]
    end(model)


@pytest.mark.long
def test_a_cycle_is_read_together(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(blocks, saved)


def groups(rank: int, file: str) -> None:
    """One of two groups runs more calls in which only its own ranks meet."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    (model, twin), (other, its_twin) = pair(file, group), pair(file, group)
    for m in (model, twin):
        m.blocks[0] = Meeting(m.blocks[0], dist.group.WORLD)  # all ranks meet in this one
    arena = chunkflow_compile.Arena("cpu")
    beside = compiled(other, policy="resident", arena=arena)
    for turn in range(3 if rank < 2 else 1):
        step(beside, its_twin, turn)
    offload(model, min_bytes=LEAST, share=True, host_memory=0)
    run = compiled(model, arena=arena)
    until_together(model, run, twin)
    read, planned, ring = counted(model, run, twin, 100)
    assert read[1:] == [0, 0, 0] and 0 < planned - ring <= read[0] <= planned + ring
    for turn in range(5 if rank < 2 else 2):
        step(beside, its_twin, turn)
    until_together(model, run, twin)
    end(model)


@pytest.mark.long
def test_groups_that_differ_read_together_where_all_meet(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(groups, saved, world=4)


def not_in_step(rank: int, file: str) -> None:
    """No collective keeps them in step: neither waits for the other."""
    model, twin = load_stack(file), in_memory(load_stack(file))
    offload(model, min_bytes=LEAST, share=True, host_memory=0)
    run = compiled(model)
    for turn in range(3 + 5 * rank):
        step(run, twin, turn)
    assert reader_of(model)._ring is None and read_so_far(model) > 0
    end(model)


def test_ranks_that_are_not_in_step_read_for_themselves(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(not_in_step, saved)


def elsewhere(rank: int, file: str) -> None:
    """In step, but one of them or both on a machine where a lock is no full barrier."""
    for others in ([1], [0, 1]):
        model, twin = pair(file)
        with pytest.MonkeyPatch.context() as patch:
            if rank in others:
                patch.setattr(platform, "machine", lambda: "aarch64")
            offload(model, min_bytes=LEAST, share=True, host_memory=0)
        run = compiled(model)
        for turn in range(4):
            step(run, twin, turn)
        assert reader_of(model)._ring is None and read_so_far(model) > 0
        end(model)


def test_ranks_read_for_themselves_where_a_lock_is_no_barrier(on_ranks: Callable[..., None], saved: str) -> None:
    on_ranks(elsewhere, saved)
