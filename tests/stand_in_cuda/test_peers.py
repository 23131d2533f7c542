"""Weights in pieces on the devices of two replicas: CUDA's handles, pulls in a program and in a graph, ends in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import small_twins

from chunkflow_compile import ChunkflowError, compile, cycles, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.hardware import pulls
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.cuda_graphs import PASSES

from . import control
from .test_captured import on_cuda

SIZE = Size(layers=2, singles=2)
OPTIONS: dict[str, Any] = {
    "min_bytes": 4096,
    "chunk_bytes": 1 << 12,
    "lowering": "eager",
    "weight_memory": "1.5MiB",
    "hardware": "h100-nvlink",
}


def on_a_card(rank: int, cudagraphs: Any, cards: int) -> None:
    control.settings(devices=cards)
    torch.cuda.set_device(rank % cards)
    model, twin = small_twins("flux", SIZE)
    twin.cuda()
    compile(model, device="cuda", peers=True, cudagraphs=cudagraphs, **OPTIONS)
    name = next(n for n, p in twin.named_parameters() if n.startswith("transformer_blocks.1.") and p.nbytes >= 1 << 15)
    placement = placement_of(model)
    assert placement is not None
    before = control.counts()
    for step in range(PASSES + 6):
        inputs = on_cuda(small_inputs("flux", SIZE, step))
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), step
        pulling = {buffer.name for buffer in placement.store.buffers if buffer.pieces is not None}
        assert len(pulling) > 10 and (name in pulling) == (rank == 0 or step <= PASSES + 2)
        if step == PASSES + 2 and rank:
            for each in (model, twin):
                each.get_parameter(name).mul_(1.25)
    ran = (*cycles(model), *programs(model))[0]
    newest = ran.measurements[-1]
    assert newest.moved_bytes == ran.plan.moved_bytes and 0 < newest.pulled_bytes <= ran.plan.pulled_bytes
    if cudagraphs:
        assert programs(model)[0].call.captures.launches > 3
    assert control.contexts() == {rank % cards}  # pulls take nothing of the other card
    assert control.counts()["cudaMemcpyBatchAsync"] > before.get("cudaMemcpyBatchAsync", 0)
    inputs = on_cuda(small_inputs("flux", SIZE, 99))
    made, right = model(**inputs)[0], twin(**inputs)[0]
    if rank:
        restore(model, "cpu")  # while the other rank may pull
    dist.barrier()
    assert torch.equal(made, right)
    restore(model, "cpu")
    assert placement.store.peers is None
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(("cudagraphs", "cards"), [(False, 2), (True, 2), (False, 1)])
def test_two_processes(cudagraphs: Any, cards: int, on_ranks: Callable[..., None]) -> None:
    on_ranks(on_a_card, cudagraphs, cards, fresh=True)


def rates_on_a_card(rank: int) -> None:
    device, rate = torch.device("cuda", 0), 40e9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "_WEIGHT", 32 << 20)
        patch.setattr(pulls, "_WALKS", 2)
        patch.setattr(pulls, "compute_slowdown", lambda *_, **__: 1.0)  # its MLP is that of a card, and computes here
        with pulls._sharded(device) as pieces:
            assert all(piece.is_cuda for piece in pieces.held)
            control.settings(compute=0, rate=int(rate))  # from here on, on the stand-in's clock
            found = pulls.pulls_of(device, pieces)
    assert found.seconds == pytest.approx((16 << 20) / rate, rel=1e-3)
    assert (found.nbytes, found.from_others, found.exchange_slowdowns) == (16 << 20, 8 << 20, None)
    assert found.rate(2 * rate, 0.0) == pytest.approx(rate, rel=1e-2)


def test_calibrate_measures_pulls(on_ranks: Callable[..., None]) -> None:
    on_ranks(rates_on_a_card, fresh=True)


def sees_another(rank: int) -> None:
    model, _ = small_twins("wan", SIZE)
    with pytest.MonkeyPatch.context() as patch:
        properties = torch.cuda.get_device_properties
        patch.setattr(
            torch.cuda, "get_device_properties", lambda i: type("P", (), {"uuid": f"{rank} {properties(i).uuid}"})
        )
        with pytest.raises(
            ChunkflowError, match=r"The GPU of rank \d is not number 0 in rank \d.*CUDA_VISIBLE_DEVICES"
        ):
            offload(model, "cuda", peers=True)
    assert placement_of(model) is None


def test_ranks_that_do_not_see_the_same_gpus(on_ranks: Callable[..., None]) -> None:
    on_ranks(sees_another, fresh=True)
