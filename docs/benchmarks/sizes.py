"""Count the graphs that a FLUX pipeline with its VAE compiles for each image size, with empty caches.  Takes ten minutes
on two cores.

python docs/benchmarks/sizes.py --out docs/benchmarks/sizes.md
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from runs import in_a_process
from tabulate import tabulate
from torch import nn

from chunkflow_compile import apply, programs
from chunkflow_compile.catalog.sizes import build_model
from chunkflow_compile.hardware.machine import device_name

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from small_pipelines import SMALL_PIPELINES

# Height and width in pixels: a square, and then images of other sizes.
SIZES = ((256, 256), (256, 384), (192, 320), (320, 192))
# The arguments for ``apply``, by arm.
ARMS: Mapping[str, Mapping[str, Any]] = {"dynamic=None": {}, "dynamic=False": {"dynamic": False}}
STEPS = 2
# Like FLUX's decoder, the decoder has four levels, 16 latent channels and three layers per level, but a quarter of the
# channels.
CHANNELS = (32, 64, 128, 128)
LATENTS = 16
TOLERANCE = 1e-4

ABOUT = f"""\
# Several image sizes

A small FLUX pipeline generates one image of each size after another, with `compile(pipe)` and empty caches, on a CPU
(`make sizes`). Each generation runs {STEPS} steps and the VAE. Each cell is the number of graphs that the generation
compiles, and in parentheses the number of [regions](../glossary.md#region) that Inductor lowers. Images are within
{TOLERANCE:.0e} of the images of the unmodified pipeline. Seconds are approximate, because other processes ran at the
same time.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", choices=ARMS, help="run this one here, and print its rows as JSON")
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(_rows(ARMS[arguments.arm])))
        return
    text = f"{ABOUT}\n{date.today()}, {device_name(torch.device('cpu'))}, torch {torch.__version__}.\n"
    for arm in ARMS:
        with TemporaryDirectory() as cache:
            rows = in_a_process(__file__, ["--arm", arm], cache)
        text += f"\n`{arm}`:\n\n```\n{tabulate(rows, headers='keys')}\n```\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def _pipeline() -> Any:
    """Build a small FLUX pipeline whose VAE has the structure of FLUX's VAE."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = SMALL_PIPELINES["flux"].build()
        parts = dict(pipe.components)
        parts["vae"] = build_model(
            "AutoencoderKL",
            latent_channels=LATENTS,
            block_out_channels=CHANNELS,
            down_block_types=("DownEncoderBlock2D",) * len(CHANNELS),
            up_block_types=("UpDecoderBlock2D",) * len(CHANNELS),
            layers_per_block=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.1,
            scaling_factor=1.5,
        )
        config = {**pipe.transformer.config, "in_channels": 4 * LATENTS}
        parts["transformer"] = type(pipe.transformer).from_config(config)
        pipe = type(pipe)(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe


def _rows(given: Mapping[str, Any]) -> list[dict[str, str]]:
    torch.set_num_threads(1)
    pipe, plain = _pipeline(), _pipeline()
    apply(pipe, device="cpu", memory="1GiB", min_bytes=2048, **given)
    models = {name: m for name, m in pipe.components.items() if isinstance(m, nn.Module)}
    seen, rows = set[int](), list[dict[str, str]]()
    for number, (height, width) in enumerate(SIZES):
        call = {"height": height, "width": width, "num_inference_steps": STEPS}
        begin = time.perf_counter()
        picture = SMALL_PIPELINES["flux"].generate(pipe, number, **call)
        row = {"size": f"{height}x{width}", "seconds": f"{time.perf_counter() - begin:.1f}"}
        for name, model in models.items():
            variants = {id(p.variant.regions): _lowered(p) for p in programs(model)}
            fresh = [count for key, count in variants.items() if key not in seen and count]
            seen |= variants.keys()
            row[name] = f"{len(fresh)} ({sum(fresh)})" if fresh else "-"
        difference = float((picture - SMALL_PIPELINES["flux"].generate(plain, number, **call)).abs().max())
        if difference > TOLERANCE:
            raise SystemExit(f"{height}x{width}: off by {difference}")
        rows.append(row)
    return rows


def _lowered(program: Any) -> int:
    """Count the regions that Inductor lowered.  Regions with a single layer, such as a convolution, run eagerly, as
    methods of their graphs."""
    return sum(not inspect.ismethod(region) for region in program.variant.regions.values())


if __name__ == "__main__":
    main()
