"""Measure how a model compiled by block type handles new input sizes, and compare resident step times with torch.compile.

    python docs/benchmarks/compile_and_step.py [--blocks 40] [--out docs/benchmarks/compile_and_step.md]

The script first_step.py measures the time of the first step.  The first section runs ten resolutions one after the other,
and then other batch sizes, with a budget of half of the weights.  It measures the time of each call and counts compiled
graphs, in a separate process with empty caches.  The second section measures step times: all arms run in one process, and
their steps alternate in random order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runs import in_a_process, put_section, timed
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters
from tqdm import tqdm

import chunkflow_compile
from chunkflow_compile import cycles
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.frontend.block_kinds import between_hooks, parts_of, repeated_blocks
from chunkflow_compile.passes import planning as plan_making

# The options of a resident model.  ``min_bytes`` is small, so that the weights of narrow blocks count as large.
RESIDENT = {"policy": "resident", "min_bytes": 4096}
# The batch size and the height and width of the latents, for ten resolutions and for other batch sizes.
RESOLUTIONS = [
    (2, *size)
    for size in ((8, 12), (16, 8), (16, 16), (12, 20), (24, 16), (20, 12), (8, 24), (12, 12), (16, 20), (28, 8))
]
BATCHES = [(3, 16, 16), (1, 16, 16)]
ABOUT = """\
{today}, torch {torch}, {cores} CPU cores, no GPU; `make bench`. The weights are random, in float32.
"""
SIZES_TEXT = """\
The model has {blocks} narrow blocks of Wan. Each [block type](../glossary.md#block-type) is compiled once, with empty
caches. The [budget](../glossary.md#budget) is {budget:.1f} MB, half of the weights. A warm step copies {moved:.1f} MB. For
each size, the outputs equal the outputs of a model that is compiled for this size alone.

```
{table}
```

*Graphs* is the number of graphs compiled so far. The second size recompiles with dynamic shapes. A new batch size
recompiles once more, and so does a batch of one. All other sizes need only a [new plan](../glossary.md#plan)."""
STEPS_TEXT = """\
The model has 12 blocks of Wan, and all weights are [resident](../glossary.md#resident). Each cell is the median of {steps}
runs; the arms take turns in one process. Ratios are relative to `chunkflow, whole`. The slowest run of an arm took
{spread:.2f} times its median.

```
{table}
```

`by kind` compiles each block type once. The last arm compiles the same modules as `chunkflow, by kind`, but with
`torch.compile`: it shows what Dynamo's guards and wrappers cost in each call."""


def whole_by_torch(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def blocks_by_torch(model: nn.Module) -> Any:
    model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    return model


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=RESIDENT)


def by_kind(model: nn.Module) -> Any:
    return chunkflow_compile.compile(model, **RESIDENT)


def same_by_torch(model: nn.Module) -> Any:
    """Compile the modules that ``by_kind`` compiles, but with torch.compile.  This shows the cost of separate calls
    without ChunkFlow.

    Modules that torch defines, such as Linear, are left out, because Dynamo does not compile them separately.
    """
    blocks = repeated_blocks(model)
    compiled = between_hooks(blocks, RESIDENT["min_bytes"])
    for module in (*compiled.values(), *parts_of(model, blocks.values(), RESIDENT["min_bytes"]).values()):
        if not type(module).__module__.startswith("torch.nn."):
            module.compile(fullgraph=True)
    return model


ARMS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile, whole": whole_by_torch,
    "torch.compile, repeated blocks": blocks_by_torch,
    "chunkflow, whole": whole,
    "chunkflow, by kind": by_kind,
    "torch.compile, the modules of by kind": same_by_torch,
}


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
                seconds[arm].append(timed(compiled[arm], model_inputs))
    torch._dynamo.reset()
    return seconds


def measure_sizes(blocks: int) -> dict[str, Any]:
    """Run each resolution twice and then each batch size twice, compiled by block type with a budget of half of the
    weights.

    Returns a row for each size: its label, the seconds of the first call, of planning in the first call, and of the
    second call, the number of graphs compiled so far, and whether the outputs equal those from a model that is compiled
    for this size alone.
    """
    size = Size(layers=blocks)
    model = small_model("wan", size)
    budget = sum(p.nbytes for p in model.parameters()) // 2
    options = {"min_bytes": RESIDENT["min_bytes"], "weight_memory": budget}
    found: dict[str, list[Any]] = {}
    outputs = dict[str, Any]()
    run: Any = chunkflow_compile.compile(model, **options)
    with torch.no_grad():
        for sizes, turn in itertools.product((RESOLUTIONS, BATCHES), range(2)):
            for batch, height, width in tqdm(sizes, desc=f"sizes, turn {turn + 1}"):
                inputs = small_inputs("wan", replace(size, batch=batch, height=height, width=width), len(outputs))
                label, start = f"{batch} x {height} x {width}", time.perf_counter()
                with planning() as took:
                    output = run(**inputs)[0]
                seconds = time.perf_counter() - start
                if turn:
                    found[label].insert(3, seconds)
                else:
                    found[label] = [label, seconds, sum(took), counters["stats"]["unique_graphs"]]
                    outputs[label] = inputs, output
        moved = sum(route.cycle.plan.moved_bytes for route in cycles(model)[:1])
        assert moved > 0, "nothing streams"
        for label, (inputs, output) in tqdm(outputs.items(), desc="compiled for one size"):
            torch._dynamo.reset()
            expected = chunkflow_compile.compile(small_model("wan", size), dynamic=False, **options)(**inputs)[0]
            found[label].append(torch.allclose(output, expected, atol=1e-4, rtol=1e-3))
    return {"rows": list(found.values()), "budget": budget, "moved": moved}


@contextmanager
def planning() -> Iterator[list[float]]:
    """Yield a list to which each plan made by this thread in the context adds its seconds."""
    place, took, thread = plan_making.place, list[float](), threading.current_thread()

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return place(*arguments, **options)
        finally:
            if threading.current_thread() is thread:
                took.append(time.perf_counter() - start)

    with mock.patch.object(plan_making, "place", timed):
        yield took


def size_table(rows: list[list[Any]]) -> str:
    """Return a table with one row for each size that compiled graphs.  The sizes after it that compiled nothing share a
    row."""
    cells = []
    for _, same in itertools.groupby(rows, key=lambda row: row[4]):
        first, *others = same
        cells += [_cells(group) for group in ([first], others) if group]
    headers = ("batch and latent", "first call", "planning in it", "second call", "graphs")
    return tabulate(cells, headers=headers, disable_numparse=True)


def _cells(rows: list[list[Any]]) -> tuple[Any, ...]:
    label = rows[0][0] if len(rows) == 1 else f"{len(rows)} more"
    return label, *(_range([row[i] for row in rows], digits) for i, digits in ((1, 2), (2, 3), (3, 3))), rows[0][4]


def _range(values: list[float], digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{least} s" if len(values) == 1 else f"{least} to {most} s"


def step_table(found: dict[str, dict[str, list[float]]]) -> str:
    """Return the table of step times.  ``found``: for each model, the seconds of all steps by arm."""
    rows = []
    for arm in ARMS:
        row = [arm]
        for seconds in found.values():
            middle = statistics.median(seconds[arm])
            row += [f"{middle:.3f} s", f"{middle / statistics.median(seconds['chunkflow, whole']):.3f}"]
        rows.append(row)
    headers = ("arm", *(cell for label in found for cell in (label, "ratio")))
    return tabulate(rows, headers=headers, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", choices=("sizes", "steps"), help="one section of the page")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sizes_only:
        print(json.dumps(measure_sizes(arguments.blocks)))
        return
    made = {
        "sizes": ("Ten resolutions, then other batch sizes", partial(sizes_section, arguments.blocks)),
        "steps": ("Step time with all weights resident", partial(steps_section, arguments.steps)),
    }
    title = "Input sizes and resident step time, compared with torch.compile"
    about = ABOUT.format(today=date.today(), torch=torch.__version__, cores=os.cpu_count())
    for name, (heading, section) in made.items():
        if arguments.only in (None, name):
            print(text := f"{about}\n{section()}")
            if arguments.out:
                put_section(arguments.out, title, heading, text)


def sizes_section(blocks: int) -> str:
    with tempfile.TemporaryDirectory() as cache:
        found = in_a_process(__file__, ("--sizes-only", "--blocks", str(blocks)), cache)
    wrong = [label for label, *_, right in found["rows"] if not right]
    assert not wrong, f"other outputs than those of a model compiled for one size: {wrong}"
    return SIZES_TEXT.format(
        blocks=blocks,
        budget=found["budget"] / 1e6,
        moved=found["moved"] / 1e6,
        table=size_table(found["rows"]),
    )


def steps_section(steps: int) -> str:
    sizes = {
        "256 wide, 256 tokens": Size(layers=12, heads=4, head_dim=64, frames=4, height=16, width=16),
        "512 wide, 1,024 tokens": Size(layers=12, heads=8, head_dim=64, frames=4, height=32, width=32),
    }
    found = {label: measure_steps(size, steps) for label, size in sizes.items()}
    spread = max(max(s) / statistics.median(s) for seconds in found.values() for s in seconds.values())
    return STEPS_TEXT.format(steps=steps, spread=spread, table=step_table(found))


if __name__ == "__main__":
    main()
