"""The evaluation of the ChunkFlow paper (arXiv 2605.11335), point for point, from the simulator.

    python docs/benchmarks/paper.py [--out docs/benchmarks/paper.md] [--keep FOLDER]

Traces twelve configurations at full size without weights (about half a minute each), plans and simulates each policy, and
writes all figures as JSON beside the page, the page from them, and pictures.  The exit code is 1 if a claim does not hold.
``--keep``: a folder for the traced problems, from which the next run reads them.  ``--page-only``: makes the page from the
JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_cases import CASES, CHUNK, DEGREE, MACHINE, MIB, ROOMY, Result, play, trace_all
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
from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.hardware import Hardware


def figures(results: list[Result], machine: Hardware) -> dict[str, Any]:
    """All figures: rows of tables, rates, and the claims that do not hold."""
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
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Figures as JSON, a row of a table in a line."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def document(found: Mapping[str, Any]) -> str:
    """The page of the figures."""
    fitted = "\n".join(f"* `{k}`: {v}" for k, v in found["fitted"].items())
    sizes = {r["configuration"].split()[0]: r["weights, GiB"] for r in found["arms"] if r["arm"] == "resident"}
    whole = ", ".join(f"{size:.2f} GiB ({name})" for name, size in sizes.items())
    held = "; ".join(found["broken"]) or "hold in all configurations"
    return f"""# The paper's evaluation, from the simulator

Simulated on `{found["machine"]}` at Ulysses degree {DEGREE}, bfloat16, chunks of {CHUNK // MIB} MiB; full-size graphs of the
diffusers classes, traced without weights. Nothing here was run on a GPU. `make paper` writes this page, [all
figures](paper.json) and pictures: steps, [weights](paper_memory.png), [where the time goes](paper_breakdown.png),
[roofline](paper_roofline.png).

Steps are denoising steps (Wan: two forwards), with the paper's numbers of frames and one timestep per sample, also for
Wan2.2 5B, whose pipeline in diffusers passes one per token. `layerwise` fetches the whole next block while a block computes;
`layerwise-barrier` also waits for it before the first all-to-all of each block, like the baseline of the paper's reference
code; `chunkflow` is the smallest plan whose step is at most 2 % longer than with all weights resident (the default); *in its
memory*, the fastest plan in that of layerwise; *at its step*, the smallest plan at that of layerwise. Weights are the arena
and the resident ones; in all there are {whole}. *Fits*: copies and
collectives, which share the link, take no longer than the resident step.

{steps_table(found)}

![simulated step time](paper_steps.png)

At the smallest sizes, `chunkflow` reaches its step only by keeping half of the weights or more: where the link is too slow,
only fewer copies help. A step that fits is not always cheap to hide: where blocks differ, copies must run far ahead, in
memory.

## Compared with measurements

{measured_table(found["measured"])}

Fitted to that one configuration, and used for all:

{fitted}

The reference code sends 8 all-to-alls a block, of which 6 carry the latent; diffusers, which is simulated here, sends 4. In
the last columns, every collective has 1.5 times its bytes. One configuration was measured, and two constants were fitted to
it: this checks consistency, not the other eleven.

## Chunks and critical points

{chunk_sentence(found["chunk size"])}

A block of F FLOPs on one rank hides its copy at F* or above. The size at which F = F* on two ranks, from the paper's closed
formulas and constants (its B_pref include contention):

{critical_table(found["critical points"])}

Here GEMMs reach {found["gemm, TFLOP/s"]} TFLOP/s and attention {found["attention, TFLOP/s"]}, the paper's 454: blocks hide
their copies at smaller sizes.

## Claims that must hold

The default plan is within 2 % of resident (its goal) wherever the step fits; the plan in layerwise's memory is never slower
than layerwise, and the plan at its step never larger; the measured steps are predicted within 15 %: {held}.
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
        rows, "", "resident, s", "layerwise", "-barrier", "chunkflow", "in its memory",
        "layerwise, GiB", "chunkflow", "at its step", "fits",
    )  # fmt: skip


def measured_table(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["configuration"], row["arm"], f"{row['measured, s']:.3f}", f"{row['simulated, s']:.3f}",
            f"{row['off, %']:+.1f}", f"{row['at 1.5 times the bytes, s']:.3f}", f"{row['then off, %']:+.1f}",
        )
        for row in rows
    ]  # fmt: skip
    return _table(cells, "", "arm", "measured, s", "simulated, s", "off, %", "at 1.5 times the bytes, s", "off, %")


def chunk_sentence(rows: Sequence[Row]) -> str:
    """What chunk sizes make of the first of the configurations, in layerwise's memory."""
    name = rows[0]["configuration"]
    first, *_, last = [row for row in rows if row["configuration"] == name]

    def both(heading: str, form: str) -> str:
        return f"{first[heading]:{form}} to {last[heading]:{form}}"

    return (
        f"Chunks of {both('chunk, MiB', 'd')} MiB: the longest that a collective would wait for one is "
        f"{both('tail, ms', '.2f')} ms,\nand {name} in layerwise's memory takes {both('step, s', '.3f')} s."
    )


def critical_table(rows: Sequence[Row]) -> str:
    cells = [[row["size"], *(f"{x:.1f}" for x in list(row.values())[1:])] for row in rows]
    return _table(cells, "critical point", *list(rows[0])[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="The paper's evaluation, from the simulator.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--keep", type=Path, help="folder for the traced problems, from which the next run reads them")
    parser.add_argument("--page-only", action="store_true", help="make the page from the JSON beside it")
    arguments = parser.parse_args()
    kept = arguments.out.with_suffix(".json")
    if not arguments.page_only:
        kept.write_text(as_text(measure(arguments.keep, arguments.out.parent)))
    found = json.loads(kept.read_text())
    arguments.out.write_text(document(found))
    for sentence in found["broken"]:
        print(f"does not hold: {sentence}", file=sys.stderr)
    return 1 if found["broken"] else 0


def measure(keep: Path | None, folder: Path) -> dict[str, Any]:
    """All figures, by tracing, planning and simulating.  Draws the pictures into ``folder``."""
    machine = load_profile(MACHINE)
    pairs = list(zip(CASES, trace_all(keep), strict=True))
    results = [play(case, problem, machine) for case, problem in tqdm(pairs, unit="case", desc="planning")]
    draw_steps(results, folder / "paper_steps.png")
    draw_memory(results, folder / "paper_memory.png")
    draw_breakdown(results, folder / "paper_breakdown.png")
    draw_roofline(results, machine, folder / "paper_roofline.png")
    return figures(results, machine)


if __name__ == "__main__":
    sys.exit(main())
