"""Measure weights on an SSD: half of a Wan model is in host memory, the other half on an emulated SSD.  The PCIe link is
emulated, too.  Takes six minutes on two cores.

    python docs/benchmarks/drive.py --out docs/benchmarks/drive.md

The rate of the emulated SSD is chosen so that reading the second half takes ``load`` times as long as the resident step.
Reads are real; each then waits until the emulated SSD would have finished.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from runs import put_section, timed
from tabulate import tabulate
from torch import nn

from chunkflow_compile import offload, programs, replan
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size
from chunkflow_compile.weights.host_buffer import buffer_of

SIZE = Size(layers=24, frames=1, heads=8, head_dim=64, text=64, height=32, width=32)
CHUNK = 1 << 20
LOADS = (0.5, 0.9, 1.3, 2.0)
# The share of the resident step in which the emulated link would be busy if all weights were copied.
LINK_LOAD = 0.5
# The number of steps per arm and round, and how many of them are timed.  The steps before them use up the weights that
# were read ahead while another arm ran.
BURST, TIMED = 6, 2
ARMS = {"chunkflow": {}, "layerwise": {"policy": "layerwise"}}
PAGE = "Weights on an SSD"
ABOUT = """\
{today}, torch {torch}, {cores} CPU cores, no GPU; `python docs/benchmarks/drive.py --out docs/benchmarks/drive.md`.

* The model is a Wan model whose weights take {weights}. Half of them are in host memory; the other half stay in the
  checkpoint. The PCIe link and the SSD are emulated. Reading the second half takes `load` times the
  [baseline](../glossary.md#baseline) step of {compute}.
* `chunkflow` has a [budget](../glossary.md#budget) of {memory:g} times the weights. `layerwise` copies the whole next block.
* Step times are medians of {timed} steps. Predictions are made from measured times.

```
{table}
```
"""
HEADERS = ("load", "arm", "step / baseline", "prediction / step", "read per step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--memory", type=float, default=0.3, help="budget, as a share of the bytes of the weights")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    inputs = [small_inputs("wan", SIZE, step) for step in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        model = small_model("wan", SIZE)
        model.save_pretrained(folder)  # type: ignore[operator]
        weights = sum(p.nbytes for p in model.parameters() if p.nbytes >= CHUNK)
        resident = torch.compile(model, backend="chunkflow", options={"policy": "resident"})
        compute = median([timed(resident, inputs[i]) for i in range(6)][1:])
        expected = resident(**inputs[0])[0]
        rows = []
        for load in LOADS:
            link = LinkEmulation(bandwidth=weights / (LINK_LOAD * compute), drive=weights / 2 / (load * compute))
            profile = Path(folder) / "hardware.json"
            machine = replace(on_emulated_link(load_profile(CPU), link, 1), drive_bandwidth=link.drive)
            profile.write_text(machine.to_json())
            options = {"hardware": str(profile), "chunk_bytes": CHUNK, "weight_memory": int(arguments.memory * weights)}
            placed, runs = {}, dict[str, Callable[..., Any]]()
            for arm, more in ARMS.items():
                placed[arm] = offload(diffusers.WanTransformer3DModel.from_pretrained(folder), host_memory=weights // 2)
                runs[arm] = torch.compile(placed[arm], backend="chunkflow", fullgraph=True, options={**options, **more})
                torch.testing.assert_close(runs[arm](**inputs[0])[0], expected, atol=1e-4, rtol=1e-3)
                for i in range(4):
                    timed(runs[arm], inputs[i])
                if not more:
                    replan(placed[arm], as_measured=True)
                    for i in range(3):
                        timed(runs[arm], inputs[i])
            times, order = {arm: list[float]() for arm in ARMS}, random.Random(0)
            before = {arm: read_so_far(placed[arm]) for arm in ARMS}
            for _ in range(arguments.rounds):
                for arm in order.sample(list(ARMS), len(ARMS)):
                    found = [timed(runs[arm], inputs[step % 8]) for step in range(BURST)]
                    times[arm] += found[-TIMED:]
            for arm in ARMS:
                read = (read_so_far(placed[arm]) - before[arm]) / (BURST * arguments.rounds)
                rows.append((f"{load:g}", arm, *figures(placed[arm], median(times[arm]), compute, int(read))))
                print(*rows[-1], flush=True)
            del runs, placed
            torch._dynamo.reset()
    text = ABOUT.format(
        today=date.today(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        weights=size(weights),
        compute=seconds(compute),
        memory=arguments.memory,
        timed=TIMED * arguments.rounds,
        table=tabulate(rows, headers=HEADERS, disable_numparse=True),
    )
    print(text)
    if arguments.out:
        put_section(arguments.out, PAGE, "Measured on an emulated SSD", text)


def read_so_far(model: nn.Module) -> int:
    """Return the number of bytes read from the SSD so far."""
    buffers = [buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None]
    return sum(file.read_bytes for file in {buffer.backing.bytes.file for buffer in buffers if buffer.source.file})


def figures(model: nn.Module, step: float, compute: float, read: int) -> tuple[str, ...]:
    """Return the cells of a row.  ``step``, ``compute``: the seconds of a step and of the resident step.  ``read``: the
    bytes read per step."""
    plan = programs(model)[-1].plan
    assert plan.predicted is not None
    # show no prediction for layerwise, because it is made from the rates of the profile instead of measured times
    ahead = f"{plan.predicted.step_s / step:.3f}" if plan.policy == "chunkflow" else ""
    return f"{step / compute:.2f}", ahead, size(read)


if __name__ == "__main__":
    main()
