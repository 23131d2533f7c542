"""FLUX.1 within the memory of a small card: one line more than plain diffusers.

python examples/flux.py --memory 12GiB
python examples/flux.py --tiny            # random weights, runs anywhere
"""

from __future__ import annotations

import argparse

import torch
from needs import need

import chunkflow_compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random pipeline")
    parser.add_argument("--memory", help="most bytes on the device, such as 12GiB (default: what is free)")
    parser.add_argument("--prompt", default="a paper boat on a river")
    arguments = parser.parse_args()
    need("diffusers", "transformers")
    if arguments.tiny:
        from small_pipelines import SMALL_PIPELINES, small_pipeline

        pipe, call = small_pipeline("flux"), {**SMALL_PIPELINES["flux"].call}
        options = {"min_bytes": 2048, "memory": arguments.memory or "2MiB"}
    else:
        from diffusers import FluxPipeline

        pipe, call = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16), {}
        options = {"memory": arguments.memory}
    chunkflow_compile.compile(pipe, **options)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        found = pipe(**{**call, "prompt": arguments.prompt, "output_type": "pil"}, generator=generator)
        found.images[0].save(f"flux_{seed}.png")
    print(chunkflow_compile.explain(pipe))


if __name__ == "__main__":
    main()
