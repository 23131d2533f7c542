"""Compile time and step time with all weights resident, against plain torch.compile.

    python docs/benchmarks/compile_and_step.py [--blocks 40] [--repeats 3] [--out docs/benchmarks/compile_and_step.md]

Compile time: a Wan-style model of narrow blocks, each arm in a fresh process with empty caches, in random order.
Step time: both arms in one process, steps interleaved in random order, medians and spread.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.models.small import Size, small_inputs, small_model

ARMS = {"torch.compile (inductor)": "inductor", "chunkflow, all resident": "chunkflow"}
OPTIONS = {"inductor": None, "chunkflow": {"policy": "resident"}}


def compile_once(arm: str, blocks: int) -> float:
    """Seconds to compile and run the first step."""
    size = Size(layers=blocks)
    model, inputs = small_model("wan", size), small_inputs("wan", size, 0)
    with torch.no_grad():
        compiled = torch.compile(model, backend=arm, fullgraph=True, options=OPTIONS[arm])
        start = time.perf_counter()
        compiled(**inputs)
        return time.perf_counter() - start


def measure_compile(blocks: int, repeats: int) -> dict[str, list[float]]:
    runs = [(label, arm) for label, arm in ARMS.items() for _ in range(repeats)]
    random.Random(0).shuffle(runs)
    seconds: dict[str, list[float]] = {label: [] for label in ARMS}
    for label, arm in tqdm(runs, desc="compile"):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--once", arm, "--blocks", str(blocks)]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        seconds[label].append(float(output.split()[-1]))
    return seconds


def measure_steps(size: Size, steps: int) -> dict[str, list[float]]:
    model_inputs = small_inputs("wan", size, 0)
    compiled = {}
    with torch.no_grad():
        for label, arm in ARMS.items():
            model = small_model("wan", size)
            compiled[label] = torch.compile(model, backend=arm, fullgraph=True, options=OPTIONS[arm])
            for _ in range(3):
                compiled[label](**model_inputs)
        seconds: dict[str, list[float]] = {label: [] for label in ARMS}
        order = random.Random(0)
        for _ in tqdm(range(steps), desc=f"step, {size.heads * size.head_dim} wide"):
            for label in order.sample(list(ARMS), len(ARMS)):
                start = time.perf_counter()
                compiled[label](**model_inputs)
                seconds[label].append(time.perf_counter() - start)
    torch._dynamo.reset()
    return seconds


def rows(seconds: dict[str, list[float]]) -> list[dict[str, str]]:
    base = statistics.median(seconds["torch.compile (inductor)"])
    return [
        {
            "arm": label,
            "median": f"{statistics.median(values):.3f} s",
            "min .. max": f"{min(values):.3f} .. {max(values):.3f} s",
            "runs": str(len(values)),
            "ratio to torch.compile": f"{statistics.median(values) / base:.3f}",
        }
        for label, values in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", choices=sorted(OPTIONS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(compile_once(arguments.once, arguments.blocks))
        return
    sizes = {
        "256 wide, 256 tokens, 12 blocks": Size(layers=12, heads=4, head_dim=64, frames=4, height=16, width=16),
        "512 wide, 1,024 tokens, 12 blocks": Size(layers=12, heads=8, head_dim=64, frames=4, height=32, width=32),
    }
    steps = {label: measure_steps(size, arguments.steps) for label, size in sizes.items()}
    compiles = measure_compile(arguments.blocks, arguments.repeats)
    text = "# Compile time and resident step time against plain torch.compile\n\n"
    text += f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} CPU cores ({platform.machine()}), no GPU. "
    text += "Wan-style models from diffusers, random weights, float32, one process. Written by\n`make bench`.\n\n"
    text += f"## Compile and first step, {arguments.blocks} narrow blocks, empty caches\n\n"
    text += tabulate(rows(compiles), headers="keys", tablefmt="github", disable_numparse=True) + "\n"
    for label, seconds in steps.items():
        text += f"\n## A step, {label}, all weights resident\n\n"
        text += tabulate(rows(seconds), headers="keys", tablefmt="github", disable_numparse=True) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
