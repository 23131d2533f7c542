"""Compile time, whole and by kind, and step time with all weights resident, against plain torch.compile.

    python docs/benchmarks/compile_and_step.py [--blocks 40] [--repeats 3] [--out docs/benchmarks/compile_and_step.md]

Compile time: a Wan-style model of narrow blocks, from the call to the first output, each arm in a fresh process with
empty caches, in random order; then once more in a second process with the caches that the first one left.
Ten resolutions in turns: the time of their calls, and what was compiled.
Step time: all arms in one process, steps interleaved in random order, medians and spread.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters
from tqdm import tqdm

import chunkflow_compile
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.passes import pipeline

# Weights of narrow blocks count as large.
RESIDENT = {"policy": "resident", "min_bytes": 4096}
RESOLUTIONS = [(8, 12), (16, 8), (16, 16), (12, 20), (24, 16), (20, 12), (8, 24), (12, 12), (16, 20), (28, 8)]
# Blocks of other counts, compiled by kind, for the time that one more block takes.
COUNTS = (20, 60)


def whole_by_torch(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def blocks_by_torch(model: nn.Module) -> Any:
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    return model


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=RESIDENT)


def by_kind(model: nn.Module) -> Any:
    return chunkflow_compile.compile(model, **RESIDENT)


BASE, BY_KIND = "torch.compile, whole", "chunkflow, by kind"
ARMS: dict[str, Callable[[nn.Module], Any]] = {
    BASE: whole_by_torch,
    "torch.compile, repeated blocks": blocks_by_torch,
    "chunkflow, whole": whole,
    BY_KIND: by_kind,
}


def compile_once(arm: str, blocks: int) -> tuple[float, float, float]:
    """Wall seconds from the call to the first output, CPU seconds of the process and its children, and the GiB of host memory
    that the process needed at most, above what it had before."""
    size = Size(layers=blocks)
    model, inputs = small_model("wan", size), small_inputs("wan", size, 0)
    with torch.no_grad():
        expected = model(**inputs)[0]
        held, before, start = peak_gib(), cpu_seconds(), time.perf_counter()
        output = ARMS[arm](model)(**inputs)[0]
        taken = time.perf_counter() - start, cpu_seconds() - before, peak_gib() - held
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-3)
        if any(block._compiled_call_impl is not None for block in model.blocks):
            check_blocks(model, small_model("wan", size), inputs)
    return taken


def check_blocks(model: Any, twin: Any, inputs: dict[str, Any]) -> None:
    """Compare each compiled block of a model with that of its plain twin, on the same inputs."""

    def check(number: int, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
        torch.testing.assert_close(model.blocks[number](*given, **named), output, atol=1e-4, rtol=1e-3)

    for number, block in enumerate(twin.blocks):
        block.register_forward_hook(partial(check, number), with_kwargs=True)
    twin(**inputs)


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_a_process(arm: str, blocks: int, cache: str) -> list[float]:
    """As compile_once, in a process of its own, whose caches are in a folder."""
    command = [sys.executable, __file__, "--once", arm, "--blocks", str(blocks)]
    # Inductor's precompiled header is in the folder for temporary files, whatever its cache folder.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TMPDIR": cache}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [float(x) for x in output.split()[-3:]]


def measure_compile(runs: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], list[list[float]]]:
    """Of each arm and number of blocks: the results of compile_once with empty caches, then with full ones.

    ``runs``: how many times each is run.
    """
    order = [run for run, times in runs.items() for _ in range(times)]
    random.Random(0).shuffle(order)
    seconds: dict[tuple[str, int], list[list[float]]] = {run: [] for run in runs}
    for arm, blocks in tqdm(order, desc="compile"):
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (in_a_process(arm, blocks, cache) for _ in range(2))
        seconds[arm, blocks].append([*cold, *warm])
    return seconds


def measure_steps(size: Size, steps: int) -> dict[str, list[float]]:
    model_inputs = small_inputs("wan", size, 0)
    compiled = {}
    with torch.no_grad():
        for arm, make in ARMS.items():
            compiled[arm] = make(small_model("wan", size))
            for _ in range(4):
                compiled[arm](**model_inputs)
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        order = random.Random(0)
        for _ in tqdm(range(steps), desc=f"step, {size.heads * size.head_dim} wide"):
            for arm in order.sample(list(ARMS), len(ARMS)):
                start = time.perf_counter()
                compiled[arm](**model_inputs)
                seconds[arm].append(time.perf_counter() - start)
    torch._dynamo.reset()
    return seconds


def measure_sizes(size: Size) -> list[tuple[str, float, float, float, int, bool]]:
    """Ten resolutions in two turns, by kind: resolution, seconds of its first call, of planning in it, and of its second
    call, compilations so far, and whether its outputs are those of a model compiled for that size alone."""
    found: dict[str, list[float]] = {}
    planned: dict[str, float] = {}
    compiled, right = {}, {}
    model = by_kind(small_model("wan", size))
    with torch.no_grad():
        for turn in range(2):
            for number, (height, width) in enumerate(tqdm(RESOLUTIONS, desc=f"resolutions, turn {turn + 1}")):
                at = replace(size, height=height, width=width)
                inputs = small_inputs("wan", at, number)
                start = time.perf_counter()
                with planning() as took:
                    output = model(**inputs)[0]
                label = f"{height} x {width}"
                planned.setdefault(label, sum(took))
                found.setdefault(label, []).append(time.perf_counter() - start)
                compiled.setdefault(label, counters["stats"]["unique_graphs"])
                right.setdefault(label, (inputs, output))
        for label, (inputs, output) in tqdm(right.items(), desc="compiled for one size"):
            torch._dynamo.reset()
            expected = chunkflow_compile.compile(small_model("wan", size), dynamic=False, **RESIDENT)(**inputs)[0]
            right[label] = torch.allclose(output, expected, atol=1e-4, rtol=1e-3)
    return [(label, a, planned[label], b, compiled[label], right[label]) for label, (a, b) in found.items()]


@contextmanager
def planning() -> Iterator[list[float]]:
    """The seconds of each plan made inside."""
    plan, took = pipeline.make_plan, list[float]()

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return plan(*arguments, **options)
        finally:
            took.append(time.perf_counter() - start)

    with mock.patch.object(pipeline, "make_plan", timed):
        yield took


def size_table(rows: list[tuple[str, float, float, float, int, bool]]) -> str:
    cells = [
        (at, f"{a:.2f} s", f"{p:.3f} s", f"{b:.3f} s", n, "yes" if right else "NO") for at, a, p, b, n, right in rows
    ]
    headers = (
        "latent",
        "first call",
        "of it planning",
        "second call",
        "graphs compiled so far",
        "as compiled for this size alone",
    )
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def compile_table(found: dict[tuple[str, int], list[list[float]]], blocks: int) -> str:
    medians = {
        arm: [statistics.median(c) for c in zip(*v, strict=True)] for (arm, n), v in found.items() if n == blocks
    }
    rows = [
        (
            arm,
            *(f"{medians[arm][i]:.1f} s" for i in (0, 1, 3, 4)),
            f"{medians[arm][2]:.2f} GiB",
            f"{medians[BASE][0] / medians[arm][0]:.1f}x",
            len(found[arm, blocks]),
        )
        for arm in ARMS
    ]
    headers = ("arm", "wall", "CPU", "second process, wall", "CPU", "host memory", "faster than torch.compile", "runs")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def step_table(seconds: dict[str, list[float]]) -> str:
    base = statistics.median(seconds["chunkflow, whole"])
    rows = [
        (
            arm,
            f"{statistics.median(values):.3f} s",
            f"{min(values):.3f} .. {max(values):.3f} s",
            len(values),
            f"{statistics.median(values) / base:.3f}",
        )
        for arm, values in seconds.items()
    ]
    headers = ("arm", "median", "min .. max", "runs", "ratio to chunkflow, whole")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=("compile", "sizes", "steps"), help="one section of the page")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", choices=sorted(ARMS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(*compile_once(arguments.once, arguments.blocks))
        return
    made = {
        "compile": partial(compile_section, arguments.blocks, arguments.repeats),
        "sizes": partial(sizes_section, arguments.blocks),
        "steps": partial(steps_section, arguments.steps),
    }
    text = "# Compile time, and resident step time, against plain torch.compile\n\n"
    text += f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} CPU cores ({platform.machine()}), no GPU. "
    text += "Wan-style models from diffusers, random weights, float32, one process. Written by\n`make bench`.\n\n"
    text += "\n\n".join(section() for name, section in made.items() if arguments.only in (None, name)) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


def compile_section(blocks: int, repeats: int) -> str:
    runs = {(arm, blocks): repeats for arm in ARMS} | {(BY_KIND, n): repeats for n in COUNTS}
    found = measure_compile(runs | {(BASE, COUNTS[-1]): 1})  # once: it takes minutes
    few, many = (statistics.median(run[0] for run in found[BY_KIND, n]) for n in COUNTS)
    plain = found[BASE, COUNTS[-1]][0][0]
    return (
        f"## From the call to the first output, {blocks} narrow blocks\n\n"
        "Empty caches, then a second process with the caches of the first. CPU seconds include those of children. "
        "Host memory: what the first\nprocess needed at most above what it had before.\n\n"
        f"{compile_table(found, blocks)}\n\n"
        f"By kind, {COUNTS[0]} blocks take {few:.1f} s and {COUNTS[1]} blocks {many:.1f} s: "
        f"{(many - few) / (COUNTS[1] - COUNTS[0]):.3f} s for each more. "
        f"torch.compile took {plain:.1f} s for {COUNTS[1]} blocks,\n{plain / many:.1f} times as long."
    )


def sizes_section(blocks: int) -> str:
    table = size_table(measure_sizes(Size(layers=blocks)))
    about = "With the caches on disk that earlier runs left: without them, the first two calls take seconds more."
    return f"## Ten resolutions in turns, {blocks} narrow blocks, by kind\n\n{about}\n\n{table}"


def steps_section(steps: int) -> str:
    sizes = {
        "256 wide, 256 tokens, 12 blocks": Size(layers=12, heads=4, head_dim=64, frames=4, height=16, width=16),
        "512 wide, 1,024 tokens, 12 blocks": Size(layers=12, heads=8, head_dim=64, frames=4, height=32, width=32),
    }
    return "\n\n".join(
        f"## A step, {label}, all weights resident\n\n{step_table(measure_steps(size, steps))}"
        for label, size in sizes.items()
    )


if __name__ == "__main__":
    main()
