"""Weights for a card: read from the checkpoint, shared by two ranks, pinned by both, and private where one writes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.runtime import executor
from chunkflow_compile.runtime.torch_cuda import TorchCuda, register
from chunkflow_compile.weights.host_buffer import buffer_of

from . import control

SIZE = Size(layers=2)
LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}


def on_card(rank: int, folder: str) -> None:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = diffusers.WanTransformer3DModel.from_pretrained(f"{folder}/wan")
    twin = diffusers.WanTransformer3DModel.from_pretrained(f"{folder}/wan", torch_dtype=torch.bfloat16).to("cuda")
    offload(model, "cuda", min_bytes=LEAST, dtype=torch.bfloat16)
    buffers = [buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None]
    assert buffers and all(buffer.shared is not None for buffer in buffers), "the default for a GPU"
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)

    def steps() -> None:
        for step in range(3):
            inputs = {k: v.to("cuda") if torch.is_tensor(v) else v for k, v in small_inputs("wan", SIZE, step).items()}
            inputs["hidden_states"] = inputs["hidden_states"].to(torch.bfloat16)
            inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].to(torch.bfloat16)
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0])

    with torch.no_grad():
        steps()
        streamed = {w.name for w in programs(model)[-1].plan.streamed}
        assert streamed and all(buffer.pinned for buffer in buffers if buffer.name in streamed)
        if rank == 1:
            for m in (model, twin):
                m.blocks[0].ffn.net[0].proj.weight.mul_(2)
        steps()
        private = [buffer for buffer in buffers if buffer.shared is None]
        assert len(private) == rank and all(buffer.pinned for buffer in private)
    dist.barrier()
    restore(model)
    assert all(torch.equal(a, b.to("cpu")) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    os._exit(0)


def on_two_ranks(work: Callable[[int, str], None], folder: Path) -> None:
    small_model("wan", SIZE).save_pretrained(folder / "wan")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, str(folder))) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def test_two_ranks_share_on_a_card(tmp_path: Path) -> None:
    on_two_ranks(on_card, tmp_path)


def written_by_collectives(rank: int, folder: str) -> None:
    """A collective gets a copy on the card, and what it writes there goes to the host memory."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, twin = (diffusers.WanTransformer3DModel.from_pretrained(f"{folder}/wan") for _ in range(2))
    offload(model, "cuda", min_bytes=LEAST)
    twin.to("cuda")
    run = torch.compile(model, backend="chunkflow", options={**OPTIONS, "policy": "resident"})

    def steps() -> None:
        for step in range(2):
            inputs = {k: v.to("cuda") if torch.is_tensor(v) else v for k, v in small_inputs("wan", SIZE, step).items()}
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0])

    with torch.no_grad():
        for number in range(3):
            for m in (model, twin):
                for p in m.parameters():
                    p.mul_(1 + rank / 8)
            steps()
            for m in (model, twin):
                if number == 0:
                    for p in m.parameters():
                        dist.broadcast(p, 0)
                elif number == 1:
                    for work in [dist.all_reduce(p.data, dist.ReduceOp.MAX, async_op=True) for p in m.parameters()]:
                        work.wait()
                else:
                    works = [dist.broadcast(p, 1, async_op=True) for p in m.parameters()]
                    for work in works:
                        work.get_future().wait()
            steps()
    dist.barrier()
    restore(model)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    os._exit(0)


def test_collectives_write_weights_on_a_card(tmp_path: Path) -> None:
    on_two_ranks(written_by_collectives, tmp_path)


def read_together(rank: int, folder: str) -> None:
    """The ranks are in step because they begin each step together; there are no collectives of a card here."""
    executor._in_step = lambda cycle, ranks: True  # type: ignore[assignment]
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, twin = (diffusers.WanTransformer3DModel.from_pretrained(f"{folder}/wan") for _ in range(2))
    twin.to("cuda")
    offload(model, "cuda", min_bytes=LEAST, host_memory=0)
    buffers = [buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None]
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    seen = list[bool]()
    with torch.no_grad():
        for step in range(30):
            dist.barrier()
            inputs = {k: v.to("cuda") if torch.is_tensor(v) else v for k, v in small_inputs("wan", SIZE, step).items()}
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0])
            reader = programs(model)[-1].arena.reader
            seen.append(reader.joined)
            if seen[-1]:
                assert reader._thread._theirs.bytes.is_pinned(), "each rank pins the ring"
    read = sum(file.read_bytes for file in {buffer.drive.file for buffer in buffers if buffer.drive is not None})
    assert seen[-1] == (rank == 1) and read > 0
    dist.barrier()
    restore(model)
    os._exit(0)


def test_two_ranks_read_together_on_a_card(tmp_path: Path) -> None:
    on_two_ranks(read_together, tmp_path)


def test_half_on_the_drive(tmp_path: Path) -> None:
    """Through a pinned ring, by the thread that issues copies, while the host runs ahead."""
    small_model("wan", SIZE).save_pretrained(tmp_path)
    model = diffusers.WanTransformer3DModel.from_pretrained(tmp_path)
    twin = diffusers.WanTransformer3DModel.from_pretrained(tmp_path).to("cuda")
    budget = sum(p.nbytes for p in twin.parameters() if p.nbytes >= LEAST) // 2
    offload(model, "cuda", min_bytes=LEAST, host_memory=budget)
    buffers = [buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None]
    drive = [buffer for buffer in buffers if buffer.drive is not None]
    assert 0 < len(drive) < len(buffers)
    run = torch.compile(model, backend="chunkflow", options=OPTIONS)
    with torch.no_grad():
        for step in range(6):
            inputs = {k: v.to("cuda") if torch.is_tensor(v) else v for k, v in small_inputs("wan", SIZE, step).items()}
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0])
            if step == 3:
                for m in (model, twin):
                    m.blocks[0].ffn.net[0].proj.weight.mul_(2)
    streamed = {w.name for w in programs(model)[-1].plan.streamed}
    assert all(buffer.pinned for buffer in buffers if buffer.drive is None and buffer.name in streamed)
    read = {buffer.drive.file for buffer in drive if buffer.drive is not None}
    assert (
        sum(file.read_bytes for file in read) >= 6 * sum(h.nbytes for h in drive if h.drive and h.name in streamed) > 0
    )
    restore(model)
    assert all(torch.equal(a, b.to("cpu")) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


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


def test_no_stream_of_torch_is_that_of_copies() -> None:
    """torch hands out the streams of a pool in turn, and there are 32 in each."""
    taken = {torch.cuda.Stream(priority=priority).stream_id for priority in (0, -1, -3) for _ in range(40)}
    assert len(taken) == 3 * 32 and TorchCuda(torch.device("cuda", 0)).stream().stream_id not in taken
