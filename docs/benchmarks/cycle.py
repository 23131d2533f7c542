"""Blocks compiled one by one against the whole model, on an emulated link: five minutes on two cores.

python docs/benchmarks/cycle.py --out docs/benchmarks/cycle.md
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
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

# As the regime contention: the link would be busy for this share of the resident step if every weight streamed.
LOAD = 0.7
SIZE = {"heads": 8, "head_dim": 64, "text": 64, "height": 32, "width": 32}
CHUNK = 1 << 20
WARM = 2
# Steps in which a cycle must have been planned.
MOST_LEARNING = 60

ABOUT = """\
# Blocks compiled one by one

Two copies of one Wan model on an emulated link, each with the same byte budget: `whole` is compiled as one graph, `blocks` by
`compile_repeated_blocks`. Until its order has repeated, every block fetches its own weights (`apart`); then the blocks run
as a cycle. Rounds hold a step of each arm, in random order; steps are medians, ratios medians of the ratios within a round.
The bandwidth follows from the compute that is measured at the start: all weights would keep the link busy for 0.7 of the
resident step. Real regions, real copies, an emulated link, no GPU.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", type=float, default=0.3, help="budget, of all bytes of the blocks' weights")
    arguments = parser.parse_args()
    sections = [ABOUT.rstrip()]
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            mp.spawn(_rank, (ranks, folder, vars(arguments)), nprocs=ranks)
            found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
            sections.append(_section(found, ranks, arguments, time.monotonic() - began))
            arguments.out.write_text("\n\n".join(sections) + "\n")


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
    options = {"hardware": str(profile), "chunk_bytes": CHUNK, "memory": int(told["memory"] * weights)}
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
    apart = []  # the steps while the cycle is planned, without the first, which compiles
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
        "weights": weights,
        "compute": compute,
        "bandwidth": link.bandwidth,
        "plans": {name: _figures(plan) for name, plan in plans.items()},
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()


def _agreed(seconds: float, ranks: int) -> float:
    """The mean over the ranks."""
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


def _section(found: list[dict[str, Any]], ranks: int, told: argparse.Namespace, took: float) -> str:
    first = found[0]
    rows = []
    for name, label in (("whole", "whole"), ("blocks", "blocks, as a cycle")):
        plan = first["plans"][name]
        step = median(t for rank in found for t in rank["times"][name])
        ratio = median(
            a / b for rank in found for a, b in zip(rank["times"][name], rank["times"]["whole"], strict=True)
        )
        rows.append((label, seconds(step), f"{ratio:.3f}", size(plan["moved"]), size(plan["device"])))
    apart = median(t for rank in found for t in rank["apart"])
    whole = median(t for rank in found for t in rank["times"]["whole"])
    rows.append(("blocks, apart", seconds(apart), f"{apart / whole:.3f}", "", ""))
    table = tabulate(
        rows, headers=("arm", "step", "of whole", "moved a step", "weights on the device"), disable_numparse=True
    )
    head = (
        f"## {told.layers} Wan blocks on {ranks} rank{'s' * (ranks > 1)}\n\n{date.today()}, "
        f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, {took:.0f} s. "
        f"{size(first['weights'])} of weights, budget "
        f"{told.memory:g} of them; {seconds(first['compute'])} of compute, link {first['bandwidth'] / 1e6:.0f} MB/s. "
        f"Bytes primed in the measured steps of the cycle: {sum(rank['primed'] for rank in found)}."
    )
    return f"{head}\n\n```\n{table}\n```"


if __name__ == "__main__":
    main()
