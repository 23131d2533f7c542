"""Measure the host memory and the time to place a model on one rank and on two ranks, with one copy per rank or a shared
copy.

    python docs/benchmarks/host_memory.py --out docs/benchmarks/host_memory.md

The ranks place the model as for a GPU, with each weight in separate pages.  The machine needs no GPU.  The measured
memory consists of the private and shared pages of all ranks (Pss_Anon and Pss_Shmem) without the page cache.  It is
sampled during placement.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from chunkflow_compile.catalog.small import Size, small_model
from chunkflow_compile.placed.offload import cast_to
from chunkflow_compile.units import size
from chunkflow_compile.weights.host_memory import give_free_memory_back
from chunkflow_compile.weights.loader import WeightLoader, keep_dtype
from chunkflow_compile.weights.node import node_of

EVERY_S = 0.02
_HUGE, _WRITE = 14, 23  # values for madvise: MADV_HUGEPAGE and MADV_POPULATE_WRITE, which allocates all pages
CPU = torch.device("cpu")
SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def copied(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Copy every weight, like ``pin_memory`` in diffusers' group offload with a stream.  Return the copies."""
    for p in model.parameters():
        p.data = p.data.to(dtype, copy=True) if p.dtype != dtype else p.data.clone()
    return [p.data for p in model.parameters()]


def placed(share: bool) -> Callable[[nn.Module, torch.dtype], list[torch.Tensor]]:
    def place(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        weights = list(model.named_parameters())
        dtype_of = keep_dtype if {p.dtype for _, p in weights} == {dtype} else cast_to(dtype, model)
        node = node_of(share, CPU)
        loader = WeightLoader(CPU, weights, dtype_of, pages=True, node=node)
        placed = [loader.place(name, p) for name, p in weights]
        if node is not None:
            node.gather(None)  # wait until all ranks have written their weights
        made = [(h or loader.placed(name, p)).host for h, (name, p) in zip(placed, weights, strict=True)]
        loader.report()
        loader.close()
        give_free_memory_back()
        return made

    return place


ARMS: dict[str, Callable[[nn.Module, torch.dtype], list[torch.Tensor]]] = {
    "pin_memory": copied,
    "chunkflow, share=False": placed(False),
    "chunkflow, share=True": placed(True),
}


def rank_of(
    rank: int, ranks: int, arm: str, checkpoint: str, dtype: torch.dtype, folder: str, go: Any, stop: Any
) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    model = diffusers.WanTransformer3DModel.from_pretrained(checkpoint, torch_dtype=dtype)
    copied(nn.Linear(8, 8), torch.bfloat16)  # so that the memory that torch allocates on first use is not counted
    held = memory(os.getpid())
    go.wait()
    begun, cpu = time.perf_counter(), used()
    kept = ARMS[arm](model, torch.bfloat16)
    found = {
        "wall": time.perf_counter() - begun,
        "cpu": used() - cpu,
        "held": held,
        "bytes": sum(t.nbytes for t in kept),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    stop.wait()


def touched(nbytes: int) -> None:
    """Have another process write ``nbytes`` bytes of memory and end.

    This makes timings comparable: a virtual machine may have returned free memory to its host, and getting a page back
    takes up to ten times as long as allocating one.
    """
    text = f"import mmap; m = mmap.mmap(-1, {nbytes}, flags=mmap.MAP_PRIVATE); m.madvise({_HUGE}); m.madvise({_WRITE})"
    subprocess.run([sys.executable, "-c", text], check=False)


def used() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def memory(process: int) -> int:
    """Return the bytes of a process's private memory and of its share of shared memory."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def run(arm: str, ranks: int, checkpoint: str, dtype: torch.dtype, weights: int) -> dict[str, float]:
    """Run an arm.  Return its memory, as a multiple of one copy of the weights, and its times.  ``weights``: the bytes of
    one copy."""
    context = multiprocessing.get_context("spawn")
    go, stop = context.Barrier(ranks + 1), context.Barrier(ranks + 1)
    with tempfile.TemporaryDirectory() as folder:
        made = [
            context.Process(target=rank_of, args=(r, ranks, arm, checkpoint, dtype, folder, go, stop))
            for r in range(ranks)
        ]
        for p in made:
            p.start()
        while go.n_waiting < ranks:
            time.sleep(EVERY_S)
        touched(ranks * weights + (1 << 30))
        go.wait()
        most, results = 0, [Path(folder) / f"{r}.json" for r in range(ranks)]
        while not all(path.exists() for path in results):
            most = max(most, sum(memory(p.pid or 0) for p in made))
            time.sleep(EVERY_S)
        time.sleep(0.2)
        now = sum(memory(p.pid or 0) for p in made)
        found = [json.loads(path.read_text()) for path in results]
        stop.wait()
        for p in made:
            p.join()
    held = sum(f["held"] for f in found)
    one = found[0]["bytes"]
    return {
        "kept": (now - held) / one,
        "most": (max(most, now) - held) / one,
        "wall": max(f["wall"] for f in found),
        "cpu": sum(f["cpu"] for f in found),
        "bytes": one,
    }


ABOUT = """\
# Host memory for weights, and placement time

{today}, torch {torch}, {cores} CPU cores, no GPU;
`python docs/benchmarks/host_memory.py --out docs/benchmarks/host_memory.md`.

* A Wan model of {size} in bfloat16 is read from the page cache, from a checkpoint in float32 or bfloat16, and placed.
* *Memory* is the memory of all ranks after placement, and *peak* the largest during it. Both are multiples of one copy of the
  weights.
* `pin_memory` copies each weight on each rank, as diffusers' group offload does. With `share=True` the ranks share one copy.
* Figures are medians of {repeats} runs, in random order.

```
{table}
```

The kernel spends much of this time allocating pages. It uses huge pages for private memory, and {shared} pages for shared
memory.
"""
HEADERS = ("checkpoint", "ranks", "arm", "memory", "peak", "wall time", "CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = small_model("wan", Size(layers=arguments.layers, heads=16, head_dim=128, text=64))
        kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        for label, dtype in kinds.items():
            model.to(dtype).save_pretrained(f"{folder}/{label[:4]}")  # type: ignore[operator]
        weights = sum(2 * p.numel() for p in model.parameters())
        del model
        cases = [(k, n, arm) for k in kinds for n in (1, 2) for arm in ARMS if n > 1 or "True" not in arm]
        order = random.Random(0)
        for case in [c for _ in range(arguments.repeats) for c in order.sample(cases, len(cases))]:
            label, ranks, arm = case
            found.setdefault(case, []).append(run(arm, ranks, f"{folder}/{label[:4]}", kinds[label], weights))
            print(*case, found[case][-1], flush=True)
    rows = []
    for case in cases:
        middle = {key: statistics.median(f[key] for f in found[case]) for key in found[case][0]}
        shown = f"{middle['kept']:.2f}", f"{middle['most']:.2f}", f"{middle['wall']:.2f} s", f"{middle['cpu']:.2f} s"
        rows.append((*case, *shown))
    text = ABOUT.format(
        today=date.today(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        size=size(int(found[cases[0]][0]["bytes"])),
        repeats=arguments.repeats,
        shared="small" if "[never]" in SHARED_PAGES.read_text() else "huge",
        table=tabulate(rows, headers=HEADERS, disable_numparse=True),
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
