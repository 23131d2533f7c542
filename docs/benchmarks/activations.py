"""Activations predicted without a GPU, compared with those measured on the GPUs of ``h100.json`` and ``h200.json``.

    python docs/benchmarks/activations.py           # writes the table of docs/activations.md; traces two models

Measured activations are the peak of torch's allocator minus the weights on the GPU.  Predicted activations are
``live_bytes`` of two cuts: the finest one, and the one with whole blocks.  The script needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from methods import transformer_traced
from runs import replaced
from tabulate import tabulate

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut, whole_blocks
from chunkflow_compile.passes.planning import Settings

BENCHMARKS = Path(__file__).parent
PAGE = BENCHMARKS.parent / "activations.md"
# The script replaces the text between these two lines of the page.
BEGIN, END = "<!-- measured: docs/benchmarks/activations.py -->\n", "<!-- end -->\n"
GPUS = {"h100": "H100", "h200": "H200"}
MIB = 1 << 20
# The arms whose records contain the bytes of weights on the device.
ARMS = ("resident", "layerwise", "chunkflow")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The activations of one arm of a case, in bytes.  ``finest``, ``blocks``: predictions for the finest cut and for the
    cut with whole blocks."""

    gpu: str
    workload: Workload
    arm: str
    measured: int
    finest: int
    blocks: int


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield each arm of a record with its measured activations in bytes."""
    for arm, found in record["arms"].items():
        if arm.partition("@")[0] in ARMS:
            yield arm, record["peak_bytes"][arm] - found["weights_device_bytes"]


def predicted(workload: Workload) -> tuple[int, int]:
    """Return the predicted activations in bytes: for the finest cut, and for the cut with whole blocks."""
    known = replace(preset(workload.model), timestep=workload.timestep)
    finest = make_cut(transformer_traced(known, workload.sizes, 1))
    blocks = whole_blocks(finest, Settings(hardware=load_profile("h100-nvlink")))
    return finest.problem.live_bytes, blocks.problem.live_bytes


def rows(folder: Path = BENCHMARKS) -> Iterator[Row]:
    for page, gpu in GPUS.items():
        for case in json.loads((folder / f"{page}.json").read_text())["cases"].values():
            workload = Workload.from_json(case["workload"])
            finest, blocks = predicted(workload)
            for arm, nbytes in measured(case["record"]):
                yield Row(gpu=gpu, workload=workload, arm=arm, measured=nbytes, finest=finest, blocks=blocks)


def table(rows: Iterator[Row]) -> str:
    """Return a table with one row per arm.  Ratios are predicted divided by measured activations."""
    return tabulate(
        [
            (
                row.gpu,
                row.workload.model,
                row.workload,
                f"`{row.arm}`",
                f"{row.measured / MIB:,.0f}",
                *(f"{n / MIB:,.0f}" for n in (row.finest, row.blocks)),
                *(f"{n / row.measured:.2f}" for n in (row.finest, row.blocks)),
            )
            for row in rows
        ],
        headers=("GPU", "model", "output", "arm", "measured", "finest", "blocks", "ratio, finest", "ratio, blocks"),
        tablefmt="github",
        disable_numparse=True,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    quiet_diffusers()
    text = table(rows())
    print(text)
    PAGE.write_text(replaced(PAGE.name, PAGE.read_text(), "table", BEGIN, END, text))


if __name__ == "__main__":
    main()
