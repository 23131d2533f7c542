"""A transformer in int8, with a LoRA: quantise, compile, then load and switch adapters as ever.

pip install '.[diffusers,adapters]' torchao
python examples/quantised_lora.py --memory 8GiB --lora user/repository
python examples/quantised_lora.py --tiny  # random weights and adapter, runs anywhere
"""

from __future__ import annotations

import argparse

import torch
from needs import need

import chunkflow_compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small random pipeline")
    parser.add_argument("--memory", help="most bytes on the device, such as 8GiB (default: what is free)")
    parser.add_argument("--lora", help="an adapter to load")
    arguments = parser.parse_args()
    need("diffusers", "transformers", "torchao", *(["peft"] if arguments.lora or arguments.tiny else []))
    from PIL import Image
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if arguments.tiny:
        from small_pipelines import SMALL_PIPELINES, small_pipeline

        pipe, call = small_pipeline("wan"), {**SMALL_PIPELINES["wan"].call}
        options = {"min_bytes": 2048, "lowering": "eager", "memory": arguments.memory or "1MiB"}
    else:
        from diffusers import FluxPipeline

        pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16)
        call, options = {"prompt": "a paper boat on a river"}, {"memory": arguments.memory}
    for name in ("blocks", "transformer_blocks", "single_transformer_blocks"):
        if (blocks := getattr(pipe.transformer, name, None)) is not None:
            quantize_(blocks, Int8WeightOnlyConfig())  # all linear layers of the blocks
    chunkflow_compile.compile(pipe, **options)
    call["output_type"] = "np"
    plain = pipe(**call, generator=torch.Generator().manual_seed(0))[0]
    if arguments.lora:
        pipe.load_lora_weights(arguments.lora, adapter_name="style")
    elif arguments.tiny:
        import peft

        pipe.transformer.add_adapter(peft.LoraConfig(r=8, target_modules=["to_q"], init_lora_weights=False), "style")
    changed = pipe(**call, generator=torch.Generator().manual_seed(0))[0]
    for name, found in (("plain", plain), ("lora", changed)):
        picture = found[0] if found[0].ndim == 3 else found[0][0]  # of a video, the first frame
        Image.fromarray((255 * picture).round().astype("uint8")).save(f"{name}.png")
    print(chunkflow_compile.explain(pipe))
    if arguments.tiny:
        print("the adapter changes the result:", bool((plain != changed).any()))


if __name__ == "__main__":
    main()
