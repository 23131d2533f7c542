"""Policies side by side on an emulated link, in every regime; eight minutes on two cores.

python docs/benchmarks/contention.py --out docs/benchmarks/contention.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from chunkflow_compile.bench.job import job_of
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import BUDGETS, REGIMES
from chunkflow_compile.bench.summary import BenchRecord, bench_table, conditions, summarise
from chunkflow_compile.report.pictures import draw_arms

# As many as eight minutes have room for; a step of compute-rich takes three times as long as the others'.
STEPS = ("3", "compute-rich=2")

ABOUT = """\
# Copies that yield, measured on an emulated link

Real ranks, real compiled regions, real copies and exchanges. **The link is emulated**: each rank has a receive port, which
chunks and the incoming bytes of collectives share in turns of 256 KiB. **Compute has a fixed speed**: each region is held to
1.5 times what it took at the start. Other processes, and the copies themselves, slow these cores for seconds at a time, and
would not slow a GPU's. Nothing here was measured on a GPU.

Each regime sets the *load* of the link: the share of the resident step for which the link would be busy if every weight
streamed once a step. compute-rich has 0.2, contention 0.7, contention-flux 0.88, compute-poor 1.6, and shared-port 3, where
all four ranks share one port, and each has a quarter of it. The bandwidth follows from the compute that is measured at the
start, so that a regime means the same on a machine of another speed.

A model is compiled once. Every arm is a plan of its own on the same lowered regions. A round holds one step of every arm, in
random order; steps and waits are medians over the rounds, and ratios are medians of the ratios within a round. `chunkflow`
and `misjudged` have the bytes that `layerwise` takes, in compute-rich a quarter of all bytes. An arm with a share in its name
may also keep the bytes of so many of the blocks. `misjudged` is planned from a link twice as fast and compute twice as slow
as they are; `replanned` is the same with `replan_after=2`.

*Predicted* is the program of the arm, simulated with what regions and exchanges took in the resident arm of the same run and
with one factor, for all arms, by which copies stretched compute nevertheless.
*Collectives inflated* leaves out the time that one rank waited for the other.

Each regime is one run and names its command. [How much whole runs differ](contention_runs.md).
"""


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
        "--only", choices=REGIMES, action="append", help="measure these regimes only; the page keeps the others"
    )
    arguments = parser.parse_args()
    steps = _steps([*STEPS, *arguments.steps])
    command = " ".join(
        [
            f"python docs/benchmarks/contention.py --out {arguments.out}",
            *(f"--steps {text}" for text in arguments.steps),
            *(f"--only {name}" for name in arguments.only or ()),
        ]
    )
    sections = _sections(arguments.out)
    for name in arguments.only or REGIMES:
        regime, start = REGIMES[name], time.monotonic()
        job = job_of(regime, steps[name])
        found = summarise(job, run_job(job))
        picture = arguments.out.with_name(f"{arguments.out.stem}_{name}.png")
        draw_arms(found.record, found.predicted, picture)
        picture.with_suffix(".json").write_text(found.to_json())
        took = f"{time.monotonic() - start:.0f} s, torch {torch.__version__}, of `{command}`"
        parts = [f"{name}: {regime.shows}", conditions(job, found), took, f"```\n{bench_table(found)}\n```"]
        parts += [*(f"* {line}" for line in _findings(found)), f"![arms of {name}]({picture.name})"]
        sections[name] = "\n\n".join(parts).replace("\n\n* ", "\n* ")
        shown = [sections[known] for known in REGIMES if known in sections]
        arguments.out.write_text("\n\n## ".join([ABOUT.rstrip(), *shown]) + "\n")


def _sections(page: Path) -> dict[str, str]:
    """What the page says of each regime, if there is one."""
    found = page.read_text().split("\n## ")[1:] if page.exists() else []
    return {text.partition(":")[0]: text.rstrip() for text in found}


def _steps(given: Sequence[str]) -> dict[str, int]:
    """Steps of each regime; what stands later wins."""
    found: dict[str, int] = {}
    for text in given:
        name, _, count = text.rpartition("=")
        found.update(dict.fromkeys([name] if name else REGIMES, int(count)))
    return found


def _findings(found: BenchRecord) -> Iterator[str]:
    """What the regime is there to show, in figures of this run."""
    arms = found.record.arms
    step = {name: arm.step_s or 0.0 for name, arm in arms.items()}
    base = step["resident"]
    if "chunkflow" in arms:
        mine = arms["chunkflow"]
        less = 1 - (mine.weights_device_bytes or 0) / (mine.weights_total_bytes or 1)
        taken = found.ratio("chunkflow", "resident")
        yield f"chunkflow takes {taken:.3f} of the resident step, {100 * less:.0f} % less weight memory"
        for name in ("layerwise", "layerwise-barrier", "host-yield"):
            if name in arms:
                yield f"it is {found.ratio(name, 'chunkflow'):.2f}x as fast as {name}"
        yield "collectives are inflated by " + ", ".join(
            f"{100 * x:.1f} % ({name})" for name, x in found.inflation.items() if x is not None and name != "resident"
        )
    if "replanned" in arms:
        yield (
            f"planned from figures wrong by 2: {found.ratio('misjudged', 'chunkflow'):.3f} of the step of the right ones; "
            f"planned again after two steps: {found.ratio('replanned', 'chunkflow'):.3f}"
        )
    for share in BUDGETS:
        ours, theirs = f"chunkflow@{share}%", f"layerwise-prefix@{share}%"
        if found.link is not None and ours in arms and theirs in arms:
            bound = max(base, (arms[ours].moved_bytes_per_step or 0) / found.link.requested)
            yield (
                f"residency {share} %: {step[ours] / bound:.3f} of max(resident, streamed bytes / link), and "
                f"{found.ratio(theirs, ours):.2f}x as fast as a leading prefix of whole layers in the same bytes"
            )
    worst = max(found.off, key=lambda n: abs(found.off[n]))
    waits = {n: (p.exposed_h2d_s or 0.0) - (arms[n].exposed_h2d_s or 0.0) for n, p in found.predicted.items()}
    longest = max(waits, key=lambda n: abs(waits[n]) / step[n])
    equal = all(arm.equal_to_resident for arm in arms.values())
    yield (
        f"the predicted step is off by at most {100 * abs(found.off[worst]):.1f} % ({worst}), the predicted wait by at most "
        f"{1e3 * abs(waits[longest]):.0f} ms, {100 * abs(waits[longest]) / step[longest]:.1f} % of the step ({longest})"
    )
    yield f"outputs are {'equal' if equal else 'NOT EQUAL'} bit for bit over all arms and steps"


if __name__ == "__main__":
    main()
