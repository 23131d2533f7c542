"""Ranks that find each other to share memory: who is let in, who is not, what is said, and how a file reaches them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import OwnClock
from conftest import WITHIN
from test_killed_ranks import run_all

from chunkflow_compile import ChunkflowError, offload
from chunkflow_compile.models.small import Size, small_model
from chunkflow_compile.weights import groups, node
from chunkflow_compile.weights.groups import Group
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.mapping import Descriptor, memory_file
from chunkflow_compile.weights.node import Node, meet, node_of

SIZE = Size(layers=1)
LEAST = 1024
LOG = "chunkflow_compile.weights"


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def keys(self) -> list[str]:
        """Those that are left, without the counts of how often each rank has come."""
        return [key for key in self.inner.list_keys() if "/count/" not in key]


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
    found, ranks, store = threading.local(), tuple(range(len(near))), store or Store()

    def work(rank: int) -> Node | None:
        found.rank = rank
        return meet(Group(store, rank, ranks, timedelta(seconds=WITHIN)), near[rank])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(near)) as threads:
        for name, value in of_rank.items():
            patch.setattr(node, name, lambda value=value: value(found.rank))
        return [*threads.map(work, ranks)]


def several(count: int, store: Any = None) -> list[Node]:
    return [n for n in ranks_meet([""] * count, store) if n is not None]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(r.getMessage() for r in caplog.records if r.name.startswith(LOG))


def test_each_memory_node_has_a_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG)
    store = Store()
    found = ranks_meet(["0-7", "8-15", "0-7", "8-15", "16-23"], store)
    assert [None if n is None else n.ranks for n in found] == [(0, 2), (1, 3), (0, 2), (1, 3), None]
    nodes = [n for n in found if n is not None]
    assert together(nodes, lambda n: n.gather(n.rank)) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    for n in nodes:
        n.close()
    assert not store.keys
    assert len(said(caplog)) == 5 and [r.levelname for r in caplog.records].count("WARNING") == 1
    (alone,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert alone == (
        "rank 4 keeps weights of its own: ranks 0, 1, 2, 3 are near other memory nodes of this machine, and each node has a "
        "copy"
    )


def test_a_rank_that_was_absent_meets_the_others_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()

    def come(clock: OwnClock, rank: int) -> Node | None:
        try:
            return meet(Group(store, rank, (0, 1, 2), timedelta(seconds=20)))
        finally:
            clock.over()

    for ranks in ((0, 2), (0, 2), (0, 1, 2), (0, 1, 2)):
        clock = OwnClock(len(ranks))
        monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=clock.now, sleep=clock.sleep))
        with ThreadPoolExecutor(len(ranks)) as threads:
            for met in [threads.submit(come, clock, rank) for rank in ranks]:
                if 1 not in ranks:
                    says = r"Rank 1 did not place the model within 20 s.*Pass share=False"
                    with pytest.raises(ChunkflowError, match=says):
                        met.result()
                    continue
                found = met.result()
                assert found is not None and found.ranks == ranks
                found.close()
    assert not store.keys


def test_ranks_in_different_containers(caplog: pytest.LogCaptureFixture) -> None:
    assert ranks_meet(["0-7", "0-7"], _reach=lambda rank: f"0 pid:[{rank}]") == [None, None]
    assert said(caplog) == [
        f"rank {rank} shares no weights with rank {1 - rank} on this machine: another user, or a container with other "
        "process numbers (--pid)"
        for rank in range(2)
    ]


def test_values_differ() -> None:
    store = Store()
    nodes = several(4, store)
    mixed: Mapping[int, Any] = {0: ["a weight"] * 2000, 1: 7, 2: {"rank": 2}, 3: None}
    assert together(nodes, lambda n: n.gather(mixed[n.rank])) == [[*mixed.values()]] * 4
    for n in nodes:
        n.close()
    assert not store.keys


def test_the_steps_of_the_leader() -> None:
    nodes, done = several(3), list[int]()

    def work(n: Node) -> list[int]:
        for step in range(1, 6):
            if n.leads:
                done.append(step)
                n.step()
            else:
                n.wait(step)
                assert len(done) >= step
        return done

    assert together(nodes, work) == [[1, 2, 3, 4, 5]] * 3


def test_a_rank_that_fails_is_heard_at_once() -> None:
    store = Store()
    nodes = several(3, store)

    def work(n: Node) -> None:
        with n:
            if n.rank == 1:
                raise ChunkflowError("The drive is full.")
            n.wait(1) if n.rank else n.gather(0)

    assert {str(e) for e in together(nodes, work)} == {
        "The drive is full.",
        "The weights are not placed, because rank 1 failed: The drive is full.",
    }
    assert not store.keys


def test_a_rank_that_nobody_has_waited_for_has_ended() -> None:
    """The number of its process is still there."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = {1: (process.pid, node._began(process.pid))}
    first = Node(Group(Store(), 0, (0, 1), timedelta(seconds=WITHIN)), "key", known)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ChunkflowError, match="Rank 1 has ended while the weights were placed"):
        first.gather(0)
    process.wait()


def test_a_store_that_has_ended() -> None:
    nodes = several(2)

    def gone(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    for n in nodes:
        n._store.set = gone
    with pytest.raises(
        ChunkflowError, match=r"store .* cannot be reached .* \(DistNetworkError: Connection reset by peer"
    ):
        nodes[1].gather(1)


def test_a_file_without_a_name() -> None:
    files = together(several(3), lambda n: n.share(memory_file("chunkflow-test", 4096) if n.leads else None))
    os.pwrite(files[0].number, b"weights", 0)
    assert {os.pread(f.number, 7, 0) for f in files} == {b"weights"} and len({f.number for f in files}) == 3
    for file in files:
        with pytest.raises(PermissionError):
            os.ftruncate(file.number, 0)


def test_ranks_that_no_file_reaches_share_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> Descriptor:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(node, "reopened", refused)
    store = Store()
    assert ranks_meet(["", ""], store) == [None, None] and not store.keys
    assert said(caplog) == 2 * [
        "each of ranks 0, 1 keeps weights of its own: A file of rank 0 cannot be opened in /proc by the other ranks of this "
        "machine (Permission denied). Pass share=False."
    ]


def test_another_file_is_not_opened(tmp_path: Path) -> None:
    """As under a process number of another container, or a name that another process took."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="another file"):
        node.reopened(str(tmp_path / "pipe"), (0, 0))


def one_fails_early(rank: int) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    began = time.monotonic()
    said = "24 gigs' is not a size"
    with pytest.raises(ChunkflowError, match=f"not placed, because rank 1 failed: .*{said}" if rank == 0 else said):
        offload(model, min_bytes=LEAST, share=True, host_memory="24 gigs" if rank else "24GiB")
    assert time.monotonic() - began < WITHIN, "not the half hour of the process group"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    offload(model, min_bytes=LEAST, share=True)  # the next time is no worse for it
    assert buffer_of(model.get_parameter("proj_out.weight")).shared is not None  # type: ignore[union-attr]


def test_a_rank_that_fails_before_it_meets_the_others(on_ranks: Callable[..., None]) -> None:
    on_ranks(one_fails_early)


def in_a_group_of(rank: int, folder: str) -> None:
    dist.init_process_group(init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    assert dist.get_backend() not in ("gloo", "nccl")
    model = offload(small_model("wan", SIZE), min_bytes=LEAST, share=True)
    assert buffer_of(model.get_parameter("proj_out.weight")).shared is not None  # type: ignore[union-attr]
    dist.barrier()
    os._exit(0)


def test_a_group_with_a_backend_for_each_device(tmp_path: Path) -> None:
    """As ``init_process_group()`` without arguments makes it."""
    assert run_all(in_a_group_of, str(tmp_path)) == [0, 0]


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
