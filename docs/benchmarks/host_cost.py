"""Measure the host time of the executor.  A call of 60 blocks is issued to a stub of a GPU, so that only the executor
takes time.

python docs/benchmarks/host_cost.py --out docs/benchmarks/host_cost.md
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runs import put_section
from sixty_blocks import sixty_blocks
from tabulate import tabulate

from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.runtime import collective_work
from chunkflow_compile.runtime.arena import Arena, Binding
from chunkflow_compile.runtime.cuda import CudaDevice
from chunkflow_compile.runtime.device import DeviceKind
from chunkflow_compile.runtime.device_base import FIRST_STEPS
from chunkflow_compile.runtime.executor import Executor

STEPS = 3 * FIRST_STEPS
PAGE = "Host time per call"
ABOUT = """\
{today}, `python docs/benchmarks/host_cost.py --out docs/benchmarks/host_cost.md`, torch {torch}, one core.

The model is {title}, with half of its weights [resident](../glossary.md#resident):
{regions} [regions](../glossary.md#region) and {chunks} [chunks](../glossary.md#chunk). The table shows the median time that
the executor itself needs to issue one call. The call is predicted to take {step:.1f} s on {machine}. *With measurement*
means the first steps, in which ChunkFlow times its copies and regions. Regions, collectives, copies and CUDA calls are
stubs that take no time. On a GPU they add to the host time (**not measured**).

```
{table}
```
"""


class IdleGpu:
    """A stub that serves as the GPU, its streams and its events.  Every call returns at once."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: self

    def query(self) -> bool:
        return True

    def profiled(self) -> bool:
        return False

    def elapsed_time(self, end: object) -> float:
        return 1.0

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def on(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    named = on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    title, cut, machine = sixty_blocks()
    program = rewrite(cut, place(cut.problem, machine, Goal(memory=cut.problem.total_bytes // 2)))
    predicted = program.plan.predicted
    assert predicted is not None
    times = _issue(program)
    rows = [
        (name, f"{1e3 * statistics.median(found):.1f} ms", f"{100 * statistics.median(found) / predicted.step_s:.2f} %")
        for name, found in (("with measurement", times[1:FIRST_STEPS]), ("without", times[FIRST_STEPS:]))
    ]
    table = tabulate(rows, headers=("step", "host time", "share of the predicted step"), disable_numparse=True)
    chunks = sum(w.streamed_chunks for w in program.plan.streamed)
    text = ABOUT.format(
        today=date.today(),
        torch=torch.__version__,
        title=title,
        regions=len(cut.problem.regions),
        chunks=chunks,
        step=predicted.step_s,
        machine=machine.name,
        table=table,
    )
    put_section(arguments.out, PAGE, "Issuing a call", text)


@dataclass(eq=False)
class Tenant:
    """A stub of a cycle.  It joins an arena, so that the arena allocates slots."""

    plan: Plan
    program: None = None

    def unbind(self) -> None:
        """Do nothing.  The arena never calls this, because no other cycle joins it."""


def _issue(program: Program) -> list[float]:
    """Issue ``STEPS`` calls and return the seconds of each."""
    device: Any = CudaDevice(IdleGpu())
    arena = Arena(make=lambda *_: device)
    tenant = Tenant(replace(program.plan, arena_bytes=1))
    arena.add(tenant, DeviceKind())
    slots = dict.fromkeys([w.name for w in program.plan.streamed], arena.reserve(1))
    regions: dict[str, Callable[..., Sequence[Any]]] = {
        name: partial(_nothing, len(region.outputs)) for name, region in program.regions.items()
    }
    # replace collectives by functions that do nothing, because there is no process group
    with mock.patch.object(collective_work, "explained", lambda *_: lambda *_: None):
        executor = Executor(program, regions, Binding(arena, {}, slots, slots))
    inputs = [None] * len(program.module.graph.find_nodes(op="placeholder"))
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        executor.enqueue([inputs])
        times.append(time.perf_counter() - start)
    return times


def _nothing(outputs: int, inputs: list[Any]) -> Sequence[Any]:
    inputs.clear()
    return [None] * outputs


if __name__ == "__main__":
    main()
