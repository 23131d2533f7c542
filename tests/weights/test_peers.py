"""Ranks that find each other to share memory: who is let in, who is not, and what is said."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import WITHIN
from test_killed_ranks import run_all

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.models.small import Size, small_model
from chunkflow_compile.weights import peers
from chunkflow_compile.weights.home import home_of
from chunkflow_compile.weights.peers import Meeting, Peers, meet, peers_of

SIZE = Size(layers=1)
LEAST = 1024
GROUP = "chunkflow_compile.weights.peers"


def ranks_meet(near: list[str], seconds: float = 20, **of_rank: Callable[[int], Any]) -> list[Peers | None]:
    """What threads get that meet as ranks, each at a memory node.  ``of_rank``: functions of the module, by rank."""
    store, ranks = dist.HashStore(), tuple(range(len(near)))
    found = threading.local()

    def work(rank: int) -> Peers | None:
        found.rank = rank
        return meet(Meeting(store, rank, ranks, timedelta(seconds=seconds)), near[rank])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(near)) as threads:
        for name, value in of_rank.items():
            patch.setattr(peers, name, lambda value=value: value(found.rank))
        return [*threads.map(work, ranks)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(r.getMessage() for r in caplog.records if r.name == GROUP)


def test_each_memory_node_has_a_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, GROUP)
    found = ranks_meet(["0-7", "8-15", "0-7", "8-15", "16-23"])
    assert [None if p is None else p.ranks for p in found] == [(0, 2), (1, 3), (0, 2), (1, 3), None]
    with ThreadPoolExecutor(4) as threads:
        told = [*threads.map(lambda p: p.gather(p.rank), [p for p in found if p is not None])]
    assert told == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for p in found:
        if p is not None:
            p.close()
    assert len(said(caplog)) == 5 and [r.levelname for r in caplog.records].count("WARNING") == 1
    (alone,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert alone == (
        "rank 4 keeps weights of its own: ranks 0, 1, 2, 3 are near other memory nodes of this machine, and each node has a "
        "copy"
    )


@pytest.mark.parametrize("missed", [1, 2])
def test_a_rank_that_was_absent_meets_the_others_the_next_time(missed: int) -> None:
    store = dist.HashStore()

    def come(rank: int, seconds: float = 20) -> Peers | None:
        return meet(Meeting(store, rank, (0, 1, 2), timedelta(seconds=seconds)))

    for _ in range(missed):
        with ThreadPoolExecutor(2) as threads:
            for met in [threads.submit(come, rank, 0.5) for rank in (0, 2)]:
                with pytest.raises(ChunkflowError, match="Rank 1 did not place the model within 0 s"):
                    met.result()
    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            for peers_ in threads.map(come, range(3)):
                assert peers_ is not None and peers_.ranks == (0, 1, 2)
                peers_.close()


@pytest.mark.parametrize("near", [["", ""], ["0-7", "0-7"]])
def test_ranks_in_different_containers(caplog: pytest.LogCaptureFixture, near: list[str]) -> None:
    assert ranks_meet(near, _network=lambda rank: f"net:[{rank}]") == [None, None]
    assert said(caplog) == [
        f"rank {rank} shares no weights with rank {1 - rank} on this machine: another user, or another network name space"
        for rank in range(2)
    ]


def in_two_containers(rank: int) -> None:
    network = peers._network()
    peers._network = lambda: network + str(rank)
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    offload(model, min_bytes=LEAST, share=True)
    homes = [home for p in model.parameters() if (home := home_of(p)) is not None]
    assert homes and not any(home.shared for home in homes)
    with torch.no_grad():
        for m in (model, twin):
            next(m.parameters()).mul_(2)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_weights_are_private_where_no_peer_is_reached(on_ranks: Callable[..., None]) -> None:
    on_ranks(in_two_containers)


def as_another_user(work: Callable[[], None]) -> None:
    """Run ``work`` in a process of another user."""
    child = os.fork()
    if not child:
        try:
            os.setgid(65534)
            os.setuid(65534)
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


@needs_root
def test_an_impostor_is_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    """Anyone can read the name of the socket, and connect."""
    listener, name = peers._listener()
    got = os.pipe()

    def impostor() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(f"\0{name}")
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                link.sendall(peers._LENGTH.pack(1))
                link.recv(1)  # until the leader hangs up
            os.write(got[1], b"out")

    with listener, ThreadPoolExecutor(2) as threads:
        leader = threads.submit(peers._accepted, listener, [1], 20)
        as_another_user(impostor)
        assert os.read(got[0], 3) == b"out" and not leader.done()
        link = peers._connected(1, 0, name, 20)
        links = leader.result()
    assert said(caplog) == ["a process of user 65534 asked for the weights, and was turned away"]
    for made in (link, *links.values()):
        made.close()
    for end in got:
        os.close(end)


@needs_root
def test_memory_is_not_taken_from_another_user() -> None:
    """Who takes the name of a leader that has ended."""
    ready, over = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            _held, name = peers._listener()
            os.write(ready[1], name.encode())
            os.read(over[0], 1)
        finally:
            os._exit(0)
    name = os.read(ready[0], 100).decode()
    try:
        with pytest.raises(ChunkflowError, match=r"Rank 0 has ended, and user 65534 answers in its place"):
            peers._connected(1, 0, name, 5)
    finally:
        os.write(over[1], b"o")
        os.waitpid(child, 0)
        for end in (*ready, *over):
            os.close(end)


def one_fails_early(rank: int) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    began = time.monotonic()
    said = "24 gigs' is not a size"
    with pytest.raises(ChunkflowError, match=f"not placed, because rank 1 failed: .*{said}" if rank == 0 else said):
        offload(model, min_bytes=LEAST, share=True, host_memory="24 gigs" if rank else "24GiB")
    assert time.monotonic() - began < WITHIN, "not the half hour of the process group"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    offload(model, min_bytes=LEAST, share=True)  # the next time is no worse for it
    assert home_of(model.get_parameter("proj_out.weight")).shared is not None  # type: ignore[union-attr]


def test_a_rank_that_fails_before_it_meets_the_others(on_ranks: Callable[..., None]) -> None:
    on_ranks(one_fails_early)


def in_a_group_of(rank: int, folder: str, backend: str | None) -> None:
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    assert dist.get_backend() not in ("gloo", "nccl")
    model = offload(small_model("wan", SIZE), min_bytes=LEAST, share=True)
    assert home_of(model.get_parameter("proj_out.weight")).shared is not None  # type: ignore[union-attr]
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_a_group_with_a_backend_for_each_device(tmp_path: Path, backend: str | None) -> None:
    """As ``init_process_group()`` without arguments makes it."""
    assert run_all(in_a_group_of, str(tmp_path), backend) == [0, 0]


@pytest.mark.parametrize("share", ["yes", 1, -100, [0, 1]])
def test_share_that_is_no_group(share: object) -> None:
    with pytest.raises(ChunkflowError, match=r"share=.* is no process group that this rank is in: pass True"):
        offload(small_model("wan", SIZE), share=share)


def test_no_group_by_default_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    peers._say_why_none.cache_clear()
    assert peers_of(None, torch.device("cuda")) is None and not said(caplog)
    peers._say_why_none.cache_clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for _ in range(2):
        assert peers_of(None, torch.device("cuda")) is None
    assert said(caplog) == [
        "each of the 8 ranks of this machine keeps a copy of the weights, because there is no process group yet; call "
        "torch.distributed.init_process_group before offload"
    ]
    peers._say_why_none.cache_clear()
