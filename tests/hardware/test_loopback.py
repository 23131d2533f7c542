"""Collectives of one process that stands for all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from chunkflow_compile.hardware.loopback import join_loopback


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    join_loopback(4)
    yield
    dist.destroy_process_group()


def test_peers_send_back_what_they_receive() -> None:
    assert dist.get_world_size() == 4 and dist.get_rank() == 0
    sent, received = torch.randn(8, 3), torch.empty(8, 3)
    assert torch.equal(funcol.wait_tensor(funcol.all_to_all_single(sent, None, None, dist.group.WORLD)), sent)
    dist.all_to_all_single(received, sent)
    assert torch.equal(received, sent)
    gathered = funcol.wait_tensor(funcol.all_gather_tensor(sent, 0, dist.group.WORLD))
    assert torch.equal(gathered, sent.repeat(4, 1))
    dist.barrier()


def test_parts_may_differ_if_both_directions_agree() -> None:
    sent, parts = torch.randn(10), [1, 2, 3, 4]
    assert torch.equal(funcol.wait_tensor(funcol.all_to_all_single(sent, parts, parts, dist.group.WORLD)), sent)
    with pytest.raises((NotImplementedError, RuntimeError), match="splits must be equal"):
        funcol.wait_tensor(funcol.all_to_all_single(sent, parts, parts[::-1], dist.group.WORLD))
