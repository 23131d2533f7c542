"""Wan from diffusers with its weights streamed by ChunkFlow, in one process or Ulysses-parallel.

    python examples/diffusers_wan.py
    torchrun --nproc-per-node 2 examples/diffusers_wan.py

The transformer is small and random, so that this runs anywhere; with real weights, replace ``transformer`` by
``WanTransformer3DModel.from_pretrained(..., subfolder="transformer", torch_dtype=torch.bfloat16)`` and, in a pipeline,
set ``pipe.transformer = compiled``.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from needs import need

import chunkflow_compile
from chunkflow_compile.catalog.ulysses import enable_ulysses

STEPS, HEADS = 5, 8


@torch.no_grad()
def main() -> None:
    ranks = need("diffusers", heads=HEADS)
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        freq_dim=64,
        ffn_dim=2048,
        num_layers=12,
        rope_max_seq_len=64,
    ).eval()
    latent, text = torch.randn(1, 16, 2, 32, 32).to(device), torch.randn(1, 64, 64).to(device)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS, device=device)

    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        enable_ulysses(transformer, ranks)

    chunkflow_compile.offload(transformer, device)
    compiled = torch.compile(transformer, backend="chunkflow", fullgraph=True)
    for t in scheduler.timesteps:
        velocity = compiled(latent, t[None], text, return_dict=False)[0]
        latent = scheduler.step(velocity, t, latent, return_dict=False)[0]

    program = chunkflow_compile.programs(transformer)[-1]
    if not dist.is_initialized() or dist.get_rank() == 0:
        plan, total = program.plan, program.program.problem.total_bytes
        step = program.measurements[-1]
        print(f"weights on the device: {plan.device_bytes / 2**20:.1f} of {total / 2**20:.1f} MiB")
        print(f"moved a step: {step.moved_bytes / 2**20:.1f} MiB, waited for weights {step.exposed_h2d_s * 1e3:.1f} ms")
        print(f"step: {step.step_s * 1e3:.1f} ms, latent {latent.mean():+.4f} +- {latent.std():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
