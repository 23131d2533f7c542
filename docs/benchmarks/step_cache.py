"""A step cache over blocks compiled one by one, on an emulated link: what a hit costs.  Two minutes on two cores.

python docs/benchmarks/step_cache.py --out docs/benchmarks/step_cache.md
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch
from tabulate import tabulate
from torch import nn

from chunkflow_compile import courses, offload, programs
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.report.record import seconds, size

SIZE = Size(layers=12, frames=1, heads=8, head_dim=64, text=64, height=32, width=32)
# All weights would keep the link busy for this share of the resident step.
LOAD = 0.7
# Of all bytes of the blocks' weights.
BUDGET = 0.3
CHUNK = 1 << 20
LEARNING = 12

ABOUT = f"""\
# A step cache

{SIZE.layers} Wan blocks with FirstBlockCache on an emulated link, compiled one by one. A *miss* computes all blocks, a *hit*
the first one only. Hits and misses come in turns, or at random with a fixed seed. `resident`: the same with all weights on
the device. `bound`: the longer of the resident time and the time that the link takes for the bytes that were moved in the
step. Medians; an emulated link, no GPU.
"""


@dataclass(frozen=True)
class Measured:
    """One step.  ``moved``: bytes; ``calls``: how many ran."""

    hit: bool
    step_s: float
    moved: int
    calls: int


def cached(model: nn.Module) -> nn.Module:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))  # type: ignore[operator]
    return model


def run(model: nn.Module, hits: Sequence[bool]) -> list[Measured]:
    """Steps that hit or miss the cache as asked: the same input again is a hit."""
    found, inputs = list[Measured](), small_inputs("wan", SIZE, 0)
    for number, hit in enumerate(hits):
        if not hit:
            inputs = small_inputs("wan", SIZE, number + 1)
        before = {id(p): len(p.measurements) for p in programs(model)}
        with model.cache_context("cond"):  # type: ignore[operator]
            begin = time.perf_counter()
            model(**inputs)
            step_s = time.perf_counter() - begin
        new = [m for p in programs(model) for m in p.measurements[before.get(id(p), 0) :]]
        found.append(Measured(hit, step_s, sum(m.moved_bytes + m.primed_bytes for m in new), len(new)))
    return found


def pattern(kind: str, steps: int) -> list[bool]:
    """Whether each step hits; the first never does."""
    if kind == "in turns":
        return [bool(i % 2) for i in range(steps)]
    numbers = random.Random(0)
    return [i > 0 and numbers.random() < 0.5 for i in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    resident = compiled({"policy": "resident"})
    steps = run(resident, pattern("in turns", 12))[4:]
    compute = {hit: median(m.step_s for m in steps if m.hit is hit) for hit in (False, True)}
    weights = sum(w.nbytes for p in programs(resident) for w in p.program.problem.weights if w.keep is None)
    link = LinkEmulation(bandwidth=weights / (LOAD * compute[False]))
    rows, jumps = [], {}
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "hardware.json"
        profile.write_text(on_emulated_link(load_profile(CPU), link, 1).to_json())
        for kind in ("in turns", "at random"):
            options = {"hardware": str(profile), "chunk_bytes": CHUNK, "memory": int(BUDGET * weights)}
            model = compiled(options)
            for _ in range(3):
                run(model, pattern(kind, LEARNING))
                programs(model)[0].arena.courses.settle()
            before = courses(model)[0].jumps
            found = run(model, pattern(kind, arguments.steps))
            jumps[kind] = courses(model)[0].jumps - before
            of = {hit: [m for m in found if m.hit is hit] for hit in (False, True)}
            rows += [_row(kind, hit, of[hit], compute[hit], link.bandwidth) for hit in of]
    head = (
        f"{date.today()}, {device_name(torch.device('cpu'))}, torch {torch.__version__}. {size(weights)} of weights, budget "
        f"{BUDGET:g} of them; link {link.bandwidth / 1e6:.0f} MB/s. Jumps in {arguments.steps} steps: "
        + ", ".join(f"{count} {kind}" for kind, count in jumps.items())
        + "."
    )
    headers = ("steps", "", "step", "resident", "moved", "bound", "of the bound")
    table = tabulate(rows, headers=headers, disable_numparse=True)
    text = f"{ABOUT}\n{head}\n\n```\n{table}\n```\n"
    print(text)
    arguments.out.write_text(text)


def compiled(options: dict[str, Any]) -> nn.Module:
    model = cached(small_model("wan", SIZE))
    offload(model)
    model.compile_repeated_blocks(backend="chunkflow", options=options)  # type: ignore[operator]
    return model


def _row(kind: str, hit: bool, found: Sequence[Measured], compute: float, bandwidth: float) -> tuple[str, ...]:
    step = median(m.step_s for m in found)
    bounds = [max(compute, m.moved / bandwidth) for m in found]
    ratio = median(m.step_s / b for m, b in zip(found, bounds, strict=True))
    moved = size(median(m.moved for m in found))
    return (
        kind,
        "hit" if hit else "miss",
        seconds(step),
        seconds(compute),
        moved,
        seconds(median(bounds)),
        f"{ratio:.3f}",
    )


if __name__ == "__main__":
    main()
