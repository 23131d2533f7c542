"""A Ulysses-parallel diffusion transformer in plain torch, its weights streamed by ChunkFlow.

    torchrun --nproc-per-node 2 examples/ulysses_dit.py
    chunkflow plan examples/ulysses_dit.py:planned --ulysses 2 --hardware cpu

Each rank holds a part of the sequence.  Attention needs all of it, so four all-to-alls per block trade sequence for
heads and back.  They are functional collectives: torch.compile traces them, and ChunkFlow schedules copies around them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional as F

import chunkflow_compile

WIDTH, HEADS, BLOCKS, TOKENS, STEPS = 512, 8, 12, 1024, 5


class Attention(nn.Module):
    """Self-attention over a sequence split over P ranks, ``tokens / P`` on each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (to_heads(projection(x)) for projection in (self.q, self.k, self.v))
        return self.out(to_sequence(F.scaled_dot_product_attention(q, k, v)))


class Block(nn.Module):
    """Attention and MLP, modulated by the timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.table = nn.Parameter(torch.randn(6, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (self.table + modulation).unbind(0)
        x = x + gate_a * self.attention(F.layer_norm(x, (WIDTH,)) * (1 + scale_a) + shift_a)
        return x + gate_m * self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + scale_m) + shift_m)


class UlyssesDiT(nn.Module):
    """Predicts a velocity for this rank's tokens of a latent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.time = nn.Linear(1, 6 * WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x, modulation = self.embed(x), self.time(t).view(6, WIDTH)
        for block in self.blocks:
            x = block(x, modulation)
        return self.head(x)


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """[1, tokens / P, WIDTH] -> [1, HEADS / P, tokens, WIDTH / HEADS]"""
    ranks, tokens = dist.get_world_size(), x.shape[1]
    parts = x.view(tokens, ranks, HEADS // ranks, -1).transpose(0, 1).contiguous()
    whole = funcol.all_to_all_single(parts, None, None, dist.group.WORLD)
    return whole.reshape(1, ranks * tokens, HEADS // ranks, -1).transpose(1, 2)


def to_sequence(x: torch.Tensor) -> torch.Tensor:
    """[1, HEADS / P, tokens, WIDTH / HEADS] -> [1, tokens / P, WIDTH]"""
    ranks, tokens = dist.get_world_size(), x.shape[2]
    parts = x[0].transpose(0, 1).reshape(ranks, tokens // ranks, HEADS // ranks, -1).contiguous()
    mine = funcol.all_to_all_single(parts, None, None, dist.group.WORLD)
    return mine.transpose(0, 1).reshape(1, tokens // ranks, WIDTH)


def planned() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and the keyword arguments of one call on one of P ranks, for ``chunkflow plan`` to trace."""
    tokens = TOKENS // dist.get_world_size()
    return UlyssesDiT().eval(), {"x": torch.randn(1, tokens, 16), "t": torch.ones(1)}


@torch.no_grad()
def main() -> None:
    from needs import need  # not at the top: chunkflow plan loads this file from anywhere

    need(heads=HEADS, least=2)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and noise on every rank
    model = UlyssesDiT().eval()
    noise = torch.randn(1, TOKENS, 16)

    chunkflow_compile.offload(model, "cpu")  # large weights move to host memory; on a GPU, write "cuda"
    compiled = torch.compile(model, backend="chunkflow", fullgraph=True)

    latent = noise.chunk(ranks, dim=1)[rank].contiguous()
    for step in range(STEPS):
        latent = latent - compiled(latent, torch.tensor([1 - step / STEPS])) / STEPS

    program = chunkflow_compile.programs(model)[-1]
    if rank == 0:
        plan, step = program.plan, program.measurements[-1]
        total = program.program.problem.total_bytes
        print(f"weights on the device: {plan.device_bytes / 2**20:.1f} of {total / 2**20:.1f} MiB")
        print(f"moved a step: {step.moved_bytes / 2**20:.1f} MiB, waited for weights {step.exposed_h2d_s * 1e3:.1f} ms")
        print(f"step: {step.step_s * 1e3:.1f} ms, {step.collectives} collectives")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
