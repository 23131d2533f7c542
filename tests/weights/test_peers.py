"""Pieces on the devices of ranks: how weights are sharded, what is pulled, and what ends that."""

from __future__ import annotations

import base64
import inspect
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import small_twins, stack
from test_node import LOG, said, several, together
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.catalog.small import Size
from chunkflow_compile.passes import pieces as geometry
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights import peers as peers_of_ranks
from chunkflow_compile.weights.bytes import flat_bytes
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.peers import Peers

CPU = torch.device("cpu")
# Bytes of a stripe, far below those of real weights, so that these have several.
STRIPE = 1536


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STRIPE", STRIPE)


def weights(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=g) for n in (1, 64, 1000, 2 * STRIPE, 2 * STRIPE + 3)]


def sharded(count: int, of_rank: Callable[[int], list[torch.Tensor]]) -> list[Any]:
    """For each rank its buffers, sharded, or the error."""
    nodes = several(count)
    buffers = {n.rank: [HostBuffer(w, name=f"w{i}") for i, w in enumerate(of_rank(n.rank))] for n in nodes}

    def shard(node: Any) -> list[HostBuffer]:
        with node:
            Peers(node, CPU).shard(buffers[node.rank], buffers[node.rank])
        return buffers[node.rank]

    return together(nodes, shard)


def pulled(pieces: Pieces, part: slice) -> torch.Tensor:
    source = pieces[part]
    target = torch.full((source.numel(),), 7, dtype=torch.uint8)
    for into, values in source.copies(target):
        into.copy_(values)
    return target


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_pulls_every_weight(ranks: int, small_stripes: None) -> None:
    """Any bytes of it, also of sizes that the number of ranks does not divide; all but its own part from the others."""
    for rank, buffers in enumerate(sharded(ranks, lambda _: weights(0))):
        for buffer, plain in zip(buffers, weights(0), strict=True):
            pieces, values = buffer.bytes, flat_bytes(plain)
            assert isinstance(pieces, Pieces) and pieces.place == rank and pieces.numel() == values.numel()
            assert sum(p.numel() for p in pieces.held) < values.numel() + 256 * ranks
            for begin, end in ((0, len(values)), (STRIPE - 8, 3 * STRIPE + 12), (len(values) // 3, len(values))):
                part = slice(begin, max(begin, min(end, len(values))))
                assert torch.equal(pulled(pieces, part), values[part])
            own = sum(part.nbytes for part in pieces.parts if part.owner == rank)
            assert pieces.from_others == len(values) - own
            if len(values) > 2 * STRIPE:
                assert 0 < own < 1.3 * len(values) / ranks and pieces.parts[0].owner == (rank + 1) % ranks


def test_what_is_written_is_pulled_no_more(small_stripes: None) -> None:
    """On the rank that writes it; the others have the values from before, also once its memory is gone."""
    first, second = sharded(2, lambda _: weights(0))
    written = first[-1]
    written.host.zero_()
    assert isinstance(written.bytes, torch.Tensor) and not written.bytes.any() and written.pieces is None
    del written
    first.clear()
    for buffer, plain in zip(second, weights(0), strict=True):
        assert isinstance(buffer.bytes, Pieces)
        assert torch.equal(pulled(buffer.bytes, slice(None)), flat_bytes(plain))


def test_values_that_differ(caplog: pytest.LogCaptureFixture, small_stripes: None) -> None:
    """Such a weight streams from the host on all ranks; one warning on each says so."""

    def of_rank(rank: int) -> list[torch.Tensor]:
        return [w + (rank == 2 and i == 3) for i, w in enumerate(weights(0))]

    caplog.set_level(logging.WARNING, LOG)
    for rank, buffers in enumerate(sharded(3, of_rank)):
        assert [isinstance(b.bytes, Pieces) for b in buffers] == [True, True, True, False, True]
        assert torch.equal(buffers[3].bytes, flat_bytes(of_rank(rank)[3]))
    assert said(caplog) == 3 * [
        "1 weights, such as w3, have other values on some ranks, and stream from host memory: pieces on the devices of "
        "several ranks need equal values"
    ]


def test_weights_that_one_rank_has_not(small_stripes: None) -> None:
    """The ranks shard those that all of them have, such as where one rank took a weight out of the model."""
    for buffers in sharded(2, lambda rank: weights(0)[: 5 - rank]):
        assert [isinstance(b.bytes, Pieces) for b in buffers] == [True, True, True, True, False][: len(buffers)]


def test_ranks_that_run_other_parts(caplog: pytest.LogCaptureFixture) -> None:
    """Such as blocks in another order: no rank waits, then or later, and none has pieces."""
    nodes = several(2)
    made = [[HostBuffer(w, name=f"{'abcde'[i]}{rank}") for i, w in enumerate(weights(0))] for rank in range(2)]

    def twice(node: Any) -> list[HostBuffer]:
        peers = Peers(node, CPU, (b.name for each in made for b in each))
        for _ in range(2):
            peers.shard(made[node.rank], made[node.rank])
        assert not peers.pending
        return made[node.rank]

    caplog.set_level(logging.WARNING, LOG)
    for buffers in together(nodes, twice):
        assert not any(isinstance(b.bytes, Pieces) for b in buffers)
    assert said(caplog) == 2 * [
        "The ranks run different parts of the model (rank 0: 5 weights from a0 on; rank 1: 5 weights from a1 on), so the "
        "weights that are not sharded yet stream from host memory on all ranks. To shard them, restore the model on each "
        "rank and place it again"
    ]


def test_a_rank_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks say which one, and none has pieces."""
    allocated = Peers._allocated

    def short(self: Peers, nbytes: int) -> Any:
        if self.place == 1:
            raise OSError(12, "Cannot allocate memory")
        return allocated(self, nbytes)

    monkeypatch.setattr(Peers, "_allocated", short)
    errors = [str(error) for error in sharded(3, lambda _: weights(0))]
    assert all("rank 1 failed: A piece of 5 weights" in e and "Cannot allocate memory" in e for e in errors), errors


def test_after_a_rank_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further call tries again."""
    allocated = Peers._allocated

    def full(self: Peers, nbytes: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Peers, "_allocated", full)

    def again(node: Any) -> list[HostBuffer]:
        peers, buffers = Peers(node, CPU), [HostBuffer(w, name=f"w{i}") for i, w in enumerate(weights(0))]
        for _ in range(2):
            with pytest.raises(
                ChunkflowError, match=r"not sharded across the ranks, because rank [01] failed: A piece of 5"
            ):
                peers.shard(buffers, buffers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers, "_allocated", partial(allocated, peers))
            peers.shard(buffers, buffers)
        return buffers

    for buffers in together(several(2), again):
        assert all(isinstance(b.bytes, Pieces) for b in buffers)


def test_plans_that_want_other_weights(caplog: pytest.LogCaptureFixture, small_stripes: None) -> None:
    """The ranks shard those that all plans want, which may be none."""
    for wanted, both in (((0, 1, 2), (2, 3)), {2}), (((0, 1), ()), set()), (((), ()), set()):
        nodes, caplog.records[:] = several(2), []
        made = [[HostBuffer(w, name=f"w{i}") for i, w in enumerate(weights(0))] for _ in nodes]

        def shard(node: Any, made: Any = made, wanted: Any = wanted) -> list[HostBuffer]:
            Peers(node, CPU).shard(made[node.rank], {made[node.rank][i] for i in wanted[node.rank]})
            return made[node.rank]

        with caplog.at_level(logging.WARNING, LOG):
            for buffers in together(nodes, shard):
                assert {i for i, b in enumerate(buffers) if isinstance(b.bytes, Pieces)} == both
        counts = ", ".join(f"rank {rank}: {len(each)}" for rank, each in enumerate(wanted))
        assert said(caplog) == 2 * any(wanted) * [
            f"The plans of the ranks shard different weights of the 5 from w0 on ({counts}), so the ranks shard the "
            f"{len(both)} that all plans shard. Plans differ with the sizes of the inputs, and with the options. Other parts "
            "are not named"
        ]


def test_a_weight_that_is_unpacked() -> None:
    """Its pieces have the packed bytes."""
    models = [
        offload(stack(layers=2).to(torch.bfloat16).requires_grad_(False), min_bytes=1024, pack=True) for _ in range(2)
    ]
    name, plain = "blocks.0.up.weight", stack(layers=2).to(torch.bfloat16).blocks[0].up.weight.detach()

    def shard(node: Any) -> HostBuffer:
        found = buffer_of(models[node.rank].get_parameter(name))
        assert found is not None
        with node:
            Peers(node, CPU).shard([found], {found})
        return found

    for buffer in together(several(2), shard):
        assert isinstance(buffer.bytes, Pieces) and buffer.bytes.numel() == buffer.nbytes < plain.nbytes
        buffer.unpack()
        assert isinstance(buffer.bytes, torch.Tensor) and torch.equal(buffer.bytes, flat_bytes(plain))


def test_a_wrong_order_of_the_pieces_is_found(monkeypatch: pytest.MonkeyPatch, small_stripes: None) -> None:
    """As one left out, or one that was written: no weight is dealt out then."""
    memories = Peers._memories

    def turned(self: Peers, *given: Any) -> Any:
        held = memories(self, *given)
        return held if self.place else [*held[1:], held[0]]

    monkeypatch.setattr(Peers, "_memories", turned)
    for buffers in sharded(2, lambda _: weights(0)[2:]):
        assert not any(isinstance(b.bytes, Pieces) for b in buffers)


def refuses(rank: int) -> None:
    model, _ = small_twins("wan", Size(layers=1), degree=2)
    with pytest.raises(ChunkflowError, match='peers is True, False or "auto", not 2'):
        offload(model, peers=2)  # type: ignore[arg-type]
    assert placement_of(model) is None
    offload(model, min_bytes=1024, peers=True)
    placement = placement_of(model)
    assert placement is not None and placement.store.peers is not None and placement.store.peers.place == rank
    restore(model)
    assert placement.store.peers is None


def test_offload_meets_the_ranks(on_ranks: Callable[..., None]) -> None:
    on_ranks(refuses)


def test_one_rank_has_no_peers() -> None:
    model, _ = small_twins("wan", Size(layers=1))
    with pytest.raises(ChunkflowError, match="peers needs a process group of several ranks"):
        offload(model, peers=True)


def handle_of(nbytes: int) -> dict[str, Any]:
    """As a rank gets it: what is made of torch's own handle of so many bytes, through JSON."""
    given = (torch.Tensor, torch.Size([nbytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0)
    given += (b"\x00\x01" + bytes(range(64)), nbytes, 512, False, b"/torch_12_3456_0", 64, bytes(64), True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_of_ranks, "reduce_tensor", lambda _: (rebuild_cuda_tensor, given))
        handle: dict[str, Any] = json.loads(json.dumps(peers_of_ranks._handle(torch.empty(nbytes, dtype=torch.uint8))))
    return handle


def test_what_is_opened_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of a handle, for the device of this rank; torch's function takes them all."""
    monkeypatch.setattr(peers_of_ranks, "rebuild_cuda_tensor", lambda **given: given)
    (node, _) = several(2)
    peers = Peers(node, CPU)
    peers._device = torch.device("cuda", 3)
    given: Any = peers._opened(4096, handle_of(4096))
    bound = inspect.signature(rebuild_cuda_tensor).bind(**given).arguments
    assert (bound["storage_device"], bound["tensor_size"], bound["storage_size_bytes"]) == (3, torch.Size([4096]), 4096)
    assert (
        bound["storage_handle"] == b"\x00\x01" + bytes(range(64)) and bound["ref_counter_handle"] == b"/torch_12_3456_0"
    )
    assert (bound["storage_offset_bytes"], bound["ref_counter_offset"], bound["event_handle"]) == (512, 64, bytes(64))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("storage_handle", base64.b64encode(bytes(1 << 20)).decode(), "storage_handle has 1048576 bytes"),
        ("storage_handle", "gASVbG9hZHM=!", "storage_handle is no bytes"),
        ("event_handle", [1, 2], "event_handle is no bytes"),
        ("ref_counter_handle", base64.b64encode(b"/etc/../torch_1_2_3").decode(), "no name of shared memory"),
        ("storage_size_bytes", 4095, "its memory has 4095 bytes, not 4096"),
        ("storage_size_bytes", "4096", "storage_size_bytes is '4096'"),
        ("storage_offset_bytes", -1, "storage_offset_bytes is -1"),
        ("ref_counter_offset", True, "ref_counter_offset is True"),
        ("more", 1, "other fields than a handle"),
    ],
)
def test_what_is_no_handle(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        peers_of_ranks._checked_handle({**handle_of(4096), field: value}, 4096)
    for other in (None, [], "handle", {}):
        with pytest.raises(ValueError, match="other fields than a handle"):
            peers_of_ranks._checked_handle(other, 4096)
