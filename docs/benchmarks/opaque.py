"""Measure how much copies slow an all-to-all inside a custom op on an emulated link, with and without declaring the op.

python docs/benchmarks/opaque.py --out docs/benchmarks/opaque.md
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import weakref
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group

import chunkflow_compile
from chunkflow_compile.bench.arms import parse_arms
from chunkflow_compile.bench.bench_record import summarise
from chunkflow_compile.bench.job import Job
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import Regime
from chunkflow_compile.passes.hardware import LinkEmulation

RANKS, LAYERS, WIDTH, HEADS, TOKENS = 2, 4, 512, 8, 1024
ARMS = ("resident", "layerwise", "chunkflow")
# The environment variable with the name of the log.  Each rank appends its number to the name, and each exchange adds a
# line.
LOG = "CHUNKFLOW_OPAQUE_LOG"
# The bandwidth of the emulated link in bytes/s.  With two cores of 2.6 GHz, copying all weights and exchanging would keep
# it busy for about 0.7 of a resident step.
BANDWIDTH = 1.1e8

ABOUT = """\
# Declared and undeclared collectives in custom ops

{today}, torch {torch}, no GPU; `make opaque`.

* The model uses Ulysses attention, and its all-to-alls are inside custom ops, as in vLLM-Omni's `ulysses_qkv_fwd`. *Declared*
  means that `register_collective(op, "all-to-all")` was called for the op.
* There are two gloo ranks, {layers} blocks of width {width}, {tokens} tokens per rank, and an **emulated link** of
  {bandwidth:.0f} MB/s.
* Times are medians of {steps} steps in random order. All arms have the same outputs as the arm `resident`, which
  keeps all weights [resident](../glossary.md#resident).

```
{table}
```

If the op is declared, copies avoid the all-to-alls. If it is not, copies slow them as much as with `layerwise`.
"""

_MODEL: list[Any] = []  # a weak reference to this rank's model, through which ops find the emulated link
EXCHANGE = "chunkflow_bench::exchange"


def _port() -> tuple[Any, str]:
    """Return the emulated link of the running program and the policy of its plan.  Without a program, return None and an
    empty string."""
    found = chunkflow_compile.programs(_MODEL[0]()) if _MODEL else []
    if not found:
        return None, ""
    streams = found[-1].arena.streams
    streams.received = lambda nbytes: None  # so that collectives are not counted twice: the op sends its bytes itself
    return streams.port, found[-1].plan.policy


@torch.library.custom_op(EXCHANGE, mutates_args=())
def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
    group = _resolve_process_group(group_name)
    dist.barrier(group)
    begun = time.perf_counter()
    moved = torch.empty_like(x)
    dist.all_to_all_single(moved, x, group=group)
    port, policy = _port()
    if port is not None:
        port.send("collective", x.nbytes * (RANKS - 1) // RANKS)
        with open(f"{os.environ[LOG]}{dist.get_rank()}", "a") as log:
            log.write(json.dumps([policy, time.perf_counter() - begun]) + "\n")
    return moved


exchange.register_fake(lambda x, group_name: torch.empty_like(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.group = dist.group.WORLD.group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, depth = HEADS // RANKS, WIDTH // HEADS
        qkv = self.qkv(x).view(TOKENS, 3, RANKS, heads, depth).permute(2, 0, 1, 3, 4).contiguous()
        q, k, v = exchange(qkv, self.group).view(RANKS * TOKENS, 3, heads, depth).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1)
        back = exchange(attended.reshape(RANKS, TOKENS, heads, depth).contiguous(), self.group)
        x = x + self.out(back.transpose(0, 1).reshape(TOKENS, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def undeclared() -> tuple[nn.Module, dict[str, Any]]:
    model = Stack().eval()
    _MODEL[:] = [weakref.ref(model)]
    return model, {"x": torch.randn(TOKENS, WIDTH)}


def declared() -> tuple[nn.Module, dict[str, Any]]:
    chunkflow_compile.register_collective(EXCHANGE, "all-to-all")
    return undeclared()


def measure(kind: str, steps: int) -> list[list[str]]:
    """Return the rows of a model: for each arm, the step time, the bytes copied, the time of all-to-alls, and their
    slowdown compared with the resident arm."""
    regime = Regime(chunk_bytes=1 << 20, arms=ARMS, shows="")
    job = Job(
        regime=regime,
        link=LinkEmulation(bandwidth=BANDWIDTH),
        ranks=RANKS,
        arms=parse_arms(ARMS),
        steps=steps,
        model=f"{Path(__file__).resolve()}:{kind}",
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LOG] = f"{folder}/rank"
        found = summarise(job, run_job(job))
        lines = [
            [json.loads(line) for line in Path(f"{folder}/rank{r}").read_text().splitlines()] for r in range(RANKS)
        ]
    count = 2 * LAYERS
    sums: dict[str, list[float]] = {}
    for both in zip(*lines, strict=True):
        sums.setdefault(both[0][0], []).append(max(seconds for _, seconds in both))
    # The log ends with the turns.  In each turn, the first step is a warm-up and left out, and the second one counts.
    spent = {
        arm: [sum(s[i : i + count]) for i in range(len(s) - count, -1, -2 * count)][:steps] for arm, s in sums.items()
    }
    assert all(len(found) == steps for found in spent.values()), "an exchange is missing"
    base = median(spent["resident"])
    assert all(found.record.arms[arm].equal_to_resident for arm in ARMS), "other outputs"
    return [
        [
            f"{kind}, {arm}",
            f"{1e3 * (found.record.arms[arm].step_s or 0):.0f} ms",
            f"{(found.record.arms[arm].moved_bytes_per_step or 0) / 2**20:.0f} MiB",
            f"{1e3 * median(spent[arm]):.0f} ms",
            "" if arm == "resident" else f"{100 * (median(spent[arm]) / base - 1):.1f} %",
        ]
        for arm in ARMS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10, help="steps that count, for each arm (default 10)")
    arguments = parser.parse_args()
    rows = [row for kind in ("declared", "undeclared") for row in measure(kind, arguments.steps)]
    headers = ["model, arm", "step", "copied per step", "all-to-alls", "slowed by"]
    page = ABOUT.format(
        layers=LAYERS,
        width=WIDTH,
        tokens=TOKENS,
        bandwidth=BANDWIDTH / 1e6,
        steps=arguments.steps,
        table=tabulate(rows, headers, disable_numparse=True),
        today=date.today(),
        torch=torch.__version__,
    )
    arguments.out.write_text(page)


if __name__ == "__main__":
    main()
