"""Wan 2.2 with both experts, on one GPU or Ulysses-parallel on several.

python examples/wan.py --memory 24GiB
torchrun --nproc-per-node 2 examples/wan.py --memory 24GiB
python examples/wan.py --tiny             # random weights, runs anywhere, also under torchrun
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from needs import need

import chunkflow_compile
from chunkflow_compile.catalog.ulysses import enable_ulysses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random pipeline")
    parser.add_argument("--memory", help="most bytes on the device, such as 24GiB (default: what is free)")
    parser.add_argument("--prompt", default="a paper boat on a river")
    arguments = parser.parse_args()
    ranks = need("diffusers", "transformers", heads=4 if arguments.tiny else 40)
    from PIL import Image

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if arguments.tiny:
        from small_pipelines import SMALL_PIPELINES, small_pipeline

        pipe, call = small_pipeline("wan2.2"), {**SMALL_PIPELINES["wan2.2"].call}
        options = {"min_bytes": 2048, "lowering": "eager", "memory": arguments.memory or "1MiB"}
    else:
        from diffusers import WanPipeline

        name = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
        pipe, call = WanPipeline.from_pretrained(name, torch_dtype=torch.bfloat16), {"height": 480, "width": 832}
        options = {"memory": arguments.memory}
    for transformer in (pipe.transformer, pipe.transformer_2):
        if ranks > 1:
            enable_ulysses(transformer, ranks)
    chunkflow_compile.compile(pipe, device=device, **options)
    found = pipe(
        **{**call, "prompt": arguments.prompt, "output_type": "np"}, generator=torch.Generator().manual_seed(0)
    )
    if local == 0:
        frames = [Image.fromarray((255 * torch.as_tensor(frame)).byte().numpy()) for frame in found.frames[0]]
        frames[0].save("wan.gif", save_all=True, append_images=frames[1:], duration=1000 // 16)  # 16 frames a second
        print(chunkflow_compile.explain(pipe), f"\nframes: {len(frames)}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
