"""Compare policies on an emulated link, in every regime.  Takes eight minutes on two cores.

python docs/benchmarks/contention.py --out docs/benchmarks/contention.md

The script writes the record of each regime next to the page, as JSON and as a picture, and then makes the page from all
records.  With ``--page-only`` it makes the pictures and the page from existing records and measures nothing.
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
from runs import errors_in_a_sentence, saved
from tabulate import tabulate

from chunkflow_compile.bench.bench_record import summarise
from chunkflow_compile.bench.job import job_of
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import BUDGETS, REGIMES
from chunkflow_compile.report.pictures import draw_arms
from chunkflow_compile.report.record import ArmRecord, ComparisonRecord, as_json

# The numbers of steps that fit in eight minutes.  A step in the regime compute-rich takes three times as long as in other
# regimes.
STEPS = ("3", "compute-rich=2")
# The regimes on the page, in order.
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
        taken = {"s": round(time.monotonic() - start), "torch": torch.__version__, "command": command}
        _record(arguments.out, name).write_text(as_json({**json.loads(found.to_json()), "taken": taken}))
    records = {name: saved(_record(arguments.out, name), "make contention") for name in SHOWN}
    for name, record in records.items():
        _draw(record, _record(arguments.out, name).with_suffix(".png"))
    arguments.out.write_text(page(records))


def _record(page: Path, regime: str) -> Path:
    return page.with_name(f"{page.stem}_{regime}.json")


def _draw(record: Record, path: Path) -> None:
    measured, predicted = (
        {name: ArmRecord(**arm) for name, arm in record[key].items()} for key in ("arms", "predicted")
    )
    draw_arms(ComparisonRecord(model=record["model"], degree=record["degree"], arms=measured), predicted, path)


def _steps(given: Sequence[str]) -> dict[str, int]:
    """Parse the numbers of steps per regime.  If several values apply to a regime, the last one counts."""
    found: dict[str, int] = {}
    for text in given:
        name, _, count = text.rpartition("=")
        found.update(dict.fromkeys([name] if name else REGIMES, int(count)))
    return found


Record = Mapping[str, Any]


def page(records: Mapping[str, Record]) -> str:
    """Return the page.  ``records``: for each regime, the output of ``chunkflow bench --json``; the key ``taken``
    describes the run."""
    took = ", ".join(f"{r['taken']['s']} s for {name}" for name, r in records.items())
    versions = ", ".join(dict.fromkeys(r["taken"]["torch"] for r in records.values()))
    commands = "\n".join(dict.fromkeys(r["taken"]["command"] for r in records.values()))
    files = ",\n".join(f"{name} ([JSON](contention_{name}.json), [picture](contention_{name}.png))" for name in records)
    equal = all(arm["equal_to_resident"] for r in records.values() for arm in r["arms"].values())
    wrong, replanned = (_ratio(records["contention"], arm, "chunkflow") for arm in ("misjudged", "replanned"))
    return f"""# Copies that avoid collectives, measured on an emulated link

Ranks, compiled [regions](../glossary.md#region), copies and collectives are real. **The PCIe link is emulated**: each
rank has one receive port. Copies of [chunks](../glossary.md#chunk) and the incoming data of collectives take turns on
it, 256 KiB at a time. **The duration of compute is fixed**: each region is held to 1.5 times the time that it took at
the start of the run, because other processes slow these CPU cores in a way in which they would not slow a GPU.
Nothing on this page was measured on a GPU.

```sh
{commands}
```

Measured with torch {versions}. The runs took {took}.

* The models are small versions of Wan and FLUX (`wan`, `flux`). There are two ranks; in shared-port, four ranks share one
  port.
* *Load* is the share of the [baseline](../glossary.md#baseline) step (the arm `resident`) during which the emulated
  link would be busy if every weight were copied once per step.
* `layerwise` copies the whole next block while a block computes. `layerwise-barrier` also waits for it before the
  first all-to-all of each block. `host-yield` paused copies during collectives by a flag on the host, as the paper
  describes; it was measured in an earlier version, which could run it. The [budget](../glossary.md#budget) of
  `chunkflow` is the memory that `layerwise` uses; in compute-rich, it is a quarter of all weights.
* Step times are medians. A round runs one step of every arm, in random order. Ratios are medians over the rounds.
* The outputs of all arms and steps are {"equal" if equal else "NOT EQUAL"}, bit for bit.

{_regimes_table(records)}

*Weight memory saved* and *collectives slowed* compare with the arm `resident`. The latter excludes the time that one
rank waits for the other. Predictions are simulated from the durations of regions and collectives in this arm, and
from one factor, the same for all arms, by which copies slow compute. The last two columns show the largest error over
the arms: the error of the predicted step time, and the error of the predicted [stall](../glossary.md#stall) as a
share of the step.

![step time of each arm in contention](contention_contention.png)

[The plan](../glossary.md#plan) of the arm `misjudged` is made from wrong figures: a link that is twice as fast, and
compute that is twice as slow, as they really are. Its step takes {wrong:.3f} times as long as the step of
`chunkflow`. The arm `replanned` begins with the same wrong figures and sets `replan_after=2`: its step takes
{replanned:.3f} times as long.

In compute-poor, the arms also keep a share of the blocks on the device. The lower bound of their step is the larger
of the [resident](../glossary.md#resident) step and the time to copy the streamed bytes. *Prefix* keeps whole leading
layers with the same number of bytes.

{_residency_table(records["compute-poor"])}

In three complete runs, on cores that other processes used at the same time ([all figures](contention_runs.csv)), the
step of `chunkflow` took 1.001 to 1.007 times the resident step in compute-rich, 1.005 to 1.022 times in contention,
and 0.993 to 1.006 times in contention-flux. Predicted step times were off by at most 3.5 %. Before the duration of
regions was fixed, eight runs of contention gave ratios from 0.90 to 1.25, and predictions were off by up to 14 %.

All arms, steps and predictions:
{files}.
"""


def _ratio(record: Record, arm: str, base: str) -> float:
    """Return the ratio of the step times of two arms, as in :meth:`BenchRecord.ratio`."""
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
        "regime", "load", "chunkflow / resident", "weight memory saved, %", "speedup over layerwise/-barrier/host-yield",
        "collectives slowed, %", "by layerwise, %", "prediction error, %", "stall error, %",
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
    headers = ("kept", "step / resident", "step / bound", "speedup over prefix")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    with errors_in_a_sentence():
        main()
