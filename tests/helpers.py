"""Programs without a model around them: graphs traced from small modules, and mutations of programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx import GraphModule

from chunkflow_compile.modules import ModelIndex
from chunkflow_compile.options import Options
from chunkflow_compile.passes.discover import discover
from chunkflow_compile.passes.problem import Parameter
from chunkflow_compile.passes.regions import Cut, cut


def traced(model: nn.Module, *inputs: torch.Tensor) -> tuple[GraphModule, list[nn.Parameter], ModelIndex]:
    """The ATen inference graph of a module, as the backend sees it, and its parameters by input."""
    seen: dict[str, Any] = {}

    def keep(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        def compiler(aten: GraphModule, _: Any) -> Any:
            seen["aten"] = aten
            return aten.forward

        seen["inputs"] = list(example_inputs)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return aot_module_simplified(graph, example_inputs, fw_compiler=compiler, inference_compiler=compiler)

    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(*inputs)
    return seen["aten"], seen["inputs"], ModelIndex.of(model)


def cut_of(model: nn.Module, *inputs: torch.Tensor, min_bytes: int = 0, group_bytes: int | None = None) -> Cut:
    """The regions of a module."""
    aten, example_inputs, index = traced(model, *inputs)
    parameters = [
        Parameter(
            index=i,
            names=index.names[id(p)],
            keep="small" if p.numel() * p.element_size() < min_bytes else None,
        )
        for i, p in enumerate(example_inputs)
        if isinstance(p, nn.Parameter)
    ]
    group = Options().group_bytes if group_bytes is None else group_bytes
    return cut(aten, discover(aten, parameters), index.blocks, group)


class Block(nn.Module):
    """A residual MLP of two weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks in a ModuleList between two projections."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UlyssesBlock(nn.Module):
    """Attention over a sequence that is split over the ranks: four all-to-alls, functional collectives."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        q, k, v = (scatter_heads(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return x + self.out(gather_heads(attended).reshape(tokens, width))


def scatter_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[tokens/P, width] -> [heads/P, tokens, width/heads]."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    ranks = dist.get_world_size()
    tokens, width = x.shape
    split = x.view(tokens, ranks, heads // ranks, width // heads).permute(1, 0, 2, 3).contiguous()
    moved = funcol.all_to_all_single(split, None, None, dist.group.WORLD)
    return moved.reshape(ranks * tokens, heads // ranks, width // heads).transpose(0, 1)


def gather_heads(x: torch.Tensor) -> torch.Tensor:
    """[heads/P, tokens, d] -> [tokens/P, heads, d]."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    ranks = dist.get_world_size()
    heads, tokens, depth = x.shape
    split = x.transpose(0, 1).reshape(ranks, tokens // ranks, heads, depth).contiguous()
    moved = funcol.all_to_all_single(split, None, None, dist.group.WORLD)
    return moved.permute(1, 0, 2, 3).reshape(tokens // ranks, ranks * heads, depth)


class UlyssesStack(nn.Module):
    """Ulysses blocks in a ModuleList."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([UlyssesBlock(width, heads) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
