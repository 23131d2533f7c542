"""Measure the host time of a call with 60 blocks, by part, for one graph and for separately compiled block types.

python docs/benchmarks/host_by_part.py --out docs/benchmarks/host_cost.md

The blocks are narrow and run on the CPU with all weights resident and eager lowering.  So compute takes little time, and
no part waits for a device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from host_cost import PAGE
from runs import put_section
from tabulate import tabulate
from torch import nn

import chunkflow_compile
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.runtime import compute_work
from chunkflow_compile.runtime.executor import Executor
from chunkflow_compile.runtime.graph import CompiledGraph
from chunkflow_compile.runtime.single_call import SingleCall

OPTIONS = {"policy": "resident", "min_bytes": 4096, "lowering": "eager"}
PARTS = ("guards, wrappers, and eager code", "runner", "session and cycle", "executor", "regions")
CALLS = 40
ABOUT = """\
{today}, `python docs/benchmarks/host_by_part.py --out docs/benchmarks/host_cost.md`, torch {torch}.

The model has {blocks} narrow blocks of Wan and runs on the CPU with eager lowering. All weights are resident. `whole`
compiles the model as one graph. `by kind` compiles each [block type](../glossary.md#block-type) once, so that each block is
a separate call. Times are medians of {calls} warm calls.

```
{table}
```
"""


class Clock:
    """Measures the seconds inside nested functions.  ``inside``: the seconds of each function, from the outermost to the
    innermost."""

    def __init__(self) -> None:
        self.inside = [0.0] * len(PARTS)

    def around(self, part: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside[part] += time.perf_counter() - start

        return timed

    def own(self) -> list[float]:
        """Return the seconds of each function, excluding the next inner function."""
        return [outer - inner for outer, inner in zip(self.inside, [*self.inside[1:], 0.0], strict=True)]


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    owning = compute_work.owning
    with (
        mock.patch.object(CompiledGraph, "__call__", clock.around(1, CompiledGraph.__call__)),
        mock.patch.object(SingleCall, "run", clock.around(2, SingleCall.run)),
        mock.patch.object(Executor, "run", clock.around(3, Executor.run)),
        mock.patch.object(compute_work, "owning", lambda region, *others: owning(clock.around(4, region), *others)),
    ):
        yield


def measured(make: Callable[[nn.Module], Any], blocks: int) -> list[float]:
    """Return the median seconds of each part in a call."""
    size, clock, found = Size(layers=blocks), Clock(), list[list[float]]()
    inputs = small_inputs("wan", size, 0)
    with torch.no_grad(), watched(clock):
        model = make(small_model("wan", size))
        for call in range(CALLS + 10):
            clock.inside = [0.0] * len(PARTS)
            clock.around(0, model)(**inputs)
            if call >= 10:  # in the first calls, the model is compiled and its cycle is found
                found.append(clock.own())
    torch._dynamo.reset()
    return [statistics.median(part) for part in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arms: dict[str, Callable[[nn.Module], Any]] = {
        "whole": lambda model: torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS),
        "by kind": lambda model: chunkflow_compile.compile(model, **OPTIONS),
    }
    found = {arm: measured(make, arguments.blocks) for arm, make in arms.items()}
    rows = [(part, *(f"{1e3 * found[arm][i]:.2f} ms" for arm in arms)) for i, part in enumerate(PARTS)]
    rows.append(("total", *(f"{1e3 * sum(found[arm]):.2f} ms" for arm in arms)))
    table = tabulate(rows, headers=("part", *arms), disable_numparse=True)
    text = ABOUT.format(today=date.today(), torch=torch.__version__, blocks=arguments.blocks, calls=CALLS, table=table)
    put_section(arguments.out, PAGE, "Host time by part", text)


if __name__ == "__main__":
    main()
