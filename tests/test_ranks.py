"""The ranks of the tests: the same processes again, until one fails."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import forking
from ranks import Ranks


def changes_its_process(rank: int) -> None:
    torch.set_grad_enabled(True)
    os.environ["CHANGED"] = "1"
    logging.getLogger("chunkflow_compile").addHandler(logging.NullHandler())
    torch.manual_seed(1)
    dist.barrier(dist.new_group([0, 1]))  # a rank that leaves before the other has connected would end that
    dist.destroy_process_group()


def finds_it_as_it_was(rank: int) -> None:
    assert not torch.is_grad_enabled() and "CHANGED" not in os.environ
    assert not any(type(h) is logging.NullHandler for h in logging.getLogger("chunkflow_compile").handlers)
    assert torch.initial_seed() != 1
    everyone = torch.ones(1)
    dist.all_reduce(everyone)
    assert everyone == 2


def test_a_test_leaves_nothing_to_the_next() -> None:
    pair = Ranks(2, forking(), hangs_s=60)
    before = [process.pid for process in pair.processes]
    for work in (changes_its_process, finds_it_as_it_was) * 2:
        pair.run(work, ())
    assert [process.pid for process in pair.processes] == before
    pair.close(kill=True)


def fails(rank: int) -> None:
    assert rank == 0, "what rank 1 says"
    dist.barrier()


def dies(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def hangs(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()


@pytest.mark.parametrize(
    ("work", "hangs_s", "said"),
    [
        (fails, 60, "rank 1 failed:(.|\n)*in fails(.|\n)*what rank 1 says"),
        (dies, 60, "exit code 3"),
        (hangs, 5, "rank 1 hangs after 5 s:\n(.|\n)*in hangs"),
    ],
)
def test_a_rank_that_fails(work: Callable[..., None], hangs_s: float, said: str) -> None:
    pair = Ranks(2, forking(), hangs_s)
    with pytest.raises(AssertionError, match=said):
        pair.run(work, ())
    pair.close(kill=True)


def test_ranks_that_failed_are_replaced(on_ranks: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        on_ranks(fails)
    on_ranks(finds_it_as_it_was)
