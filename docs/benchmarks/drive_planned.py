"""Weights on the drive, planned: one expert of Wan2.2 A14B on 1, 2 and 8 GPUs with three drives; three minutes.

    python docs/benchmarks/drive_planned.py --out docs/benchmarks/drive_planned.md

Nothing is run.  The ranks of a node share the memory and the drive: what one of them reads, the others read as well, at the
same time, so the drive reads each byte once a step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import date
from pathlib import Path

from tabulate import tabulate

from chunkflow_compile.catalog.presets import PRESETS, OutputSizes
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size
from chunkflow_compile.weights.drive import for_the_drive, with_drive

MODEL, MACHINE = "wan2.2-t2v-a14b", "h100-pcie-x2"
SIZE = OutputSizes(height=480, width=832, frames=81)
DEGREES = (1, 2, 8)
DRIVES = (3e9, 7e9, 14e9)
# Of the weights of one expert in host memory.
SHARE = 0.5
# On the device: what is left beside the activations of this size on a card of 24 GiB, less the reserve of torch.
BUDGET = 12 << 30
CHUNK = 16 << 20

ABOUT = f"""\
# Weights on the drive, planned

One expert of `{MODEL}` at {SIZE.height}x{SIZE.width}, {SIZE.frames} frames, on `{MACHINE}` links.
{SHARE:g} of its weights are in host memory, the rest on the drive, at most {BUDGET >> 30} GiB on the device.

`resident`: seconds of a call with all weights on the device. The next columns are in units of it: `in memory`
with all weights in host memory. `whole next block`: layerwise, read ahead as well. Planned, not run.
Written by `python docs/benchmarks/drive_planned.py --out docs/benchmarks/drive_planned.md`.
"""
HEADERS = ("GPUs", "drive", "resident", "in memory", "chunkflow", "whole next block", "read a step", "of a step, read")


def step(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for degree in DEGREES:
        traced = PRESETS[MODEL].trace(degree, SIZE)
        problem, machine = make_cut(traced).problem, load_profile(MACHINE)
        halved = with_drive(problem, for_the_drive(traced.large, int(SHARE * sum(n for _, n in traced.large))))
        memory = place(problem, machine, chunk_bytes=CHUNK, memory=BUDGET)
        assert memory.predicted is not None
        resident = memory.predicted.resident_step_s
        for rate in DRIVES:
            slower = replace(machine, drive_bandwidth=rate)
            plan = place(halved, slower, chunk_bytes=CHUNK, memory=BUDGET)
            try:
                layerwise = f"{step(place(halved, slower, policy='layerwise', chunk_bytes=CHUNK)) / resident:.2f}"
            except ChunkflowError as error:
                layerwise = str(error).partition(":")[0]
            read = [s for s in plan.predicted.spans if s.lane == "read"] if plan.predicted is not None else []
            nbytes = sum(s.end - s.start for s in read) * rate
            rows.append(
                (
                    degree,
                    f"{rate / 1e9:g} GB/s",
                    seconds(resident),
                    f"{step(memory) / resident:.2f}",
                    f"{step(plan) / resident:.2f}",
                    layerwise,
                    size(int(nbytes)),
                    f"{sum(s.end - s.start for s in read) / step(plan):.2f}",
                )
            )
            print(rows[-1], flush=True)
    table = tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True)
    arguments.out.write_text(f"{ABOUT}\n{date.today()}.\n\n{table}\n")


if __name__ == "__main__":
    main()
