"""Policies side by side on an emulated link, in every regime; eight minutes on two cores.

python docs/benchmarks/contention.py --out docs/benchmarks/contention.md

Each regime's record is written beside the page, as JSON and as a picture; the page is made from the records that are there.
``--page-only`` measures nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

from chunkflow_compile.bench.job import job_of
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import BUDGETS, REGIMES
from chunkflow_compile.bench.summary import summarise
from chunkflow_compile.report.pictures import draw_arms
from chunkflow_compile.report.record import as_json

# As many as eight minutes have room for; a step of compute-rich takes three times as long as the others'.
STEPS = ("3", "compute-rich=2")
# Those of the page, in its order.
SHOWN = ("compute-rich", "contention", "contention-flux", "compute-poor", "shared-port")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--steps",
        action="append",
        default=[],
        metavar="N|REGIME=N",
        help=f"steps that count, for each arm (default {', '.join(STEPS)}); where other processes use the cores a single "
        "step is off by a tenth or more, so figures to keep need ten times as many",
    )
    parser.add_argument(
        "--only", choices=SHOWN, action="append", help="measure these regimes only, and keep the others"
    )
    parser.add_argument("--page-only", action="store_true", help="make the page from the records, without measuring")
    arguments = parser.parse_args()
    steps = _steps([*STEPS, *arguments.steps])
    command = " ".join(
        [
            f"python docs/benchmarks/contention.py --out {arguments.out}",
            *(f"--steps {text}" for text in arguments.steps),
            *(f"--only {name}" for name in arguments.only or ()),
        ]
    )
    for name in () if arguments.page_only else arguments.only or SHOWN:
        start, job = time.monotonic(), job_of(REGIMES[name], steps[name])
        found = summarise(job, run_job(job))
        kept = _record(arguments.out, name)
        draw_arms(found.record, found.predicted, kept.with_suffix(".png"))
        taken = {"s": round(time.monotonic() - start), "torch": torch.__version__, "command": command}
        kept.write_text(as_json({**json.loads(found.to_json()), "taken": taken}))
    records = {name: _record(arguments.out, name) for name in SHOWN}
    arguments.out.write_text(page({n: json.loads(path.read_text()) for n, path in records.items() if path.exists()}))


def _record(page: Path, regime: str) -> Path:
    return page.with_name(f"{page.stem}_{regime}.json")


def _steps(given: Sequence[str]) -> dict[str, int]:
    """Steps of each regime; what stands later wins."""
    found: dict[str, int] = {}
    for text in given:
        name, _, count = text.rpartition("=")
        found.update(dict.fromkeys([name] if name else REGIMES, int(count)))
    return found


Record = Mapping[str, Any]


def page(records: Mapping[str, Record]) -> str:
    """The page.  ``records``: what ``chunkflow bench --json`` would write of each regime, and how it was ``taken``."""
    took = "; ".join(f"{name} {r['taken']['s']} s" for name, r in records.items())
    versions = ", ".join(dict.fromkeys(r["taken"]["torch"] for r in records.values()))
    commands = "\n".join(dict.fromkeys(r["taken"]["command"] for r in records.values()))
    files = ",\n".join(f"{name} ([JSON](contention_{name}.json), [picture](contention_{name}.png))" for name in records)
    equal = all(arm["equal_to_resident"] for r in records.values() for arm in r["arms"].values())
    wrong, replanned = (_ratio(records["contention"], arm, "chunkflow") for arm in ("misjudged", "replanned"))
    return f"""# Copies that yield, measured on an emulated link

Real ranks, real compiled regions, real copies and exchanges. **The link is emulated**: each rank has a receive port, which
chunks and the incoming bytes of collectives share in turns of 256 KiB. **Compute has a fixed speed**: each region is held to
1.5 times what it took at the start, because other work slows these cores as it would not slow a GPU's. Nothing here was
measured on a GPU.

```sh
{commands}
```

torch {versions}; {took}. Small models (`wan`, `flux`), two ranks, in shared-port four behind one port. *Load*: the share of
the resident step for which the link would be busy if every weight streamed once a step. `chunkflow` has the bytes of
`layerwise`, in compute-rich a quarter of all. Steps are medians; ratios are medians of the ratios within a round, which
holds a step of every arm in random order. Outputs are {"equal" if equal else "NOT EQUAL"} bit for bit over all arms and
steps.

{_regimes_table(records)}

*Collectives slower*: than in the resident arm, without the time that one rank waited for the other. *Predicted*: simulated
with what regions and exchanges took in the resident arm, and with one factor for all arms, by which copies stretched
compute; how far it is off in the worst arm, and its wait for weights as a share of the step.

![arms of contention](contention_contention.png)

Planned from a link twice as fast and compute twice as slow as they are (`misjudged`), contention takes {wrong:.3f} of the
step that right figures give, and {replanned:.3f} with `replan_after=2`.

In compute-poor, arms may also keep a share of the blocks. The bound is max(resident, streamed bytes / link); a prefix is of
whole leading layers in the same bytes:

{_residency_table(records["compute-poor"])}

Three whole runs, on cores that other processes used ([all figures](contention_runs.csv)): chunkflow took 1.001 to 1.007 of
the resident step in compute-rich, 1.005 to 1.022 in contention, 0.993 to 1.006 in contention-flux; predicted steps were off
by at most 3.5 %. Before regions had a fixed duration, eight runs of contention gave 0.90 to 1.25, and predictions off by up
to 14 %.

Every arm, step and predicted figure:
{files}.
"""


def _ratio(record: Record, arm: str, base: str) -> float:
    """As :meth:`BenchRecord.ratio`."""
    return median(a / b for a, b in zip(record["steps_s"][arm], record["steps_s"][base], strict=True))


def _regimes_table(records: Mapping[str, Record]) -> str:
    rows = []
    for name, r in records.items():
        arms, slower = r["arms"], r["collective_inflation"]
        step = {arm: figures["step_s"] for arm, figures in arms.items()}
        off = max(abs(p["step_s"] / step[arm] - 1) for arm, p in r["predicted"].items())
        waits = {arm: abs(p["exposed_h2d_s"] - arms[arm]["exposed_h2d_s"]) for arm, p in r["predicted"].items()}
        ours: tuple[str, ...] = ("", "", "", "", "")
        if "chunkflow" in arms:
            mine = arms["chunkflow"]
            others = ("layerwise", "layerwise-barrier", "host-yield")
            times = "/".join(f"{_ratio(r, a, 'chunkflow'):.2f}" if a in arms else "-" for a in others)
            less = 1 - mine["weights_device_bytes"] / mine["weights_total_bytes"]
            ours = (
                f"{_ratio(r, 'chunkflow', 'resident'):.3f}", f"{100 * less:.0f}", times,
                f"{100 * slower['chunkflow']:.1f}", f"{100 * slower['layerwise']:.1f}",
            )  # fmt: skip
        wait = max(waits[arm] / step[arm] for arm in waits)
        rows.append((name, f"{r['load']['share']:g}", *ours, f"{100 * off:.1f}", f"{100 * wait:.1f}"))
    headers = (
        "regime", "load", "chunkflow, of resident", "less weights, %", "times as fast as layerwise/-barrier/host-yield",
        "collectives slower, %", "with layerwise, %", "predicted off, %", "its wait off, %",
    )  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _residency_table(record: Record) -> str:
    rows = []
    for share in BUDGETS:
        ours, theirs = f"chunkflow@{share}%", f"layerwise-prefix@{share}%"
        mine = record["arms"][ours]
        bound = max(record["arms"]["resident"]["step_s"], mine["moved_bytes_per_step"] / record["link"]["requested"])
        steps = (_ratio(record, ours, "resident"), mine["step_s"] / bound)
        rows.append((f"{share} %", *(f"{x:.3f}" for x in steps), f"{_ratio(record, theirs, ours):.2f}"))
    headers = ("kept", "step, of resident", "of the bound", "times as fast as a prefix")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
