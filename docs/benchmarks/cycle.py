"""Compare separately compiled blocks with the model as one graph, on an emulated link.  Takes ten minutes on two cores.

python docs/benchmarks/cycle.py --out docs/benchmarks/cycle.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from runs import timed
from tabulate import tabulate
from torch import nn

from chunkflow_compile import cycles, offload, programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.hardware.emulated import EXCHANGE_S, on_emulated_link
from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size

# The share of the resident step in which the emulated link would be busy if all weights were copied, as in the regime
# contention.
LOAD = 0.7
SIZE = {"heads": 8, "head_dim": 64, "text": 64, "height": 32, "width": 32}
CHUNK = 1 << 20
WARM = 2
# The maximum number of steps until the blocks must run as a cycle.
MOST_LEARNING = 60

ABOUT = """\
# Separately compiled blocks and the whole model

{today}, torch {torch}, {cpus}, no GPU; `make cycle`. The model has {layers} blocks of
Wan. Copies are real, on an emulated PCIe link that would be busy for 0.7 of the step with all weights
[resident](../glossary.md#resident) if it had to copy all weights. The [budget](../glossary.md#budget) is given as a share of
the weights.

* `whole` compiles the model as one graph. `cycle` compiles it with `compile_repeated_blocks` and runs it as a
  [cycle](../glossary.md#cycle), with the same budget.
* `apart` shows the same model before the order of its blocks has repeated. Until then, each block copies its own weights.
* Times are medians of calls in random order. The columns `cycle` and `apart` are ratios to `whole`.

```
{table}
```
"""
HEADERS = (
    "ranks",
    "budget",
    "whole",
    "cycle",
    "apart",
    "whole copies",
    "cycle copies",
    "weights on the device (cycle)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    budgets = "budgets, as shares of the bytes of the blocks' weights"
    parser.add_argument("--memory", type=float, nargs="+", default=[0.3, 0.25], help=budgets)
    arguments = parser.parse_args()
    rows = []
    for memory, ranks in itertools.product(arguments.memory, (1, 2)):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder, {**vars(arguments), "memory": memory}), nprocs=ranks)
            found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
        rows.append(_row(found, ranks, memory))
        text = ABOUT.format(
            today=date.today(),
            torch=torch.__version__,
            cpus=device_name(torch.device("cpu")),
            layers=arguments.layers,
            table=tabulate(rows, headers=HEADERS, disable_numparse=True),
        )
        arguments.out.write_text(text)


def _rank(rank: int, ranks: int, folder: str, told: dict[str, Any]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    size = Size(layers=told["layers"], frames=told["frames"], **SIZE)

    def make() -> nn.Module:
        model = small_model("wan", size)
        if ranks > 1:
            enable_ulysses(model, ranks)
        return model

    inputs = [small_inputs("wan", size, step) for step in range(8)]
    resident = torch.compile(make(), backend="chunkflow", options={"policy": "resident"})
    compute = _agreed(median([timed(resident, inputs[i % 8]) for i in range(5)][1:]), ranks)
    (program,) = programs(resident)
    problem = program.program.problem
    weights = sum(w.nbytes for w in problem.weights if w.keep is None)
    exchanged = sum(c.nbytes for c in problem.collectives)
    alone = compute - len(problem.collectives) * EXCHANGE_S
    link = LinkEmulation(bandwidth=(weights + exchanged * (1 - LOAD)) / (LOAD * alone))
    profile = Path(folder) / f"hardware{rank}.json"
    profile.write_text(on_emulated_link(load_profile(CPU), link, ranks).to_json())
    options = {"hardware": str(profile), "chunk_bytes": CHUNK, "weight_memory": int(told["memory"] * weights)}
    models = {"whole": make(), "blocks": make()}
    for model in models.values():
        offload(model)
    runs: dict[str, Callable[..., Any]] = {
        "whole": torch.compile(models["whole"], backend="chunkflow", fullgraph=True, options=options),
        "blocks": models["blocks"],
    }
    models["blocks"].compile_repeated_blocks(backend="chunkflow", options=options)  # type: ignore[operator]
    for i in range(3):
        timed(runs["whole"], inputs[i])
    apart = []  # seconds of the steps before the cycle runs, except the first one, which compiles
    for i in range(MOST_LEARNING):
        took = timed(runs["blocks"], inputs[i % 8])
        if _all(bool(cycles(models["blocks"])), ranks):
            break
        apart += [took] if i else []
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    primed = 0
    programs(models["blocks"])[0].arena.streams.measure(sys.maxsize)
    for step in range(told["rounds"]):
        for name in order.sample(sorted(runs), len(runs)):
            for i in range(WARM):
                timed(runs[name], inputs[i])
            times[name].append(timed(runs[name], inputs[step % 8]))
            if name == "blocks":
                primed += sum(p.measurements[-1].primed_bytes for p in programs(models[name]))
    plans = {"whole": programs(models["whole"])[0].plan, "blocks": cycles(models["blocks"])[0].cycle.plan}
    found = {
        "times": times,
        "apart": apart,
        "primed": primed,
        "plans": {name: _figures(plan) for name, plan in plans.items()},
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()


def _agreed(seconds: float, ranks: int) -> float:
    """Return the mean over all ranks."""
    if ranks == 1:
        return seconds
    told = torch.tensor(seconds)
    dist.all_reduce(told)
    return float(told) / ranks


def _all(mine: bool, ranks: int) -> bool:
    return _agreed(float(mine), ranks) == 1.0


def _figures(plan: Plan) -> dict[str, Any]:
    assert plan.predicted is not None
    return {"device": plan.device_bytes, "moved": plan.moved_bytes, "step": plan.predicted.step_s}


def _row(found: list[dict[str, Any]], ranks: int, memory: float) -> tuple[Any, ...]:
    assert not any(rank["primed"] for rank in found), "the blocks did not run as a cycle"
    pairs = (a / b for rank in found for a, b in zip(rank["times"]["blocks"], rank["times"]["whole"], strict=True))
    apart = median(t for rank in found for t in rank["apart"])
    whole = median(t for rank in found for t in rank["times"]["whole"])
    plans = found[0]["plans"]
    return (
        ranks,
        f"{memory:g}",
        seconds(whole),
        f"{median(pairs):.3f}",
        f"{apart / whole:.3f}",
        size(plans["whole"]["moved"]),
        size(plans["blocks"]["moved"]),
        size(plans["blocks"]["device"]),
    )


if __name__ == "__main__":
    main()
