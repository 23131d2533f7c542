"""Weights on the drive, planned: one expert of Wan2.2 A14B on 1, 2 and 8 GPUs with three drives; three minutes.

    python docs/benchmarks/drive_planned.py --out docs/benchmarks/drive.md

Nothing is run.  The ranks of a node share the memory and the drive: what one of them reads, the others read as well, at the
same time, so the drive reads each byte once a step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import date
from pathlib import Path

from runs import put_section
from tabulate import tabulate

from chunkflow_compile.catalog.presets import PRESETS, OutputSizes
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.record import seconds
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
`python docs/benchmarks/drive_planned.py --out docs/benchmarks/drive.md`. Planned, not run: an expert of
`{MODEL}` at {SIZE.height}x{SIZE.width}, {SIZE.frames} frames, on `{MACHINE}`, {SHARE:g} of its weights on the drive, at
most {BUDGET >> 30} GiB on the device. Calls as multiples of the resident one; *in memory*: with all weights in host memory.
"""
RATES = ", ".join(f"{rate / 1e9:g}" for rate in DRIVES)
HEADERS = ("GPUs", "resident", "in memory", f"chunkflow, {RATES} GB/s", "layerwise")


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
        planned, layerwise = list[str](), list[str]()
        for rate in DRIVES:
            slower = replace(machine, drive_bandwidth=rate)
            planned.append(f"{step(place(halved, slower, chunk_bytes=CHUNK, memory=BUDGET)) / resident:.2f}")
            try:
                each = place(halved, slower, policy="layerwise", chunk_bytes=CHUNK)
                layerwise.append(f"{step(each) / resident:.2f}")
            except ChunkflowError as error:
                layerwise.append(str(error).partition(":")[0])
        in_memory = f"{step(memory) / resident:.2f}"
        rows.append((degree, seconds(resident), in_memory, ", ".join(planned), ", ".join(layerwise)))
        print(rows[-1], flush=True)
    table = tabulate(rows, headers=HEADERS, disable_numparse=True)
    text = f"{date.today()}, {ABOUT}\n```\n{table}\n```\n"
    put_section(arguments.out, "Weights on the drive", "Planned for real drives", text)


if __name__ == "__main__":
    main()
