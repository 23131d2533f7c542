"""Reproduce the evaluation of the ChunkFlow paper (arXiv 2605.11335) with the simulator.

    python docs/benchmarks/paper.py [--out docs/benchmarks/paper.md] [--keep FOLDER]

The script traces twelve configurations at full size without weights (about half a minute each), and plans and simulates
each policy.  It writes all figures as JSON next to the page, and makes the page and its pictures from the JSON.  The exit
code is 1 if a claim does not hold.  With ``--keep FOLDER``, the traced problems are stored in a folder, and the next run
reads them from there.  With ``--page-only``, the page and the pictures are made from existing JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_cases import CASES, CHUNK, DEGREE, MACHINE, MIB, ROOMY, Result, play, trace_all
from paper_groups import group_rows
from paper_pictures import draw_breakdown, draw_memory, draw_roofline, draw_steps
from paper_tables import (
    Row,
    arms_rows,
    chunk_rows,
    claims,
    critical_rows,
    equal_step_rows,
    measured_rows,
    residency_rows,
    roofline_rows,
)
from runs import errors_in_a_sentence, saved
from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.hardware import Hardware


def figures(results: list[Result], machine: Hardware) -> dict[str, Any]:
    """Return all figures: the rows of all tables, rates, and the claims that do not hold."""
    small = [r for r in results if r.case.model == "wan2.2-ti2v-5b" and r.case.size in (41, 81)]
    return {
        "machine": machine.name,
        "gemm, TFLOP/s": round(machine.flops("bfloat16") / 1e12),
        "attention, TFLOP/s": round(machine.attention_rate("bfloat16") / 1e12),
        "fitted": {k: v for k, v in machine.sources.items() if v.startswith("fitted")},
        "broken": claims(results),
        "arms": arms_rows(results),
        "at the step of layerwise": equal_step_rows(results),
        "measured": measured_rows(results),
        "chunk size": chunk_rows(small, machine),
        "residency": residency_rows(results, machine),
        "roofline": roofline_rows(results, machine),
        "critical points": critical_rows(),
        "head groups": group_rows(),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Return the figures as JSON, with one row of a table per line."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def document(found: Mapping[str, Any]) -> str:
    """Return the page with the given figures."""
    fitted = "\n".join(f"* `{k}`: {v}." for k, v in found["fitted"].items())
    sizes = {r["configuration"].split()[0]: r["weights, GiB"] for r in found["arms"] if r["arm"] == "resident"}
    whole = ", ".join(f"{size:.2f} GiB ({name})" for name, size in sizes.items())
    broken = found["broken"]
    held = f"These do not hold: {'; '.join(broken)}." if broken else "They hold in all configurations."
    return f"""# The paper's evaluation, simulated

Simulated on `{found["machine"]}` at Ulysses degree {DEGREE}, in bfloat16, with [chunks](../glossary.md#chunk) of
{CHUNK // MIB} MiB. The graphs are full-size graphs of the diffusers classes, traced without weights. Nothing on this page was
run on a GPU. `make paper` writes this page, [all figures](paper.json), and charts: step time (below),
[memory](paper_memory.png), [parts of a step](paper_breakdown.png) and [roofline](paper_roofline.png).

* Steps are denoising steps (two forwards for Wan), with the paper's numbers of frames. All models get one timestep per
  sample, also Wan2.2 5B, whose pipeline in diffusers passes one per token.
* `layerwise` copies the whole next block while a block computes. `layerwise-barrier` also waits for this copy before the
  first all-to-all of each block, like the paper's baseline.
* `chunkflow` is the [smallest plan](../glossary.md#plan) whose step is at most 2 % longer than the step with all
  weights [resident](../glossary.md#resident) (the default). *Same memory* is the fastest plan with the memory of
  `layerwise`. *Same step* is the smallest plan that is as fast as `layerwise`.
* Memory in GiB is the [arena](../glossary.md#arena) plus the resident weights. All weights together have {whole}.
* *Fits* means that copies and collectives, which share PCIe, take no longer than the resident step.

{steps_table(found)}

![simulated step time](paper_steps.png)

At the smallest sizes, `chunkflow` reaches its goal only by keeping half of the weights or more on the GPU. If PCIe is too
slow, only fewer copies help. Copies that fit can still be expensive to hide: if blocks differ, copies must run far ahead,
which takes memory.

## Comparison with measurements

{measured_table(found["measured"])}

Two constants were fitted to this one configuration, and are used for all configurations:

{fitted}

The reference code sends 8 all-to-alls per block, of which 6 carry the latent. diffusers, which is simulated here,
sends 4. In the last two columns, every collective has 1.5 times its bytes. Only one configuration was measured, and
two constants were fitted to it. This table therefore checks consistency, but not the other eleven configurations.

## Exchanges in groups of heads

The tables above are about the paper's method. This one is about an addition of ours: all-to-alls that are divided into
[groups of heads](../guide.md#exchanges-in-groups-of-heads), so that one group is exchanged while another computes attention
(`exchange_groups`). All weights are resident, so the gain is independent of how weights are copied.

{groups_table(found["head groups"])}

*Groups* is the number of groups with the shortest step. It divides the 12 heads of a rank and is at most 8. The step is
computed from graphs with two and three blocks of each type, because all blocks of a type take equally long; for whole
exchanges this gives the resident steps of the first table. Attention and an all-to-all that overlap are assumed to take
{groups_factor(found)} times as long. This factor has not been measured on a GPU.

## Chunk size and critical points

{chunk_sentence(found["chunk size"])}

A block of F FLOPs on one rank hides its copy if F is at least F*. The table shows the size at which F = F* on two ranks,
from the paper's closed formulas and constants (its B_pref includes contention):

{critical_table(found["critical points"])}

Here, GEMMs reach {found["gemm, TFLOP/s"]} TFLOP/s and attention reaches {found["attention, TFLOP/s"]} TFLOP/s; the paper
assumes 454 TFLOP/s. Blocks therefore hide their copies at smaller sizes than in the paper.

## Claims

The following claims are checked. {held}

* The step of the default plan is within 2 % of the resident step (its goal) wherever the copies fit.
* The plan with the memory of `layerwise` is never slower than `layerwise`.
* The plan with the step time of `layerwise` is never larger than `layerwise`.
* The measured steps are predicted within 15 %.
"""


def _table(rows: Sequence[Sequence[object]], *headers: str) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def steps_table(found: Mapping[str, Any]) -> str:
    arms = {(row["configuration"], row["arm"]): row for row in found["arms"]}
    rows = []
    for equal, roof in zip(found["at the step of layerwise"], found["roofline"], strict=True):
        name = equal["configuration"]
        steps = [
            arms[name, arm]["step, s"] for arm in ("resident", "layerwise", "layerwise-barrier", "chunkflow", ROOMY)
        ]
        sizes = [arms[name, arm]["weights, GiB"] for arm in ("layerwise", "chunkflow")]
        small = equal["chunkflow's at that step, GiB"]
        fits = "yes" if roof["fits the link beside collectives"] else "no"
        rows.append((name, *(f"{x:.3f}" for x in steps), *(f"{x:.2f}" for x in (*sizes, small)), fits))
    return _table(
        rows, "", "resident, s", "layerwise, s", "-barrier, s", "chunkflow, s", "same memory, s",
        "layerwise, GiB", "chunkflow, GiB", "same step, GiB", "fits",
    )  # fmt: skip


def groups_table(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["configuration"], f"{row['resident, s']:.3f}", f"{row['in groups, s']:.3f}",
            f"{row['to whole exchanges']:.3f}", row["groups"],
        )
        for row in rows
    ]  # fmt: skip
    return _table(cells, "", "whole exchanges, s", "in groups, s", "ratio", "groups")


def groups_factor(found: Mapping[str, Any]) -> float:
    return load_profile(found["machine"]).attention_slowdown


def measured_table(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["configuration"], row["arm"], f"{row['measured, s']:.3f}", f"{row['simulated, s']:.3f}",
            f"{row['off, %']:+.1f}", f"{row['at 1.5 times the bytes, s']:.3f}", f"{row['then off, %']:+.1f}",
        )
        for row in rows
    ]  # fmt: skip
    return _table(
        cells, "", "arm", "measured, s", "simulated, s", "error, %", "with 1.5 times the bytes, s", "error, %"
    )


def chunk_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence on the effect of the chunk size on the first configuration, with the memory of layerwise as
    budget."""
    name = rows[0]["configuration"]
    first, *_, last = [row for row in rows if row["configuration"] == name]

    def both(heading: str, form: str) -> str:
        return f"{first[heading]:{form}} to {last[heading]:{form}}"

    return (
        f"With chunks of {both('chunk, MiB', 'd')} MiB, a collective would wait for one chunk for at most "
        f"{both('tail, ms', '.2f')} ms.\nA step of {name} with the memory of `layerwise` takes {both('step, s', '.3f')} s."
    )


def critical_table(rows: Sequence[Row]) -> str:
    cells = [[row["size"], *(f"{x:.1f}" for x in list(row.values())[1:])] for row in rows]
    return _table(cells, "critical point", *list(rows[0])[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="The paper's evaluation, from the simulator.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--keep", type=Path, help="folder for the traced problems, from which the next run reads them")
    parser.add_argument(
        "--page-only", action="store_true", help="make the page and the pictures from the JSON next to it"
    )
    arguments = parser.parse_args()
    kept = arguments.out.with_suffix(".json")
    if not arguments.page_only:
        kept.write_text(as_text(measure(arguments.keep)))
    found = saved(kept, "make paper")
    draw(found, arguments.out.parent)
    arguments.out.write_text(document(found))
    for sentence in found["broken"]:
        print(f"does not hold: {sentence}", file=sys.stderr)
    return 1 if found["broken"] else 0


def measure(keep: Path | None) -> dict[str, Any]:
    """Trace, plan and simulate all configurations; return all figures.  ``keep``: a folder for the traced problems, or
    None."""
    machine = load_profile(MACHINE)
    pairs = list(zip(CASES, trace_all(keep), strict=True))
    results = [play(case, problem, machine) for case, problem in tqdm(pairs, unit="case", desc="planning")]
    return figures(results, machine)


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Write the pictures of the figures to a folder."""
    draw_steps(found["arms"], folder / "paper_steps.png")
    draw_memory(found["arms"], folder / "paper_memory.png")
    draw_breakdown(found["arms"], folder / "paper_breakdown.png")
    draw_roofline(found["roofline"], load_profile(found["machine"]), folder / "paper_roofline.png")


if __name__ == "__main__":
    with errors_in_a_sentence():
        sys.exit(main())
