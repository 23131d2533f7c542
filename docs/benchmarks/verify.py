"""Measure the time to verify the program of a Wan model with 60 blocks, alone and with a second program in the same
arena.

python docs/benchmarks/verify.py --out docs/benchmarks/verify.md
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from sixty_blocks import BLOCKS, sixty_blocks
from tabulate import tabulate

from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify, verify_together

RUNS = 5
ABOUT = f"""\
# Time to verify a plan for {BLOCKS} blocks

{{today}}, `make bench`, torch {{torch}}.

[A plan](../glossary.md#plan) for {{title}}, on {{machine}}, is verified. It has {{regions}}
[regions](../glossary.md#region), {{collectives}} collectives and {{chunks}} [chunks](../glossary.md#chunk). The second row
verifies it together with another program in the same [arena](../glossary.md#arena).

```
{{table}}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    title, cut, machine = sixty_blocks()
    smallest, half = (
        rewrite(cut, place(cut.problem, machine, goal))
        for goal in (Goal(slowdown=1.02), Goal(memory=cut.problem.total_bytes // 2))
    )
    times = _times(lambda: verify(smallest))
    proof = verify(smallest)
    rows = [
        ("one program", f"{proof.ops}", f"{proof.edges}", *times),
        ("two in one arena", "", "", *_times(lambda: verify_together(smallest, half))),
    ]
    headers = ("verified", "operations", "edges", "first", "median", f"slowest of {RUNS}")
    table = tabulate(rows, headers=headers, disable_numparse=True)
    chunks = sum(w.streamed_chunks for w in smallest.plan.streamed)
    text = ABOUT.format(
        today=date.today(),
        torch=torch.__version__,
        title=title,
        machine=machine.name,
        regions=len(cut.problem.regions),
        collectives=len(cut.problem.collectives),
        chunks=chunks,
        table=table,
    )
    arguments.out.write_text(text)


def _times(work: Callable[[], object]) -> tuple[str, str, str]:
    """Run a function several times.  Return the seconds of the first run, the median, and the maximum."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return f"{found[0]:.2f} s", f"{statistics.median(found):.2f} s", f"{max(found):.2f} s"


if __name__ == "__main__":
    main()
