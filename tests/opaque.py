"""Ulysses attention whose exchanges are custom ops, as servers have them: opaque to torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from helpers import InTurn
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group

from chunkflow_compile.passes.graph import declared_collectives


@torch.library.custom_op("chunkflow_tests::exchange", mutates_args=())
def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """An all-to-all along the first dimension."""
    moved = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(moved, x.contiguous(), group=_resolve_process_group(group_name))
    return moved


@torch.library.custom_op("chunkflow_tests::exchange_three", mutates_args=())
def exchange_three(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three at once; its argument for the group has a name of its own."""
    return exchange(q, ranks), exchange(k, ranks), exchange(v, ranks)


@torch.library.custom_op("chunkflow_tests::exchange_into", mutates_args=("out",))
def exchange_into(out: torch.Tensor, x: torch.Tensor, group_name: str) -> None:
    """Writes its result."""
    dist.all_to_all_single(out, x.contiguous(), group=_resolve_process_group(group_name))


exchange.register_fake(lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format))
exchange_three.register_fake(lambda q, k, v, ranks: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)))


class OpaqueBlock(nn.Module):
    """As ``helpers.UlyssesBlock``, with an op for q, k and v and another for the way back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.group, self.ranks = dist.group.WORLD.group_name, dist.get_world_size()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        heads, depth = self.heads // self.ranks, width // self.heads
        split = [
            t.view(tokens, self.ranks, heads, depth).transpose(0, 1).contiguous() for t in self.qkv(x).chunk(3, dim=-1)
        ]
        whole = [t.reshape(-1, heads, depth).transpose(0, 1) for t in exchange_three(*split, self.group)]
        attended = nn.functional.scaled_dot_product_attention(*(t[None] for t in whole))[0]
        back = exchange(attended.transpose(0, 1).reshape(self.ranks, tokens, heads, depth), self.group)
        return x + self.out(back.transpose(0, 1).reshape(tokens, width))


class OpaqueStack(InTurn):
    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__(OpaqueBlock(width, heads) for _ in range(layers))


@contextmanager
def declaring(**options: Any) -> Iterator[None]:
    """Both ops are declared inside, and what was declared before is declared again after it."""
    before = dict(declared_collectives._DECLARED)
    try:
        declared_collectives.register_collective(exchange, "all-to-all", **options)
        declared_collectives.register_collective(exchange_three, "all-to-all", **{"group": "ranks", **options})
        yield
    finally:
        declared_collectives._DECLARED.clear()
        declared_collectives._DECLARED.update(before)
