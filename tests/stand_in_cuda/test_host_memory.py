"""Weights for a card: read from the checkpoint, shared by two ranks, pinned by both, and private where one writes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from helpers import on_card

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.runtime.torch_cuda import register
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import buffer_of

from . import control

SIZE = Size(layers=2)
LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}


class Ranked:
    """A saved model that is offloaded to the card, compiled, and its twin there; ``rank``: one of two that meet."""

    def __init__(
        self,
        folder: str,
        rank: int | None = None,
        dtype: torch.dtype | None = None,
        policy: str = "layerwise",
        **given: Any,
    ) -> None:
        if rank is not None:
            os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        made = diffusers.WanTransformer3DModel
        self.dtype = dtype or torch.float32
        self.model = made.from_pretrained(f"{folder}/wan")
        self.twin = made.from_pretrained(f"{folder}/wan", torch_dtype=self.dtype).to("cuda")
        offload(self.model, "cuda", min_bytes=LEAST, dtype=dtype, **given)
        self.buffers = [buffer for p in self.model.parameters() if (buffer := buffer_of(p)) is not None]
        self.run = torch.compile(self.model, backend="chunkflow", options={**OPTIONS, "policy": policy})

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.twin

    @property
    def streamed(self) -> set[str]:
        return {w.name for w in programs(self.model)[-1].plan.streamed}

    def check(self, steps: int = 1) -> None:
        for step in range(steps):
            inputs = on_card(small_inputs("wan", SIZE, step))
            for name in ("hidden_states", "encoder_hidden_states"):
                inputs[name] = inputs[name].to(self.dtype)
            assert torch.equal(self.run(**inputs)[0], self.twin(**inputs)[0])

    def change_a_weight(self) -> None:
        for m in self.both:
            m.blocks[0].ffn.net[0].proj.weight.mul_(2)

    def restore(self) -> None:
        restore(self.model)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*(m.parameters() for m in self.both), strict=True))

    def end(self) -> None:
        dist.barrier()
        self.restore()
        os._exit(0)


@torch.no_grad()
def shared(rank: int, folder: str) -> None:
    found = Ranked(folder, rank, torch.bfloat16)
    buffers = found.buffers
    assert buffers and all(buffer.backing.where is Where.SHARED for buffer in buffers), "the default for a GPU"
    found.check(3)
    streamed = found.streamed
    assert streamed and all(buffer.pinned for buffer in buffers if buffer.name in streamed)
    if rank == 1:
        found.change_a_weight()
    found.check(3)
    private = [buffer for buffer in buffers if buffer.backing.where is not Where.SHARED]
    assert len(private) == rank and all(buffer.pinned for buffer in private)
    found.end()


@torch.no_grad()
def written_by_collectives(rank: int, folder: str) -> None:
    """A collective gets a copy on the card, and what it writes there goes to the host memory."""
    found = Ranked(folder, rank, policy="resident")
    for number in range(3):
        for m in found.both:
            for p in m.parameters():
                p.mul_(1 + rank / 8)
        found.check(2)
        for m in found.both:
            if number == 0:
                for p in m.parameters():
                    dist.broadcast(p, 0)
            elif number == 1:
                for work in [dist.all_reduce(p.data, dist.ReduceOp.MAX, async_op=True) for p in m.parameters()]:
                    work.wait()
            else:
                for work in [dist.broadcast(p, 1, async_op=True) for p in m.parameters()]:
                    work.get_future().wait()
        found.check(2)
    found.end()


@pytest.mark.parametrize("work", [shared, written_by_collectives])
def test_two_ranks_on_a_card(work: Callable[[int, str], None], tmp_path: Path) -> None:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def test_half_on_the_drive(tmp_path: Path) -> None:
    """Through a pinned ring, by the thread that issues copies, while the host runs ahead."""
    model = small_model("wan", SIZE)
    model.save_pretrained(tmp_path / "wan")
    budget = sum(p.nbytes for p in model.parameters() if p.nbytes >= LEAST) // 2
    found = Ranked(str(tmp_path), host_memory=budget)
    drive = [buffer for buffer in found.buffers if buffer.source.file]
    assert 0 < len(drive) < len(found.buffers)
    found.check(4)
    found.change_a_weight()
    found.check(2)
    streamed = found.streamed
    assert all(buffer.pinned for buffer in found.buffers if not buffer.source.file and buffer.name in streamed)
    files = {buffer.backing.bytes.file for buffer in drive if buffer.source.file}
    least = 6 * sum(h.nbytes for h in drive if h.source.file and h.name in streamed)
    assert sum(file.read_bytes for file in files) >= least > 0
    found.restore()


def test_memory_that_torch_has_pinned_is_not_pinned_twice() -> None:
    """CUDA refuses that, and the weights of the model would be copied from pageable memory then."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    pinned, pageable = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 20, dtype=torch.uint8)
    with control.counted() as made:
        register(pinned, device)()
        assert pinned.is_pinned()
        unpin = register(pageable, device)
        assert pageable.is_pinned()
        unpin()
    assert made["cudaHostRegister"] == made["cudaHostUnregister"] == 1 and not pageable.is_pinned()
