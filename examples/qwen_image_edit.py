"""Qwen-Image-Edit within the memory of a small card.

python examples/qwen_image_edit.py --memory 16GiB --image photo.png --prompt "make it rain"
python examples/qwen_image_edit.py --tiny # random weights, runs anywhere
"""

from __future__ import annotations

import argparse

import torch
from needs import need

import chunkflow_compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random pipeline")
    parser.add_argument("--memory", help="most bytes on the device, such as 16GiB (default: what is free)")
    parser.add_argument("--image", help="the image to edit (default: one colour)")
    parser.add_argument("--prompt", default="a paper boat on a river")
    arguments = parser.parse_args()
    need("diffusers", "transformers", *([] if arguments.tiny else ["torchvision"]))  # Qwen2VLProcessor imports it
    from PIL import Image

    image = Image.open(arguments.image) if arguments.image else Image.new("RGB", (64, 64), (120, 30, 200))
    if arguments.tiny:
        from small_pipelines import SMALL_PIPELINES, small_pipeline

        pipe, call = small_pipeline("qwen-image-edit"), {**SMALL_PIPELINES["qwen-image-edit"].call}
        options = {"min_bytes": 2048, "lowering": "eager", "memory": arguments.memory or "8MiB"}
    else:
        from diffusers import QwenImageEditPipeline

        pipe, call = QwenImageEditPipeline.from_pretrained("Qwen/Qwen-Image-Edit", torch_dtype=torch.bfloat16), {}
        options = {"memory": arguments.memory}
    chunkflow_compile.compile(pipe, **options)
    call = {**call, "prompt": arguments.prompt, "output_type": "pil"}
    found = pipe(image=image, **call, generator=torch.Generator().manual_seed(0))
    found.images[0].save("edited.png")
    print(chunkflow_compile.explain(pipe))


if __name__ == "__main__":
    main()
