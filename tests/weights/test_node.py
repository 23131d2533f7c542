"""Ranks that find each other to share memory: who is let in, who is not, what is said, and how a file reaches them."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import OwnClock
from conftest import WITHIN
from helpers import fake_ranks
from test_killed_ranks import run_all

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.catalog.small import Size, small_model
from chunkflow_compile.hardware.loopback import join_loopback
from chunkflow_compile.weights import groups, node
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.groups import Group
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.mapping import Descriptor, memory_file
from chunkflow_compile.weights.node import Node, node_of, rendezvous

SIZE = Size(layers=1)
LEAST = 1024
LOG = "chunkflow_compile.weights"


def together(nodes: list[Node], work: Callable[[Node], Any]) -> list[Any]:
    """What each rank gets, on a thread of its own: a result or an error."""

    def tried(each: Node) -> Any:
        try:
            return work(each)
        except ChunkflowError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as threads:
        return [*threads.map(tried, nodes)]


def ranks_meet(near: list[str], store: Any = None, **of_rank: Callable[[int], Any]) -> list[Node | None]:
    """What threads get that meet as ranks, each at a memory node.  ``of_rank``: functions of the module, by rank."""
    current, ranks, store = threading.local(), tuple(range(len(near))), store or dist.HashStore()

    def work(rank: int) -> Node | None:
        current.rank = rank
        return rendezvous(Group(store, rank, ranks, timedelta(seconds=WITHIN)), near[rank])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(near)) as threads:
        for name, value in of_rank.items():
            patch.setattr(node, name, lambda value=value: value(current.rank))
        return [*threads.map(work, ranks)]


def several(count: int) -> list[Node]:
    return [n for n in ranks_meet([""] * count) if n is not None]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(r.getMessage() for r in caplog.records if r.name.startswith(LOG))


def posts(store: Any) -> list[str]:
    """The keys of what ranks have posted and not all have read."""
    return [key for key in store.list_keys() if re.search(r"/[0-9a-f]{16}/\d+/\d+$", key)]


def test_ranks_that_are_near_share(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG)
    store = dist.HashStore()
    met = ranks_meet(["0-7", "8-15", "0-7", "8-15", "16-23"], store)
    assert [None if n is None else n.ranks for n in met] == [(0, 2), (1, 3), (0, 2), (1, 3), None]
    assert not posts(store)
    nodes = [n for n in met if n is not None]
    assert together(nodes, lambda n: n.gather(n.rank)) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert len(said(caplog)) == 5
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    why = (
        "near other memory nodes, each of which has a copy, or of another user, or in a container with other process "
        "numbers (--pid)"
    )
    assert warning == f"rank 4 keeps weights of its own: on this machine, ranks 0, 1, 2, 3 are {why}"
    caplog.clear()
    assert ranks_meet(["0-7", "0-7"], _pid_namespace=lambda rank: f"0 pid:[{rank}]") == [None, None]
    assert said(caplog) == [
        f"rank {rank} keeps weights of its own: on this machine, rank {1 - rank} are {why}" for rank in range(2)
    ]


def test_a_rank_that_was_absent_meets_the_others_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    def come(rank: int) -> Node | None:
        return rendezvous(Group(store, rank, (0, 1, 2), timedelta(seconds=20)))

    def in_vain(clock: OwnClock, rank: int) -> None:
        with pytest.raises(ChunkflowError, match=r"Rank 1 did not place the model within 20 s.*Pass share=False"):
            come(rank)
        clock.over()

    for ranks in ((0, 2), (0, 2), (0, 1, 2), (0, 1, 2)):
        with monkeypatch.context() as patch, ThreadPoolExecutor(len(ranks)) as threads:
            if 1 in ranks:
                assert {n and n.ranks for n in threads.map(come, ranks)} == {ranks}
                continue
            clock = OwnClock(len(ranks))
            patch.setattr(groups, "time", SimpleNamespace(monotonic=clock.now, sleep=clock.sleep))
            [*threads.map(partial(in_vain, clock), ranks)]
    assert not posts(store)


def test_what_ranks_gather() -> None:
    mixed: Mapping[int, Any] = {0: ["a weight"] * 2000, 1: 7, 2: {"rank": 2}, 3: None}
    assert together(several(4), lambda n: n.gather(mixed[n.rank])) == [[*mixed.values()]] * 4


def leaves(n: Node, error: BaseException) -> None:
    """Rank 1 cannot go on, and the others are at different places."""
    with n:
        if n.rank == 1:
            raise error
        n.share(memory_file("chunkflow-test", 4096)) if n.rank else n.gather(0)


def test_a_rank_that_fails_says_why() -> None:
    full = ChunkflowError("The drive is full.")
    assert {str(e) for e in together(several(3), lambda n: leaves(n, full))} == {
        "The drive is full.",
        "The weights are not placed, because rank 1 failed: The drive is full.",
    }


def test_an_interrupted_rank_waits_for_none() -> None:
    nodes, interrupt = several(3), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        leaves(nodes[1], interrupt)
    for error in together(nodes[::2], lambda n: leaves(n, interrupt)):
        assert str(error) == "The weights are not placed, because rank 1 failed: it was interrupted."


def test_a_store_that_has_ended() -> None:
    def gone(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    store = SimpleNamespace(add=gone)
    with pytest.raises(
        ChunkflowError, match=r"store .* cannot be reached \(DistNetworkError: Connection reset by peer"
    ):
        rendezvous(Group(store, 0, (0, 1), timedelta(seconds=WITHIN)))


def test_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    files = together(several(3), lambda n: n.share(memory_file("chunkflow-test", 4096) if n.leads else None))
    os.pwrite(files[0].number, b"weights", 0)
    assert {os.pread(f.number, 7, 0) for f in files} == {b"weights"} and len({f.number for f in files}) == 3
    for file in files:
        with pytest.raises(PermissionError):
            os.ftruncate(file.number, 0)

    def refused(*_: Any) -> Descriptor:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(node, "reopened", refused)
    assert ranks_meet(["", ""]) == [None, None], "ranks that no file reaches share nothing"
    assert said(caplog) == 2 * [
        "each of ranks 0, 1 keeps weights of its own: A file of a rank of this machine cannot be opened in /proc by the "
        "others (rank 0: Permission denied). Pass share=False."
    ]


def test_another_file_is_not_opened(tmp_path: Path) -> None:
    """As under a process number of another container, or a name that another process took."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="another file"):
        node.reopened(str(tmp_path / "pipe"), (0, 0))


def one_fails_early(rank: int) -> None:
    if rank:  # new_group would give the node another name on the ranks then
        dist.new_group([rank], use_local_synchronization=True)
    groups_before, threads = len(dist.distributed_c10d._world.pg_names), len(os.listdir("/proc/self/task"))
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    began = time.monotonic()
    said = "24 gigs' is not a size"
    with pytest.raises(ChunkflowError, match=f"not placed, because rank 1 failed: .*{said}" if rank == 0 else said):
        offload(model, min_bytes=LEAST, share=True, host_memory="24 gigs" if rank else "24GiB")
    assert time.monotonic() - began < WITHIN, "not the half hour of the process group"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for _ in range(3):  # the next time is no worse for it
        offload(model, min_bytes=LEAST, share=True)
        assert buffer_of(model.get_parameter("proj_out.weight")).backing.where is Where.SHARED  # type: ignore[union-attr]
        restore(model)
    assert len(dist.distributed_c10d._world.pg_names) == groups_before, "the node's group has ended"
    assert len(os.listdir("/proc/self/task")) <= threads + 1


def test_a_rank_that_fails_before_it_meets_the_others(on_ranks: Callable[..., None]) -> None:
    on_ranks(one_fails_early)


def in_a_group_of(rank: int, folder: str) -> None:
    dist.init_process_group(init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    assert dist.get_backend() not in ("gloo", "nccl")
    model = offload(small_model("wan", SIZE), min_bytes=LEAST, share=True)
    assert buffer_of(model.get_parameter("proj_out.weight")).backing.where is Where.SHARED  # type: ignore[union-attr]
    dist.barrier()
    os._exit(0)


def test_a_group_with_a_backend_for_each_device(tmp_path: Path) -> None:
    """As ``init_process_group()`` without arguments makes it."""
    assert run_all(in_a_group_of, str(tmp_path)) == [0, 0]


def test_the_ranks_that_run_a_model_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plan all of its ranks, which are none here; by a launcher those of this machine; one process that stands for
    several is one."""
    assert groups.ranks_together() == 1
    with fake_ranks():
        assert groups.ranks_together() == 2
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert groups.ranks_together() == 2
    assert groups.ranks_together() == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    join_loopback(4)
    try:
        assert groups.ranks_together() == 1
    finally:
        dist.destroy_process_group()


def two_ranks_together(rank: int) -> None:
    assert groups.ranks_together() == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")  # the other is on another machine
        assert groups.ranks_together() == 1


def test_real_ranks_run_a_model_together(on_ranks: Callable[..., None]) -> None:
    on_ranks(two_ranks_together)


@pytest.mark.parametrize("share", ["yes", 1, -100, [0, 1]])
def test_share_that_is_no_group(share: object) -> None:
    with pytest.raises(ChunkflowError, match=r"share=.* is no process group that this rank is in: pass True"):
        offload(small_model("wan", SIZE), share=share)


def test_no_group_by_default_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    groups._say_why_none.cache_clear()
    assert node_of(None, torch.device("cuda")) is None and not said(caplog)
    groups._say_why_none.cache_clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for _ in range(2):
        assert node_of(None, torch.device("cuda")) is None
    assert said(caplog) == [
        "each of the 8 ranks of this machine keeps a copy of the weights, because there is no process group yet; call "
        "torch.distributed.init_process_group before offload"
    ]
    groups._say_why_none.cache_clear()


def test_a_rank_that_needs_no_other_places_its_model_after_the_store_has_ended() -> None:
    """As one that places a model after the first rank is done: nobody waits for its word."""
    serving = dist.TCPStore("localhost", 0, 2, True, wait_for_workers=False)
    client = dist.TCPStore("localhost", serving.port, 2, False)
    group = Group(client, 1, (0, 1), timedelta(seconds=5))
    group.record_unshared("Stack", {"share": False})
    waiting = Group(serving, 0, (0, 1), group.timeout)
    assert waiting.find_unshared("Stack", [1]) == (1, {"share": False})
    del serving, waiting
    group.record_unshared("Stack", {"share": False})
    with pytest.raises(groups.StoreEnded, match="cannot be reached"):
        group.post("placing", None)
