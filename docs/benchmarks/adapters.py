"""Measure swaps of LoRA adapters: with ChunkFlow's adapter slots, with diffusers' hotswap, and with slots on an emulated
link.  Takes ten minutes on two cores.

python docs/benchmarks/adapters.py --out docs/benchmarks/adapters.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from runs import timed
from step_cache import as_fast
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters

import chunkflow_compile
from chunkflow_compile import programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.frontend.adapter_slots import Slotted
from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size

SIZE = Size(layers=6, frames=1, heads=16, head_dim=64, text=64, height=32, width=32)
WIDTH = SIZE.heads * SIZE.head_dim
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
RANK = 64
RANKS = (16, 4, 64, 32, 8, 16)
# The rank of the adapter slots in the measurement on the emulated link.
LINK_RANK = 16
# The share of the resident step in which the emulated link would be busy if all weights were copied.
LOAD = 0.7
# The budget as a share of the blocks' weights.  With six blocks, a smaller budget cannot hold two blocks at once.
BUDGET = 0.5
CHUNK = 1 << 20
# LEARNING: calls before the measurement.  CALLS: calls after each swap.  SWAPS: swaps of the adapter.
LEARNING = 8
CALLS = 4
SWAPS = 8

ABOUT = f"""\
# Changing LoRA adapters

Measured on a CPU, with {SIZE.layers} Wan blocks of width {WIDTH} and LoRA adapters on every linear layer.
`make adapters` writes this page.

1. The first table compares `slots` and `hotswap`. `slots` is `enable_adapters(rank={RANK})`, and each [block
   type](../glossary.md#block-type) is compiled once. `hotswap` is diffusers'
   `enable_lora_hotswap(target_rank={RANK})` with `compile_repeated_blocks`. *First* is the time of the first call
   after each of {len(RANKS)} swaps. *Step* is the time of the calls that follow it. *Graphs* counts compiled graphs.
2. The second table uses an emulated PCIe link, a [budget](../glossary.md#budget) of {BUDGET:g} times the weights, and
   [adapter slots](../glossary.md#slot) of rank {LINK_RANK}. *First* is compared with a warm call plus the time to
   copy all slots. *Step* is compared with a model without slots.
"""


def adapter(model: nn.Module, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Return random weights of an adapter, with the names of an adapter file.  ``model``: a model without PEFT layers."""
    rng, state = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, layer in model.named_modules():
        if name.startswith("blocks.") and name.endswith(TARGETS) and isinstance(layer, nn.Linear):
            state[f"transformer.{name}.lora_A.weight"] = 0.01 * torch.randn(rank, layer.in_features, generator=rng)
            state[f"transformer.{name}.lora_B.weight"] = 0.01 * torch.randn(layer.out_features, rank, generator=rng)
    return state


@dataclass
class Arm:
    """A compiled model.  ``swap``: a function that loads the adapter with a given number.  ``graphs``: the number of
    graphs that its calls compiled."""

    model: Any
    swap: Callable[[Any, int], None]
    graphs: int = 0
    first: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def call(self, seed: int) -> float:
        before = counters["stats"]["unique_graphs"]
        found = timed(self.model, small_inputs("wan", SIZE, seed))
        self.graphs += counters["stats"]["unique_graphs"] - before
        return found

    @property
    def moved(self) -> int:
        """The bytes that the latest call copied."""
        return sum(p.measurements[-1].moved_bytes for p in programs(self.model))

    def learn(self) -> None:
        for seed in range(LEARNING):
            self.call(seed)

    def measure(self, number: int) -> None:
        """Swap the adapter, and time the calls that follow."""
        self.swap(self.model, number)
        self.first.append(self.call(number))
        self.steps += [self.call(number) for _ in range(CALLS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    text = f"{ABOUT}\n{date.today()}, {device_name(torch.device('cpu'))}, torch {torch.__version__}.\n"
    for table in (_slots_and_hotswap(), _on_a_link()):
        text += f"\n```\n{table}\n```\n"
    print(text)
    arguments.out.write_text(text)


def _slots_and_hotswap() -> str:
    plain = small_model("wan", SIZE)
    states = [adapter(plain, seed, rank) for seed, rank in enumerate(RANKS)]

    def load(model: Any, number: int) -> None:
        model.load_lora_adapter(_copied(states[number]), adapter_name=f"a{number}")
        model.set_adapters(f"a{number}")

    def hotswap(model: Any, number: int) -> None:
        model.load_lora_adapter(_copied(states[number]), adapter_name="a", hotswap=True)

    slots, swapped = small_model("wan", SIZE), plain
    chunkflow_compile.enable_adapters(slots, rank=RANK)
    chunkflow_compile.compile(slots, policy="resident")
    swapped.enable_lora_hotswap(target_rank=RANK)  # type: ignore[operator]
    swapped.load_lora_adapter(_copied(states[0]), adapter_name="a")  # type: ignore[operator]
    swapped.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    arms = {"slots": Arm(slots, load), "hotswap": Arm(swapped, hotswap)}
    begun = {}
    for name, arm in arms.items():
        arm.learn()
        begun[name] = arm.graphs
    for number in range(len(RANKS)):
        for arm in arms.values():
            arm.measure(number)
    rows = [
        (
            name,
            str(begun[name]),
            str(arm.graphs - begun[name]),
            *_times(arm),
            f"{max(arm.first) / median(arm.steps):.2f}",
        )
        for name, arm in arms.items()
    ]
    return str(tabulate(rows, ("arm", "graphs", "new after swaps", "first", "step", "worst first / step")))


def _on_a_link() -> str:
    torch._dynamo.reset()
    plain = small_model("wan", SIZE)
    states = [adapter(plain, seed, LINK_RANK) for seed in range(2)]
    resident = Arm(plain, _nothing)
    chunkflow_compile.compile(plain, policy="resident")
    resident.learn()
    longest = median(resident.call(seed) for seed in range(CALLS))
    weights = sum(p.nbytes for p in plain.blocks.parameters())  # type: ignore[union-attr]
    link = LinkEmulation(bandwidth=weights / (LOAD * longest))
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "hardware.json"
        profile.write_text(as_fast(link, plain, longest).to_json())
        options = {
            "hardware": str(profile),
            "chunk_bytes": CHUNK,
            "weight_memory": int(BUDGET * weights),
            "replan_after": 4,
        }
        torch._dynamo.reset()
        arms = [Arm(small_model("wan", SIZE), swap) for swap in (_nothing, _choose)]
        chunkflow_compile.enable_adapters(arms[1].model, rank=LINK_RANK)
        for arm in arms:
            chunkflow_compile.compile(arm.model, **options)
        for number, state in enumerate(states):
            arms[1].model.load_lora_adapter(_copied(state), adapter_name=f"a{number}")
        for arm in arms:
            arm.learn()
        for number in range(SWAPS):
            for arm in arms:
                arm.measure(number)
        copied = sum(m.slots.nbytes for m in arms[1].model.modules() if isinstance(m, Slotted))
    without, with_slots = arms
    warm, first, plain_s = median(with_slots.steps), median(with_slots.first), median(without.steps)
    ratio = median(mine / theirs for mine, theirs in zip(with_slots.steps, without.steps, strict=True))
    bound = warm + copied / link.bandwidth
    rows = [
        ("first", seconds(first), seconds(bound), f"{first / bound:.3f}", f"slots of {size(copied)}"),
        (
            "step",
            seconds(warm),
            seconds(plain_s),
            f"{ratio:.3f}",
            f"{size(with_slots.moved)}, {size(without.moved)} without",
        ),
    ]
    return str(tabulate(rows, ("", "measured", "compared with", "ratio", "bytes copied"), disable_numparse=True))


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


def _nothing(model: Any, number: int) -> None:
    """Swap nothing: this arm has no adapter."""


def _choose(model: Any, number: int) -> None:
    model.set_adapters(f"a{number % 2}")


def _times(arm: Arm) -> tuple[str, str]:
    return seconds(median(arm.first)), seconds(median(arm.steps))


if __name__ == "__main__":
    main()
