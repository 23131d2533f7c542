"""Measure step caches with a model that is compiled by block type, on an emulated link.  Takes six minutes on two cores.

python docs/benchmarks/step_cache.py --out docs/benchmarks/step_cache.md
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from runs import timed
from step_caches import STEP_CACHES, step_cache
from tabulate import tabulate
from torch import nn

import chunkflow_compile
from chunkflow_compile import cycles, programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.report.record import seconds

SIZE = Size(layers=12, frames=1, heads=8, head_dim=64, text=64, height=32, width=32)
# The share of the resident step in which the emulated link would be busy if all weights were copied.
LOAD = 0.7
# The budget, as a share of the bytes of the blocks' weights.
BUDGET = 0.3
CHUNK = 1 << 20
# STEPS: steps per generation.  LEARNING: generations before the measurement.  ROUNDS: measured generations.
STEPS = 20
LEARNING = 6
ROUNDS = 3

ABOUT = f"""\
# Step caches

{SIZE.layers} Wan blocks run with each step cache of diffusers, on a CPU (`make step-cache`). Each
[block type](../glossary.md#block-type) is compiled once. A generation has {STEPS} steps.

* A *miss* computes a whole step. A *hit* computes a part of it: the first block (FirstBlockCache), no block
  (MagCache), or all blocks without attention (the others).
* *Bound* is the step time with all weights [resident](../glossary.md#resident), or the time in which the emulated
  link copies the bytes of the step, whichever is longer.
* The emulated link would be busy for {LOAD} of a resident miss if it copied all weights. The
  [budget](../glossary.md#budget) is {BUDGET:g} times the weights.
* *Jumps* counts calls out of order in the [cycle](../glossary.md#cycle) of blocks, per generation.
* Figures are medians of {ROUNDS} generations, after {LEARNING} that are not measured.
"""


@dataclass
class Clock:
    """The current step.  The caches that skip attention call :meth:`timestep`."""

    step: int = 0

    def timestep(self) -> int:
        return (
            1000 if self.step < 2 else 500
        )  # attention is skipped at timesteps below 900, so not in the first two steps


# A title, the name of the cache, and a function that says whether a step gets the inputs of the previous step.
Kind = tuple[str, str, Callable[[int], bool]]


def kinds() -> list[Kind]:
    """Return each cache with a pattern of steps.  FirstBlockCache hits in a step that gets the inputs of the previous
    step."""
    numbers = random.Random(0)
    same = [step > 0 and numbers.random() < 0.5 for step in range(STEPS)]
    first, *others = STEP_CACHES
    return [
        (f"{first}, in turns", first, lambda step: step % 2 == 1),
        (f"{first}, at random", first, lambda step: same[step]),
        *((name, name, lambda step: False) for name in others),
    ]


@dataclass(frozen=True)
class Measured:
    """The time of a step, and the bytes that it copies."""

    step_s: float
    moved: int


class Cached:
    """A model with a step cache, compiled by block type."""

    def __init__(self, kind: Kind, options: dict[str, Any]) -> None:
        _, cache, self.same = kind
        self.clock = Clock()
        self.model = small_model("wan", SIZE)
        self.model.enable_cache(step_cache(cache, self.clock.timestep, STEPS))  # type: ignore[operator]
        chunkflow_compile.compile(self.model, **options)

    def generation(self) -> list[Measured]:
        """Run a generation that starts with an empty cache; return its steps."""
        self.model._reset_stateful_cache()  # type: ignore[operator]
        found, inputs = list[Measured](), small_inputs("wan", SIZE, 0)
        for step in range(STEPS):
            self.clock.step = step
            if not self.same(step):
                inputs = small_inputs("wan", SIZE, step + 1)
            before = self.moved_bytes
            with self.model.cache_context("cond"):  # type: ignore[operator]
                step_s = timed(self.model, inputs)
            found.append(Measured(step_s, self.moved_bytes - before))
        return found

    @property
    def moved_bytes(self) -> int:
        """The bytes copied so far."""
        placement = placement_of(self.model)
        assert placement is not None
        return placement.store.counts.moved_bytes

    def learn(self) -> None:
        for _ in range(LEARNING):
            self.generation()

    @property
    def jumps(self) -> int:
        return sum(route.jumps for route in cycles(self.model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="caches with this in their name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = list[tuple[str, ...]]()
    for kind in kinds():
        if arguments.only in kind[0]:
            torch._dynamo.reset()
            rows.append(_row(kind))
    headers = ("cache", "miss", "miss / bound", "hit", "hit / bound", "jumps")
    table = tabulate(rows, headers=headers, disable_numparse=True)
    text = f"{ABOUT}\n{date.today()}, {device_name(torch.device('cpu'))}, torch {torch.__version__}.\n\n```\n{table}\n```\n"
    print(text)
    arguments.out.write_text(text)


def _row(kind: Kind) -> tuple[str, ...]:
    """Return the row of a cache.  Generations of a streamed model and of a resident model alternate in random order, and
    their steps are compared in pairs."""
    resident = Cached(kind, {"policy": "resident"})
    resident.learn()
    longest = max(m.step_s for m in resident.generation())
    weights = sum(p.nbytes for p in resident.model.blocks.parameters())  # type: ignore[union-attr]
    link = LinkEmulation(bandwidth=weights / (LOAD * longest))
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "hardware.json"
        profile.write_text(as_fast(link, resident.model, longest).to_json())
        streamed = Cached(
            kind,
            {"hardware": str(profile), "chunk_bytes": CHUNK, "weight_memory": int(BUDGET * weights), "replan_after": 4},
        )
        streamed.learn()
        before, pairs, order = streamed.jumps, list[Pair](), random.Random(0)
        for _ in range(ROUNDS):
            found = {arm: arm.generation() for arm in order.sample((resident, streamed), 2)}
            pairs += [
                Pair(step, link.bandwidth, *both)
                for step, both in enumerate(zip(found[resident], found[streamed], strict=True))
            ]
        jumps = (streamed.jumps - before) / ROUNDS
    return (kind[0], *_figures(pairs, hit=False), *_figures(pairs, hit=True), f"{jumps:.0f}")


def as_fast(link: LinkEmulation, resident: nn.Module, longest: float) -> Hardware:
    """Return a profile of this CPU with an emulated link.  Its rates are scaled so that a step of the compiled model
    ``resident`` is predicted to take ``longest`` seconds."""
    machine = on_emulated_link(load_profile(CPU), link, 1)
    plans = [p.plan.predicted for p in programs(resident)]  # predictions for one call of each program
    ratio = longest / sum(p.resident_step_s for p in plans if p is not None)
    peaks = {dtype: peak / ratio for dtype, peak in machine.gemm_flops.items()}
    return replace(machine, gemm_flops=peaks, memory_bandwidth=machine.memory_bandwidth / ratio)


@dataclass(frozen=True)
class Pair:
    """A step of the resident model, and the same step of the streamed model.  ``bandwidth``: bytes/s of the emulated
    link."""

    number: int
    bandwidth: float
    resident: Measured
    streamed: Measured

    @property
    def bound_s(self) -> float:
        return max(self.resident.step_s, self.streamed.moved / self.bandwidth)


def _figures(pairs: Sequence[Pair], *, hit: bool) -> tuple[str, str]:
    """Return, for hits or for misses, the median step time and its median ratio to the bound, as text."""
    steps = [median(p.resident.step_s for p in pairs if p.number == number) for number in range(STEPS)]
    middle = (max(steps) + min(steps)) / 2
    chosen = [p for p in pairs if (steps[p.number] < middle) is hit]
    ratio = median(p.streamed.step_s / p.bound_s for p in chosen)
    return seconds(median(p.streamed.step_s for p in chosen)), f"{ratio:.3f}"


if __name__ == "__main__":
    main()
