"""Models whose weights lie in pieces on the devices of ranks: the same bits as resident ones, whatever one rank does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import EAGER
from helpers import small_twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, offload, programs, replan, restore
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import HostBuffer

SIZE = Size(layers=2, singles=2)


def buffers_of(model: nn.Module) -> list[HostBuffer]:
    placement = placement_of(model)
    assert placement is not None
    return placement.store.buffers


def in_pieces(model: nn.Module) -> set[str]:
    return {buffer.name for buffer in buffers_of(model) if buffer.pieces is not None}


def inputs_of(family: str, seed: int, size: Size = SIZE, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    inputs = small_inputs(family, size, seed)
    return {n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()}


def check(run: Any, twin: Any, family: str, *seeds: int, **given: Any) -> None:
    for seed in seeds:
        inputs = inputs_of(family, seed, **given)
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0]), seed


def check_bytes(model: nn.Module) -> None:
    """What is copied and pulled is what the plan says, which counts what the rank pulls that has the fewest bytes itself."""
    ran = (*cycles(model), *programs(model))[0]
    newest, plan = ran.measurements[-1], ran.plan
    assert newest.primed_bytes == 0 and newest.moved_bytes == plan.moved_bytes > 0
    peers = [w for w in plan.streamed if w.home == "peers"]
    assert 0.95 * plan.pulled_bytes <= newest.pulled_bytes <= plan.pulled_bytes
    assert len(peers) > 5 and plan.pulled_bytes > 0.9 * sum(w.nbytes for w in peers) * (1 - 1 / peers[0].peers)


def on_a_rank(rank: int, family: str, by_kind: bool, debug: tuple[str, ...], steps: int) -> None:
    model, twin = small_twins(family, SIZE, degree=dist.get_world_size())
    if by_kind:
        run: Any = chunkflow_compile.compile(model, peers=True, debug=debug, **EAGER)
    else:
        offload(model, min_bytes=EAGER["min_bytes"], share=True, peers=True)
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, "debug": debug})
    check(run, twin, family, *range(steps))
    check_bytes(model)
    dealt = in_pieces(model)
    written = max((b for b in buffers_of(model) if b.name in dealt), key=lambda b: b.nbytes)
    for each in (model, twin) if rank else ():
        each.get_parameter(written.name).mul_(1.25)
    check(run, twin, family, *range(steps, steps + 4))
    assert in_pieces(model) == (dealt - {written.name} if rank else dealt)
    assert (written.where is Where.SHARED) == (not by_kind and not rank)
    least = (*cycles(model), *programs(model))[0].plan.device_bytes
    if not rank:
        replan(model, memory=least + (1 << 20))  # on one rank: the others have their plan
    check(run, twin, family, *range(steps + 4, steps + 8))
    if not rank:
        dist.barrier()
    restore(model)
    if rank:
        dist.barrier()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_ranks(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_a_rank, "wan", True, (), 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "by_kind", "debug", "world"),
    [
        ("flux", True, (), 4),
        ("flux", False, ("threads", "poison"), 2),
        ("qwen-image", False, (), 2),
        ("wan", True, ("threads", "poison"), 4),
    ],
)
def test_ranks(family: str, by_kind: bool, debug: tuple[str, ...], world: int, on_ranks: Callable[..., None]) -> None:
    on_ranks(on_a_rank, family, by_kind, debug, 30, world=world)


class Trouble(Exception):
    """What a rank raises in its forward."""


def alone(rank: int, steps: int) -> None:
    """Replicas, which exchange nothing: each rank does something else, and none waits for another."""
    model, twin = small_twins("wan", SIZE)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "wan", 0, 1, 2)  # all have dealt
    arena = programs(model)[0].arena
    for step in range(3, 3 + steps):
        if rank == 0:
            arena.evict()  # cold
        elif rank == 1:
            check(run, twin, "wan", step, size=Size(layers=2, singles=2, height=16))  # and back
        elif rank == 2:
            replan(model, memory=(1 << 20) + (step << 12))
        else:
            time.sleep(0.05)
        check(run, twin, "wan", step)
    dealt = in_pieces(model)
    assert dealt
    if rank == 1:
        restore(model)  # while the others go on
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    else:
        check(run, twin, "wan", *range(50, 54))
        assert in_pieces(model) == dealt


@pytest.mark.long
def test_no_rank_waits_for_another(on_ranks: Callable[..., None]) -> None:
    on_ranks(alone, 20, world=4)


def test_two_replicas(on_ranks: Callable[..., None]) -> None:
    on_ranks(alone, 2)


def raises(rank: int) -> None:
    model, twin = small_twins("wan", SIZE)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "wan", 0, 1)

    def fails(*_: Any) -> None:
        raise Trouble

    for step in range(2, 22):
        if rank:
            hook = model.blocks[1].register_forward_pre_hook(fails)
            with pytest.raises(Trouble):
                run(**inputs_of("wan", step))
            hook.remove()
        check(run, twin, "wan", step)
    assert in_pieces(model)


@pytest.mark.long
def test_a_rank_that_raises(on_ranks: Callable[..., None]) -> None:
    on_ranks(raises)


def packed_too(rank: int) -> None:
    """Pieces have the packed bytes."""
    model, twin = (m.to(torch.bfloat16) for m in small_twins("wan", SIZE, degree=2))
    run = chunkflow_compile.compile(model, peers=True, pack=True, **EAGER)
    check(run, twin, "wan", *range(4), dtype=torch.bfloat16)
    packed = [b for b in buffers_of(model) if b.packed is not None]
    assert packed and all(b.pieces is not None and b.pieces.nbytes == b.nbytes < b.host.nbytes for b in packed)
    for each in (model, twin) if rank else ():
        each.get_parameter(packed[0].name).mul_(0.5)
    check(run, twin, "wan", *range(4, 8), dtype=torch.bfloat16)
    assert (packed[0].pieces is None) == bool(rank) and packed[0].packed is not None
    restore(model)


def test_packed_weights(on_ranks: Callable[..., None]) -> None:
    on_ranks(packed_too)


def differs(rank: int) -> None:
    """Other values on a rank: streamed from the host there and elsewhere, and right on all."""
    model, twin = small_twins("wan", SIZE)
    name = next(n for n, p in model.named_parameters() if p.nbytes >= EAGER["min_bytes"])
    for each in (model, twin):
        each.get_parameter(name).data.add_(rank)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "wan", *range(4))
    assert in_pieces(model) and name not in in_pieces(model)


def test_weights_that_differ(on_ranks: Callable[..., None]) -> None:
    on_ranks(differs)


def other_options(rank: int) -> None:
    """Ranks that deal out other weights: one sentence on both, and the model can be restored."""
    model, twin = small_twins("wan", SIZE)
    least = {"min_bytes": EAGER["min_bytes"] * (1 + 7 * rank)}
    run = chunkflow_compile.compile(model, peers=True, **{**EAGER, **least})
    with pytest.raises(
        ChunkflowError, match=r"Rank 1 puts \d+ weights, from .* on, on the devices of the peers, and rank 0"
    ):
        for seed in range(3):
            run(**inputs_of("wan", seed))
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_ranks_with_other_options(on_ranks: Callable[..., None]) -> None:
    on_ranks(other_options)


def refused(rank: int) -> None:
    model, _ = small_twins("wan", SIZE)
    with pytest.raises(
        ChunkflowError, match=r"peers=True keeps weights on the devices of all ranks, but .*has no peer_bandwidth"
    ):
        chunkflow_compile.compile(model, peers=True, **{**EAGER, "hardware": "rtx-4090-pcie"})
    assert placement_of(model) is None


def test_a_machine_without_peer_access(on_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    on_ranks(refused)
