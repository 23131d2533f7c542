"""Plan weights on an SSD: one expert of Wan2.2 A14B on 1, 2 and 8 GPUs, with SSDs of three speeds.  Takes three minutes.

    python docs/benchmarks/drive_planned.py --out docs/benchmarks/drive.md

The model does not run.  The ranks of a machine share host memory and the SSD.  All ranks read the same bytes at the same
time, so each byte is read from the SSD once per step.
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
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.record import seconds
from chunkflow_compile.weights.drive import for_the_drive, with_drive

MODEL, MACHINE = "wan2.2-t2v-a14b", "h100-pcie-x2"
SIZE = OutputSizes(height=480, width=832, frames=81)
DEGREES = (1, 2, 8)
DRIVES = (3e9, 7e9, 14e9)
# The share of the weights of one expert in host memory.
SHARE = 0.5
# The budget for weights on the device.  It is half of the memory of a GPU with 24 GiB, so that half of the weights are
# streamed.  Activations take another 2 GiB.
BUDGET = 12 << 30
CHUNK = 16 << 20

ABOUT = f"""\
`python docs/benchmarks/drive_planned.py --out docs/benchmarks/drive.md`. These figures are planned, not measured.

The model is one expert of `{MODEL}` at {SIZE.height}x{SIZE.width} and {SIZE.frames} frames, on `{MACHINE}`, with
{SHARE:g} of its weights on the SSD and at most {BUDGET >> 30} GiB of weights on the device. `resident` is the time of one
forward with all weights [resident](../glossary.md#resident). The other columns are multiples of it, for three read rates of
the SSD. `in memory` keeps all weights in host memory.
"""
RATES = ", ".join(f"{rate / 1e9:g}" for rate in DRIVES)
HEADERS = ("GPUs", "resident", "in memory", f"chunkflow, {RATES} GB/s", f"layerwise, {RATES} GB/s")


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
        memory = place(problem, machine, Goal(memory=BUDGET), chunk_bytes=CHUNK)
        assert memory.predicted is not None
        resident = memory.predicted.resident_step_s
        planned, layerwise = list[str](), list[str]()
        for rate in DRIVES:
            slower = replace(machine, drive_bandwidth=rate)
            planned.append(f"{step(place(halved, slower, Goal(memory=BUDGET), chunk_bytes=CHUNK)) / resident:.2f}")
            try:
                each = place(halved, slower, Goal(policy="layerwise"), chunk_bytes=CHUNK)
                layerwise.append(f"{step(each) / resident:.2f}")
            except ChunkflowError as error:
                layerwise.append(str(error).partition(":")[0])
        in_memory = f"{step(memory) / resident:.2f}"
        rows.append((degree, seconds(resident), in_memory, ", ".join(planned), ", ".join(layerwise)))
        print(rows[-1], flush=True)
    table = tabulate(rows, headers=HEADERS, disable_numparse=True)
    text = f"{date.today()}, {ABOUT}\n```\n{table}\n```\n"
    put_section(arguments.out, "Weights on an SSD", "Planned for real SSDs", text)


if __name__ == "__main__":
    main()
